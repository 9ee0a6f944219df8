"""Further faults in addition to the first diff, and the diffs that follow from the first diff."""

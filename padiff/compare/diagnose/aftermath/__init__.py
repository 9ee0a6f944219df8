"""Further faults besides the first diff, and the diffs that follow from the first diff."""

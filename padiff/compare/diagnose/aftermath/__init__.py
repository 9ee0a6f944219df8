"""Which diffs follow from the first one, and which faults do not."""

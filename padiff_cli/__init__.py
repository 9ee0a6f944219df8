"""The command line: ``padiff demo | run | show | compare | ...``."""

"""What layers and functions compute, in float64: arithmetic on arrays, which knows of no record and no framework."""

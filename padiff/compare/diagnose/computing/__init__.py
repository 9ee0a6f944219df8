"""Computing again, in numpy and float64, what the calls of a trace made of what went into them."""

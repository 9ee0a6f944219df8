"""The arithmetic of layers and functions in float64, on plain arrays without records or frameworks."""

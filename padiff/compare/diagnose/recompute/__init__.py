"""Computing a recorded step again in float64, each side from what it recorded itself."""

"""Computing the calls of a trace again, in numpy and float64, from their recorded inputs."""

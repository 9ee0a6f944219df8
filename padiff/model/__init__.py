"""Models: their trees of layers, selections of layers, and equivalences between the two frameworks."""

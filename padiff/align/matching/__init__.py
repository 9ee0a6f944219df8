"""Matching of layers: evidence about two layer trees, and the assignment that fits the evidence best."""

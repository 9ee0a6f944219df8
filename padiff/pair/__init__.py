"""Pairs of a step's records: partners in the other run, and the layout between them."""

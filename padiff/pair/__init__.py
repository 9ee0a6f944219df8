"""Pairs: which record of a step answers to which, and in which layout."""

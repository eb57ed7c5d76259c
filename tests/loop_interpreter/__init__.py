"""Runs the loop IR on NumPy arrays: the oracle of every printer, and a race detector."""

"""The loop IR run on NumPy arrays: the oracle of every printer, and of races."""

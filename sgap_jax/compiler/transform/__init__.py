"""Schedules: the transformations of a statement, what makes one legal, and presets by name.

The top room of the compiler: a `Schedule` prints itself through lowering and the printers.
"""

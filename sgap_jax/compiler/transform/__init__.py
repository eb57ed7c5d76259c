"""Schedules: the transformations of a statement, and the rules that make them legal.

This is the topmost package of the compiler: `Schedule.source` calls lowering and the printers.
"""

"""Index notation and concrete index notation: what is computed, and in which loops.

Pure descriptions: nothing here knows of arrays, machines or the loop IR.
"""

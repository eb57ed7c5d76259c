"""Index notation (what is computed) and concrete index notation (in which loops).

These are pure descriptions: nothing here depends on arrays, machines or the loop IR.
"""

"""The loop IR: nodes, constructors of expressions with constant folding, passes, and C text."""

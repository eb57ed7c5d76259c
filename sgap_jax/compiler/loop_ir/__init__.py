"""The loop IR: its nodes, expressions folded as they are made, passes, and its text as C."""

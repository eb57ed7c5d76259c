"""Formats of sparse operands, the `SparseArray` pytree, its constructors and its files."""

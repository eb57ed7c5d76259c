"""Peers on a CPU: other libraries, each at its best; a module per operation, a function per peer.

A function takes the operands (A a SciPy CSR matrix, dense operands NumPy, all float32), makes the
peer's plan (its own formats, inspection, compilation) and returns a callable without arguments that
computes the result and returns when it is ready. It raises Unavailable or ImportError if the peer
is not installed or does not apply; the message is reported. All peers use all cores.

`PEERS` of each module lists them. `GOAL` lists those over which "the best peer" of the tables is
taken: what a user would choose. The others are shown beside it: MKL driven through ctypes, numba
compiled again for each width, and dense products, which compute something else.
"""

"""The most blocks of a launch along each axis of its grid, and threads of a block, on every GPU."""

GRID_X = 2**31 - 1
GRID_Y = 65535
GRID_Z = 65535

THREADS = 1024  # of a block in all, and along x and y
THREADS_Z = 64

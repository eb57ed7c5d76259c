"""The most blocks of a launch along each axis of its grid, on every GPU."""

GRID_X = 2**31 - 1
GRID_Y = 65535
GRID_Z = 65535

"""Launch plans of bitmaps (cuda/bitmap/bitmap.cuh): of a mask, and the entries of its bits; the
prefix sum of the counts of bits between the two is XLA's."""

from sgap_jax.launch.kernel_call import KernelCall

_THREADS = 256  # of a block, one for each word
_WORD_COLUMNS = 32


def of_mask_plan(rows: int, columns: int) -> KernelCall:
    """The launch that makes a bitmap, of the rows of a whole batch.

    Input: mask bool [rows, columns]. Output: words uint32 [rows, ceil(columns / 32)].
    """
    words = rows * -(-columns // _WORD_COLUMNS)
    pointers = ["const unsigned char", "unsigned"]
    return _plan("BitmapOfMaskKernel", pointers, words, (rows, columns), 1)


def entries_plan(shape: tuple[int, int, int], nse: int) -> KernelCall:
    """The launch that writes the rows and columns of the bits that are set.

    Inputs: words uint32 of the shape (batch, m, words of a row), begins int32 [batch, words + 1]:
    how many bits are set before each word, and in all, the greatest int32 if there are more.
    Outputs: rows and columns int32 [batch, nse].
    """
    batch, m, row_words = shape
    pointers = ["const unsigned", "const int", "int", "int"]
    scalars = m * row_words, row_words, nse, batch
    return _plan("BitmapEntriesKernel", pointers, m * row_words, scalars, batch)


def _plan(
    kernel: str, pointers: list[str], words: int, scalars: tuple[int, ...], batch: int
) -> KernelCall:
    return KernelCall.of(
        "bitmap.cuh",
        kernel,
        [_THREADS],
        pointers,
        scalars,
        blocks=(-(-words // _THREADS), 1),
        threads=_THREADS,
        batch=batch,
        structure=False,
    )

"""Planted bugs: 20 in Python, 32 in the C++ kernels, 9 in the CUDA kernels.

Each is one replacement of text that makes a documented result wrong: a lost tail, a lost scale, a
wrong stride, a wrong tie-break, a sign in one branch. `tests/mutants/run.py` plants them one at a
time in a copy of the checkout and says which tier of the suite notices each. A bug whose text has
moved or changed is an error of the list: give it its new place, or take another bug of that room.
"""

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The rooms of the package, of cpu/ and of cuda/; each has at least one bug.
ROOMS = (
    "formats",
    "schedules",
    "tuning",
    "launch",
    "primitives/common",
    "primitives/spmm",
    "primitives/sddmm",
    "primitives/sparse_softmax",
    "primitives/row_reduce",
    "primitives/gspmm",
    "primitives/gsddmm",
    "primitives/attention",
    "primitives/einsum",
    "compiler/notation",
    "compiler/transform",
    "compiler/lowering",
    "compiler/llvm",
    "compiler/cuda",
    "nn",
    "masks",
    "cpu/spmm",
    "cpu/spmm_cvs",
    "cpu/sddmm",
    "cpu/sparse_softmax",
    "cpu/row_reduce",
    "cpu/gspmm",
    "cpu/attention",
    "cpu/structure",
    "cpu/partition",
    "cpu/parallel",
    "cpu/half",
    "cpu/each_structure",
    "cpu/top_k",
    "cpu/nucleus",
    "cpu/bitmap",
    "cpu/transpose_structure",
    "cpu/regrow",
    "cuda/spmm",
    "cuda/spmm_octet",
    "cuda/sddmm",
    "cuda/sparse_softmax",
    "cuda/row_reduce",
    "cuda/gspmm",
    "cuda/attention",
    "cuda/attention_backward",
    "cuda/bitmap",
)


# Words of /proc/cpuinfo: a processor with AVX-512, and one of Intel's.
WIDE = ("avx512bw",)
INTEL = (*WIDE, "GenuineIntel")


@dataclasses.dataclass(frozen=True)
class Bug:
    """One replacement of text in one file.

    Attributes:
      name: what the runner calls it.
      room: one of ROOMS.
      file: the file, from the root of the checkout.
      text: what is replaced; it occurs there exactly once.
      replacement: what stands there instead.
      breaks: what is wrong then, in one line.
      focus: the test files or folders that are most likely to notice it.
      needs: words of /proc/cpuinfo without which no processor runs what it breaks.
    """

    name: str
    room: str
    file: str
    text: str
    replacement: str
    breaks: str
    focus: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def language(self) -> str:
        suffix = Path(self.file).suffix
        return {".py": "Python", ".cuh": "CUDA"}.get(suffix, "C++")


class Moved(ValueError):
    """The text of a bug is not in its file exactly once."""


def planted(bug: Bug, content: str, root: Path = ROOT) -> str:
    """The content of the bug's file with the bug in it.

    Raises:
      Moved: the text does not occur exactly once; names the files that have it now.
    """
    count = content.count(bug.text)
    if count != 1:
        raise Moved(
            f"{bug.name}: expected its text once in {bug.file}, found it {count} times. "
            f"{_whereabouts(bug, root)} Mend the entry in tests/mutants/bugs.py."
        )
    return content.replace(bug.text, bug.replacement)


def _whereabouts(bug: Bug, root: Path) -> str:
    suffix = Path(bug.file).suffix
    paths = [
        p for folder in ("sgap_jax", "cpu", "cuda") for p in (root / folder).rglob(f"*{suffix}")
    ]
    found = [str(p.relative_to(root)) for p in sorted(paths) if bug.text in p.read_text()]
    return f"It is in {', '.join(found)} now." if found else "No other file has it."


PYTHON = (
    Bug(
        name="entries_before_the_first_offset",
        room="formats",
        file="sgap_jax/formats/structure.py",
        text="stored = (place >= offsets[0]) & (place < offsets[-1])",
        replacement="stored = place < offsets[-1]",
        breaks="of unchecked offsets that begin above 0, the entries before them are counted",
        focus=("tests/property/test_unchecked_structures.py",),
    ),
    Bug(
        name="windows_of_a_grid_rounded_down",
        room="schedules",
        file="sgap_jax/schedules/point.py",
        text="groups = -(-problem.nnz // (int(self.nnz or 1) * group * self.walk))",
        replacement="groups = problem.nnz // (int(self.nnz or 1) * group * self.walk)",
        breaks="the last nonzeros have no group where the grid has no room to spare",
        focus=(
            "tests/conformance/test_atomic_parallelism.py",
            "tests/conformance/test_spmm_cuda.py",
            "tests/emulated/test_spmm_kernels.py",
        ),
    ),
    Bug(
        name="noise_chooses_a_schedule",
        room="tuning",
        file="sgap_jax/tuning.py",
        text="best if _GAIN * ratios[best] < 1 else default",
        replacement="best if ratios[best] < 1 else default",
        breaks="tune takes a schedule that is faster than the first by less than 2%",
        focus=("tests/conformance/test_tune.py",),
    ),
    Bug(
        name="stride_of_a_batched_dense_operand",
        room="launch",
        file="sgap_jax/launch/spmm.py",
        text="values_stride,\n        k * n if batches[1] > 1 else 0",
        replacement="values_stride,\n        m * n if batches[1] > 1 else 0",
        breaks="spmm on CUDA reads B of the other elements of a batch in the wrong place",
        focus=("tests/conformance/test_spmm_cuda.py", "tests/emulated/test_spmm_kernels.py"),
    ),
    Bug(
        name="batch_of_nothing",
        room="primitives/common",
        file="sgap_jax/primitives/_batch.py",
        text="return next((size for size in sizes if size != 1), 1)",
        replacement="return max(sizes)",
        breaks="abstract evaluation makes a batch of 0 and an unbatched operand a batch of 1",
        focus=("tests/grad/test_empty_batches.py",),
    ),
    Bug(
        name="folded_columns_come_back_transposed",
        room="primitives/spmm",
        file="sgap_jax/primitives/spmm.py",
        text="return y.reshape(y.shape[:2] + x_moved.shape[2:]), 2",
        replacement="return y.reshape(y.shape[:2] + (n, size)), 3",
        breaks="vmap of spmm over a B of 2 or more narrow columns mixes elements and columns",
        focus=("tests/grad/test_batching.py",),
    ),
    Bug(
        name="gradient_in_weights_without_scale",
        room="primitives/sddmm",
        file="sgap_jax/primitives/sddmm.py",
        text="return 2, bind_sddmm(x, y, cotangent, scale, *arrays, schedule=schedule, **of)",
        replacement="return 2, bind_sddmm(x, y, cotangent, None, *arrays, schedule=schedule, **of)",
        breaks="the gradient of a weighted and scaled sddmm in the weights lacks the scale",
        focus=("tests/grad/test_derivatives.py",),
    ),
    Bug(
        name="second_derivative_of_softmax",
        room="primitives/sparse_softmax",
        file="sgap_jax/primitives/sparse_softmax.py",
        text="dp * row_dot(p, t) - p * row_dot(dp, t))",
        replacement="dp * row_dot(p, t) + p * row_dot(dp, t))",
        breaks="second derivatives of sparse_softmax have one term with the wrong sign",
        focus=("tests/grad/test_derivatives.py",),
    ),
    Bug(
        name="unchecked_entries_in_row_max",
        room="primitives/row_reduce",
        file="sgap_jax/primitives/row_reduce.py",
        text="nothing=-math.inf if primitive is row_max_p else 0.0",
        replacement="nothing=0.0",
        breaks="row_max of unchecked arrays is 0 where a negative row has an entry out of range",
        focus=("tests/property/test_unchecked_structures.py",),
    ),
    Bug(
        name="batches_of_the_argmax_gather",
        room="primitives/gspmm",
        file="sgap_jax/primitives/gspmm_arg_gather.py",
        text="batches = [avals[i].shape[0] for i in (0, -2, -1)]",
        replacement="batches = [avals[i].shape[0] for i in (0, -1, -2)]",
        breaks="the gradient of a maximum in X on CUDA, with only one of d and arg batched",
        focus=(
            "tests/emulated/test_gspmm_lowering.py",
            "tests/grad/test_emulated.py",
        ),
    ),
    Bug(
        name="sums_of_gsddmm_in_halves",
        room="primitives/gsddmm",
        file="sgap_jax/primitives/gsddmm.py",
        text='wide = dtype if op == "mul" else accumulator(dtype)',
        replacement="wide = dtype",
        breaks='gsddmm with "add", "sub", "div" and "copy" rounds 16-bit sums more than once',
        focus=("tests/oracle/test_gsddmm.py",),
    ),
    Bug(
        name="sign_of_the_gradient_in_sinks",
        room="primitives/attention",
        file="sgap_jax/primitives/attention_primitives.py",
        text="dsinks = -(share * unfused.delta(dout, x.out, dlse)).sum(1)",
        replacement="dsinks = (share * unfused.delta(dout, x.out, dlse)).sum(1)",
        breaks="the gradient of attention in its sinks has the wrong sign",
        focus=("tests/grad/test_attention.py", "tests/grad/test_derivatives.py"),
    ),
    Bug(
        name="ties_of_extrema_counted_twice",
        room="primitives/einsum",
        file="sgap_jax/primitives/einsum_plain.py",
        text="shares = jnp.where(jnp.isnan(best), jnp.nan, jnp.maximum(ties, 1))",
        replacement="shares = jnp.where(jnp.isnan(best), jnp.nan, jnp.ones_like(ties))",
        breaks="each of several products that tie gets the whole gradient of einsum's maximum",
        focus=("tests/oracle/test_einsum_extrema.py",),
    ),
    Bug(
        name="a_maximum_passes_for_a_sum",
        room="compiler/notation",
        file="sgap_jax/compiler/notation/derivatives.py",
        text="return tuple(words), tuple(attained), tuple(terms), expression.reduction",
        replacement="return tuple(words), tuple(attained), tuple(terms)",
        breaks="the schedule of a sum is taken for a maximum over the same operands",
        focus=(
            "tests/oracle/test_einsum_extrema.py",
            "tests/compiler/test_schedule.py",
            "tests/compiler/test_derivatives.py",
        ),
    ),
    Bug(
        name="a_maximum_distributes_over_products",
        room="compiler/transform",
        file="sgap_jax/compiler/transform/workspaces.py",
        text='if summed and others and expression.reduction != "+":',
        replacement='if summed and others and expression.reduction == "min":',
        breaks="precompute takes the maximum over some factors before it multiplies by the others",
        focus=(
            "tests/compiler/test_legality.py",
            "tests/compiler/test_attained.py",
            "tests/compiler/test_refused.py",
        ),
    ),
    Bug(
        name="maximum_of_rows_that_are_not_stored",
        room="compiler/lowering",
        file="sgap_jax/compiler/lowering/reductions.py",
        text="return identity if sparse else None",
        replacement="return 0.0 if sparse else None",
        breaks="in a maximum, rows that a compressed level does not store are 0, not -infinity",
        focus=("tests/oracle/test_einsum_extrema.py", "tests/compiler/test_lower.py"),
    ),
    Bug(
        name="last_term_of_several_sums",
        room="compiler/llvm",
        file="sgap_jax/compiler/llvm/unroll_and_jam.py",
        text="mask = builder.first_lanes(constant(end - at))",
        replacement="mask = builder.first_lanes(constant(end - at - 1))",
        breaks="compiled for a CPU, sums that go on together lack a last term that fills no vector",
        focus=("tests/compiler/test_apart.py",),
    ),
    Bug(
        name="start_of_a_maximum_in_float64",
        room="compiler/cuda",
        file="sgap_jax/compiler/cuda/print_cuda.py",
        text='-math.inf: "0xfff0000000000000"}',
        replacement='-math.inf: "0x7ff0000000000000"}',
        breaks="maxima of float64 that are compiled for CUDA start at +infinity",
        focus=(
            "tests/compiler/test_cuda.py",
            "tests/compiler/test_chains_cuda.py",
            "tests/compiler/test_attained.py",
        ),
    ),
    Bug(
        name="rotary_embedding_turned_back",
        room="nn",
        file="sgap_jax/nn/attend.py",
        text="b * cos + a * sin",
        replacement="b * cos - a * sin",
        breaks="rotary embeddings turn half of the features the other way: no rotation",
        focus=("tests/nn/test_attention.py",),
    ),
    Bug(
        name="band_of_even_width",
        room="masks",
        file="sgap_jax/masks/patterns.py",
        text="first = np.arange(L) - width // 2\n",
        replacement="first = np.arange(L) - (width - 1) // 2\n",
        breaks="a band of even width lies one key too far to the right",
        focus=("tests/property/test_masks.py",),
    ),
)

CPP = (
    Bug(
        name="split_rows_of_wide_products",
        room="cpu/spmm",
        file="cpu/spmm/spmm_kernel.cc",
        text="sums[j] += partials[i * args.n + c + j];",
        replacement="sums[j] += partials[i * args.n + j];",
        breaks="a row in pieces repeats its first columns where B is wider than one pass takes",
        focus=(
            "tests/oracle/test_spmm.py",
            "tests/oracle/test_large.py",
            "tests/property/test_spmm.py",
        ),
    ),
    Bug(
        name="third_column_of_narrow_products",
        room="cpu/spmm_cvs",
        file="cpu/spmm/spmm_cvs_narrow.h",
        text="if (kColumns == 1 && block.out_stride == 1 && block.rows >= kRows) {",
        replacement="if (kColumns == 1 && block.rows >= kRows) {",
        breaks="of a B of 3 columns, the last one of C in CVS(V) goes to the wrong places",
        focus=("tests/oracle/test_vectors.py",),
    ),
    Bug(
        name="last_of_widened_values",
        room="cpu/spmm_cvs",
        file="cpu/spmm/spmm_cvs_rows.h",
        text="if (i < count) widen(count - kWidth);",
        replacement="if (i > count) widen(count - kWidth);",
        breaks="of 16-bit values that are widened together, those left over are not",
        focus=("tests/oracle/test_without_xla.py", "tests/oracle/test_vectors.py"),
    ),
    Bug(
        name="first_half_of_vectors_of_two_rows",
        room="cpu/spmm_cvs",
        file="cpu/spmm/spmm_cvs_narrow.h",
        text="sums[0] += others;",
        replacement="sums[0] = others;",
        breaks="of 16 bits, CVS(2) and one column, four of each eight vectors take no part",
        focus=("tests/oracle/test_vectors.py",),
        needs=WIDE,
    ),
    Bug(
        name="second_register_of_four_rows",
        room="cpu/spmm_cvs",
        file="cpu/spmm/spmm_cvs_narrow.h",
        text="sums[i] += lanes[i] * Load<X, kWidth>(x + i * kWidth);",
        replacement="sums[i] += lanes[i] * Load<X, kWidth>(x);",
        breaks="A^T B of 8 columns takes two of each four rows of B twice",
        focus=("tests/oracle/test_vectors.py",),
        needs=WIDE,
    ),
    Bug(
        name="second_half_of_eight_entries",
        room="cpu/spmm",
        file="cpu/spmm/spmm_narrow_rows.h",
        text="sums[c] = Half<Acc, 8>(together[c / 2], c % 2);",
        replacement="sums[c] = Half<Acc, 8>(together[c / 2], 0);",
        breaks="of 16 bits and one column, four of each eight entries of a long row count twice",
        focus=("tests/oracle/test_without_xla.py", "tests/oracle/test_spmm.py"),
        needs=INTEL,
    ),
    Bug(
        name="fours_at_the_end_of_a_gathered_row",
        room="cpu/spmm",
        file="cpu/spmm/spmm_gathered.h",
        text="first = count >= Index(4 * g + 4) ? sum : first;",
        replacement="first = count > Index(4 * g + 4) ? sum : first;",
        breaks="of one column, a long row loses the last of the fours after its whole steps",
        focus=("tests/oracle/test_without_xla.py", "tests/oracle/test_spmm.py"),
        needs=INTEL,
    ),
    Bug(
        name="index_behind_the_last_row_of_one_column",
        room="cpu/spmm",
        file="cpu/spmm/spmm_gathered.h",
        text="return _mm256_cmpge_epu32_mask(greatest,",
        replacement="return _mm256_cmpgt_epu32_mask(greatest,",
        breaks="of one column and long rows, an index of k is followed to what lies behind x",
        focus=("tests/oracle/test_without_xla.py",),
        needs=INTEL,
    ),
    Bug(
        name="entry_behind_the_end_of_a_masked_row",
        room="cpu/spmm",
        file="cpu/spmm/spmm_rows.h",
        text="sums[j] = left > i ? more[j] : sums[j];",
        replacement="sums[j] = left >= i ? more[j] : sums[j];",
        breaks="of 5 to 8 columns and many short rows, a row takes the first entry of the next",
        focus=("tests/oracle/test_without_xla.py",),
        needs=INTEL,
    ),
    Bug(
        name="rows_after_the_masked_ones",
        room="cpu/spmm",
        file="cpu/spmm/spmm_rows.h",
        text="rest.rows -= inside, rest.y += inside * block.y_stride;",
        replacement="rest.rows -= inside, rest.y += inside;",
        breaks="of 5 to 8 columns and many short rows, a task's last rows go to the wrong places",
        focus=("tests/oracle/test_without_xla.py",),
        needs=INTEL,
    ),
    Bug(
        name="values_that_are_not_in_order_yet",
        room="cpu/spmm",
        file="cpu/spmm/spmm_ffi.cc",
        text="} else if (expected == kBegun) {",
        replacement="} else if (expected > kWritten) {",
        breaks="a tile of A^T B reads values that another thread is still putting in order",
        focus=("tests/oracle/test_without_xla.py",),
    ),
    Bug(
        name="half_of_what_rounding_takes",
        room="cpu/top_k",
        file="cpu/top_k/top_k_indexer_bytes.h",
        text="row.raised += taken.of_positive, row.off += taken.of_all;",
        replacement="row.raised += 0.5f * taken.of_positive, row.off += taken.of_all;",
        breaks="an indexer misses keys whose scores of bytes are far below those in floats",
        focus=("tests/oracle/test_top_k.py",),
    ),
    Bug(
        name="row_between_strips",
        room="cpu/spmm",
        file="cpu/spmm/spmm_cvs_kernel.cc",
        text="strip.begin = strip.end) {",
        replacement="strip.begin = strip.end + 1) {",
        breaks="of 16 bits and many columns, column vectors lose a block row after some",
        focus=("tests/oracle/test_vectors.py",),
    ),
    Bug(
        name="pieces_of_values_in_order",
        room="cpu/spmm",
        file="cpu/spmm/spmm_ffi.cc",
        text="args->ordered = true;",
        replacement="args->ordered = false;",
        breaks="long rows of A^T B have other bits in the tile that another thread puts in order",
        focus=("tests/oracle/test_without_xla.py",),
    ),
    Bug(
        name="entry_at_the_end_of_a_block_of_rows",
        room="cpu/sddmm",
        file="cpu/sddmm/sddmm_kernel.cc",
        text="cursors[r - first_row] = int32_t(stop);",
        replacement="cursors[r - first_row] = int32_t(stop) + 1;",
        breaks="sddmm in blocks of rows of Y leaves out the first entry of each row in a block",
        focus=("tests/oracle/test_without_xla.py",),
    ),
    Bug(
        name="scale_of_the_first_element",
        room="cpu/sddmm",
        file="cpu/sddmm/sddmm_ffi.cc",
        text="args.scale_stride = scaled > 1 ? 1 : 0;",
        replacement="args.scale_stride = 0;",
        breaks="sddmm under vmap over its scale multiplies all elements by the first scale",
        focus=("tests/grad/test_batching.py",),
    ),
    Bug(
        name="scale_between_pieces_of_softmax",
        room="cpu/sparse_softmax",
        file="cpu/sparse_softmax/sparse_softmax_kernel.cc",
        text="sum += partial[phases.length] * __builtin_exp(distance * size);",
        replacement="sum += partial[phases.length] * __builtin_exp(distance);",
        breaks="the softmax of a row in pieces is wrong with a scale that is not 1",
        focus=("tests/oracle/test_sparse_softmax.py",),
    ),
    Bug(
        name="nan_lost_in_row_max",
        room="cpu/row_reduce",
        file="cpu/row_reduce/row_reduce_loops.h",
        text="return a == a ? greater : a;",
        replacement="return greater;",
        breaks="row_max forgets a NaN when a number follows it",
        focus=("tests/oracle/test_row_reduce.py",),
    ),
    Bug(
        name="ties_of_a_minimum_in_pieces",
        room="cpu/gspmm",
        file="cpu/gspmm/gspmm_kernel.cc",
        text="taken = (kept == kept) & ~(other.kept >= kept);",
        replacement="taken = (kept == kept) & ~(other.kept > kept);",
        breaks="of equal minima in a row of several pieces, or with NaN, the later one is named",
        focus=("tests/oracle/test_gspmm.py", "tests/grad/test_gspmm.py"),
    ),
    Bug(
        name="causal_mask_within_vectors",
        room="cpu/attention",
        file="cpu/attention/attention_rows.h",
        text="return args.is_causal && own + 1 < length ? own + 1 : length;",
        replacement="return args.is_causal && own + at.lanes < length ? own + at.lanes : length;",
        breaks="is_causal leaves no key out within the vectors of CVS(V)",
        focus=("tests/oracle/test_attention.py",),
    ),
    Bug(
        name="sign_of_the_cotangent_of_lse",
        room="cpu/attention",
        file="cpu/attention/attention_backward.h",
        text="delta[r] = sum - dlse[r * args.row_heads];",
        replacement="delta[r] = sum + dlse[r * args.row_heads];",
        breaks="gradients of attention by way of lse have the wrong sign",
        focus=("tests/grad/test_attention.py",),
    ),
    Bug(
        name="values_of_the_first_element",
        room="cpu/structure",
        file="cpu/common/structure.cc",
        text="for (int64_t b = 0; b < batch; ++b, from += count * bytes) {",
        replacement="for (int64_t b = 0; b < batch; ++b) {",
        breaks="a call on wrong index arrays takes the first element's values for the whole batch",
        focus=("tests/property/test_unchecked_structures.py", "tests/errors/test_traced.py"),
    ),
    Bug(
        name="last_entries_of_a_split_row",
        room="cpu/partition",
        file="cpu/common/partition.cc",
        text="const int64_t piece_end = i + 1 == pieces ? end : begin + (i + 1) * piece;",
        replacement="const int64_t piece_end = begin + (i + 1) * piece;",
        breaks="a row in pieces loses the entries that do not fill a piece",
        focus=("tests/oracle/test_spmm.py", "tests/oracle/test_large.py"),
    ),
    Bug(
        name="last_phase_of_small_calls",
        room="cpu/parallel",
        file="cpu/common/parallel.h",
        text="if (phase > 0 && phase + 1 == phases && !last_needed()) break;",
        replacement="if (phase > 0 && phase + 1 == phases) break;",
        breaks="a call on the calling thread leaves out its last phase even where it is needed",
        focus=(
            "tests/property/test_unchecked_structures.py",
            "tests/oracle/test_sparse_softmax.py",
        ),
    ),
    Bug(
        name="ties_of_bfloat16_rounded_up",
        room="cpu/half",
        file="cpu/simd/half.h",
        text="const auto rounded = (bits & 0x10000) != 0 ? half + 1 : half;",
        replacement="const auto rounded = half + 1;",
        breaks="a number halfway between two of bfloat16 is not rounded to the even one",
        focus=("tests/oracle/test_spmm.py", "tests/oracle/test_arithmetic.py"),
    ),
    Bug(
        name="last_phase_that_some_structures_need",
        room="cpu/each_structure",
        file="cpu/common/each_structure.cc",
        text="return !conditional_ || std::any_of(",
        replacement="return !conditional_ || std::all_of(",
        breaks="of several structures with wrong index arrays in some, those stay without results",
        focus=("tests/oracle/test_each_structure.py", "tests/property"),
    ),
    Bug(
        name="last_row_behind_a_short_one",
        room="cpu/top_k",
        file="cpu/top_k/top_k_ffi.cc",
        text="if (place != begins[r]) {",
        replacement="if (place != begins[r] && r + 1 < args.rows) {",
        breaks="the last row of a selection is not moved up where rows before it have fewer keys",
        focus=("tests/oracle/test_top_k.py", "tests/oracle/test_select.py"),
    ),
    Bug(
        name="many_equal_scores_at_the_end_of_a_nucleus",
        room="cpu/nucleus",
        file="cpu/nucleus/nucleus_kernel.cc",
        text="return {low, Ties(weights[i], reach - above)};",
        replacement="return {low, count};",
        breaks="of many equal scores that a nucleus ends among all are stored",
        focus=("tests/oracle/test_nucleus.py",),
    ),
    Bug(
        name="entries_of_a_bitmap_that_do_not_fit",
        room="cpu/bitmap",
        file="cpu/bitmap/bitmap_kernel.cc",
        text="if (i < row_end) place += CountBits(words + i, row_end - i);  // they do not fit",
        replacement="",
        breaks="entries beyond the capacity are not counted, so that checked() passes",
        focus=("tests/oracle/test_bitmap.py", "tests/oracle/test_select.py"),
    ),
    Bug(
        name="first_index_of_later_blocks",
        room="cpu/transpose_structure",
        file="cpu/transpose_structure/transpose_structure_ffi.cc",
        text="for (int64_t i = 0; i < block; ++i) place += totals_[b * blocks_ + i];",
        replacement="for (int64_t i = 1; i < block; ++i) place += totals_[b * blocks_ + i];",
        breaks="the transposed structure of many columns overlaps itself from the second block on",
        focus=("tests/conformance/test_transpose_structure.py",),
    ),
    Bug(
        name="second_group_in_a_cell",
        room="cpu/regrow",
        file="cpu/regrow/regrow_ffi.cc",
        text="x >> 32 == y >> 32;",
        replacement="x == y;",
        breaks="of several stored groups in one cell all take part in RigL, not the first",
        focus=("tests/oracle/test_regrow.py",),
    ),
    Bug(
        name="first_sequence_of_a_structure",
        room="cpu/attention",
        file="cpu/attention/attention_calls.h",
        text="Window{batch / structures * i, batch / structures, 0, heads}",
        replacement="Window{i, batch / structures, 0, heads}",
        breaks="attention with a structure for several sequences each takes wrong sequences",
        focus=("tests/oracle/test_each_structure.py", "tests/oracle/test_attention.py"),
    ),
)

CUDA = (
    Bug(
        name="first_segment_of_a_group",
        room="cuda/spmm",
        file="cuda/common/group.cuh",
        text="return lane == 0 || previous != key;",
        replacement="return previous != key;",
        breaks="a segment reduction does not store the segment that begins in the first lane",
        focus=("tests/emulated/test_spmm_kernels.py",),
    ),
    Bug(
        name="last_step_of_a_block_row",
        room="cuda/spmm_octet",
        file="cuda/spmm/spmm_octet.cuh",
        text="const int own = (count + kWarps * kStep - 1) / (kWarps * kStep);",
        replacement="const int own = (count + kWarps * kStep / 2) / (kWarps * kStep);",
        breaks="octet tiles leave out the last vectors of a block row where they are few",
        focus=("tests/emulated/test_spmm_octet_kernels.py",),
    ),
    Bug(
        name="sums_of_groups_of_two",
        room="cuda/sddmm",
        file="cuda/sddmm/sddmm.cuh",
        text="const unsigned i = group.lane / kLanes * kSums + j;",
        replacement="const unsigned i = group.lane / kLanes + j;",
        breaks="sddmm with 2 lanes in a group stores the sums of the second one too early",
        focus=("tests/emulated/test_sddmm_kernels.py",),
    ),
    Bug(
        name="stride_of_a_batched_tangent",
        room="cuda/sparse_softmax",
        file="cuda/sparse_softmax/sparse_softmax.cuh",
        text="tangent + batch * tangent_stride + lane.first;",
        replacement="tangent + batch * probabilities_stride + lane.first;",
        breaks="the softmax's Jacobian with a batch of tangents alone takes the first one for all",
        focus=("tests/emulated/test_row_kernels.py",),
    ),
    Bug(
        name="nan_lost_in_float64",
        room="cuda/row_reduce",
        file="cuda/common/group.cuh",
        text="return x > y || x != x ? x : y; }",
        replacement="return x > y ? x : y; }",
        breaks="row_max of float64 forgets a NaN",
        focus=("tests/emulated/test_row_kernels.py",),
    ),
    Bug(
        name="nan_among_messages",
        room="cuda/gspmm",
        file="cuda/gspmm/gspmm.cuh",
        text="(!(message <= best) & (best == best));",
        replacement="(message > best);",
        breaks="a maximum of messages passes over NaN",
        focus=("tests/emulated/test_gspmm_kernels.py",),
    ),
    Bug(
        name="stride_of_a_shared_bias",
        room="cuda/attention",
        file="cuda/attention/attention.cuh",
        text="const Size heads_of_bias = Has(kBiasOfHeads) ? heads : 1;",
        replacement="const Size heads_of_bias = heads;",
        breaks="a bias that heads share is read in the wrong place from the second sequence on",
        focus=("tests/emulated/test_attention_kernels.py",),
    ),
    Bug(
        name="keys_past_the_length",
        room="cuda/attention_backward",
        file="cuda/attention/attention_backward.cuh",
        text="const bool kept = valid && column < call.End(lengths, batch);",
        replacement="const bool kept = valid;",
        breaks="keys past the length of their sequence get gradients",
        focus=("tests/emulated/test_attention_kernels.py",),
    ),
    Bug(
        name="first_bit_of_a_word",
        room="cuda/bitmap",
        file="cuda/bitmap/bitmap.cuh",
        text="if (its_begin <= place) from += distance;",
        replacement="if (its_begin < place) from += distance;",
        breaks="the first entry of a word gets the row and columns of the word before",
        focus=("tests/emulated/test_bitmap_kernels.py",),
    ),
)

BUGS = (*PYTHON, *CPP, *CUDA)

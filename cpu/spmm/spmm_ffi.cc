// FFI targets sgap_spmm_csr_v1 and sgap_spmm_cvs_v1 (one handler), sgap_spmm_octet_v1, and
// sgap_spmm_cvs_scatter_v1 and sgap_spmm_octet_scatter_v1.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/partition.h"
#include "cpu/common/slab_memory.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/spmm/spmm.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Multiply-adds that take as long as one entry (or vector) of a single column: a load of its index
// and of a row of x, 0.5 ns.
constexpr int64_t kEntryWork = 16;

// Values of y that one task of the scatter's second phase adds up.
constexpr int64_t kAddedValues = 16 << 10;

struct SpmmSchedule {
  int64_t tile_columns, chunk_nonzeros;
  bool pack;
};

// Tiles of so many columns each, or one of all columns where that is 0.
void CutColumns(int64_t tile_columns, ColumnTiles* tiles) {
  tiles->tile_columns = tile_columns == 0 ? tiles->n : std::min(tile_columns, tiles->n);
  tiles->tiles = (tiles->n + tiles->tile_columns - 1) / tiles->tile_columns;
  tiles->slabs = {};
}

// A copy, in the order of the entries, of values that are reached through a permutation. Each tile
// of columns reads all values; the first tile that comes to the entries of a task copies them, and
// the others read the copy in order instead of gathering anew.
class OrderedValues {
 public:
  // Without memory for the copy there is none, and all tiles gather.
  void Prepare(const SpmmArgs& args) {
    const int64_t batch = args.values_stride == 0 ? 1 : args.batch;
    memory_ = AcquireWorkspace(size_t(batch) * args.entries * DtypeBytes(args.dtype));
    if (memory_) states_.reset(new int32_t[batch * args.row_tasks]());
  }

  // Lets `args` read the copy of a task's values, which is written first if nobody has. While
  // another thread writes it, `args` stays as it is.
  void Take(int64_t task, SpmmArgs* args) const {
    const int64_t batch = args->values_stride == 0 ? 0 : task / args->row_tasks % args->batch;
    int32_t* const state = &states_[batch * args->row_tasks + task % args->row_tasks];
    int32_t expected = kNone;
    if (__atomic_compare_exchange_n(state, &expected, kBegun, false, __ATOMIC_ACQUIRE,
                                    __ATOMIC_ACQUIRE)) {
      if (DtypeBytes(args->dtype) == sizeof(float)) Write<float>(*args, batch, task);
      if (DtypeBytes(args->dtype) == sizeof(double)) Write<double>(*args, batch, task);
      __atomic_store_n(state, kWritten, __ATOMIC_RELEASE);
    } else if (expected == kBegun) {
      return;
    }
    args->values = memory_.get();
    args->permutation = nullptr;
    args->ordered = true;
  }

  explicit operator bool() const { return states_ != nullptr; }

 private:
  enum State { kNone, kBegun, kWritten };

  template <typename T>
  void Write(const SpmmArgs& args, int64_t batch, int64_t task) const {
    const T* const from = static_cast<const T*>(args.values) + batch * args.values_stride;
    T* const to = static_cast<T*>(memory_.get()) + batch * args.values_stride;
    const auto [begin, end] = args.EntriesOf(task);
    for (int64_t p = begin; p < end; ++p) to[p] = from[args.permutation[p]];
  }

  Workspace memory_;
  std::unique_ptr<int32_t[]> states_;
};

// What a call owns until its last task is done.
struct SpmmCall {
  SpmmArgs args;
  Kernel<SpmmArgs> kernel;
  ProductPlan plan;
  SlabMemory slabs;
  std::unique_ptr<char[]> values;  // of compacted vectors
  OrderedValues ordered;
  int64_t tasks, work;
  int32_t wrong = 0;  // where args.wrong points

  bool Run(const Structure& structure, int64_t task) const {
    if (!args.wrong && !structure.EntriesHold(args.EntriesOf(task))) return false;
    if (ordered) {
      SpmmArgs own = args;
      ordered.Take(task, &own);
      kernel(own, task);
      return true;
    }
    kernel(args, task);
    return !args.wrong || !__atomic_load_n(args.wrong, __ATOMIC_RELAXED);
  }
  void Finish(const CompactStructure&) const {}
};

std::shared_ptr<SpmmCall> Begin(const SpmmArgs& operands, Kernel<SpmmArgs> kernel,
                                const Structure& structure, const CompactStructure* compact,
                                const SpmmSchedule& schedule, int64_t threads) {
  auto call = std::make_shared<SpmmCall>();
  call->kernel = kernel;
  SpmmArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  args.permutation = structure.permutation;
  if (kernel == Kernels().Spmm && !args.permutation) args.wrong = &call->wrong;
  const size_t element = DtypeBytes(args.dtype);
  if (compact && kernel != Kernels().Spmm && !args.transpose) {
    // The kernels of vectors read values in order: copies those that compaction kept.
    const int64_t batch = args.values_stride == 0 ? 1 : args.batch;
    call->values = TakeEntries(args.values, batch, args.length * element, *compact);
    args.values = call->values.get();
  }
  CutColumns(schedule.tile_columns, &args);
  const int64_t chunk = std::max<int64_t>(1, schedule.chunk_nonzeros / args.length);
  const size_t piece = size_t(args.batch) * args.piece_rows * args.n * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) =
      call->plan.Cut(args.offsets, structure.rows, chunk, args.Walks(), piece);
  call->tasks = args.Tasks();
  const int64_t entries = args.offsets[structure.rows] + structure.rows;
  call->work = args.batch * entries * std::max<int64_t>(args.length * args.n, kEntryWork);
  if (schedule.pack) {
    const size_t slab = size_t(args.k) * args.tile_columns * AccumulatorBytes(args.dtype);
    args.slabs = call->slabs.Acquire(threads, call->tasks, slab);
  }
  // Not of 16 bits: values in order are multiplied in pairs in bfloat16, which gives other bits,
  // and float16 was not measured.
  const bool wide = args.dtype == Dtype::kFloat32 || args.dtype == Dtype::kFloat64;
  if (kernel == Kernels().Spmm && args.permutation && args.tiles > 1 && wide) {
    call->ordered.Prepare(args);
  }
  return call;
}

// The batch of a product of checked values and x; -1, with an error, if theirs do not agree.
int64_t CommonBatch(ffi::AnyBuffer values, ffi::AnyBuffer x, std::string* error) {
  const int64_t value_batch = values.dimensions()[0], x_batch = x.dimensions()[0];
  *error = UnlikeBatches("values and x", value_batch, x_batch);
  return !error->empty() ? -1 : value_batch == 1 ? x_batch : value_batch;
}

// What is wrong with the operands; empty if nothing. Entries: values have rank 2, y has as many
// rows as offsets say, and the permutation is optional. Vectors: values have rank 3, y's own shape
// says how many rows it has, and the transpose, and only that, needs a permutation.
std::string CheckSpmm(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                      ffi::AnyBuffer permutation, ffi::AnyBuffer x, ffi::AnyBuffer y, bool vectors,
                      bool transpose) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  std::string error = vectors ? Mismatch("values", values, type, {kAnySize, kAnySize, kAnySize})
                              : Mismatch("values", values, type, {kAnySize, kAnySize});
  if (!error.empty()) return error;
  const int64_t entries = values.dimensions()[1], length = vectors ? values.dimensions()[2] : 1;
  if (!(error = BadLength(length)).empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  if (!(error = Mismatch("indices", indices, ffi::S32, {entries})).empty()) return error;
  const bool permuted = vectors ? transpose : permutation.element_count() > 0;
  if (vectors || permuted) {
    error = Mismatch("permutation", permutation, ffi::S32, {permuted ? entries : 0});
    if (!error.empty()) return error;
  }
  const int64_t batch = CommonBatch(values, x, &error);
  if (!error.empty()) return error;
  const int64_t rows = offsets.dimensions()[0] - 1, n = x.dimensions()[2];
  if (!vectors) return Mismatch("y", y, type, {batch, rows, n});
  if (!(error = Mismatch("y", y, type, {batch, kAnySize, n})).empty()) return error;
  const int64_t m = y.dimensions()[1];
  return Mismatch("offsets", offsets, ffi::S32, {(transpose ? m : (m + length - 1) / length) + 1});
}

// The length of vectors; entries are vectors of one.
int64_t LengthOf(ffi::AnyBuffer values) {
  return values.dimensions().size() == 3 ? values.dimensions()[2] : 1;
}

// Empty for the vectors that kernels of tiles take: bfloat16, 2 to 32 of them.
std::string BadOctets(ffi::AnyBuffer values) {
  const int64_t length = LengthOf(values);
  const bool holds = length >= 2 && length <= 32 && (length & (length - 1)) == 0;
  if (values.element_type() == ffi::BF16 && holds) return "";
  return "values: expected vectors of 2, 4, 8, 16 or 32 bfloat16";
}

// Runs `kernel` on checked operands; `args` has what the kernels differ in.
ffi::Future RunProduct(const Pool& pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                       ffi::AnyBuffer indices, ffi::AnyBuffer permutation, ffi::AnyBuffer x,
                       ffi::Result<ffi::AnyBuffer> y, const SpmmSchedule& schedule,
                       Kernel<SpmmArgs> kernel, SpmmArgs args) {
  SetOperands(values, x, *y, args);
  args.entries = values.dimensions()[1];
  args.length = LengthOf(values);
  args.piece_rows = args.transpose ? 1 : args.length;
  args.batch = y->dimensions()[0];
  if (args.batch == 0 || args.m == 0 || args.n == 0) return Finished();

  AdviseHugePages(args.y, y->size_bytes());
  const int64_t size = args.transpose ? (args.k + args.length - 1) / args.length : args.k;
  return RunOnStructure(
      pool, StructureOf(offsets, indices, permutation, size),
      [=](const Structure& valid, const CompactStructure* compact, int64_t threads) {
        return Begin(args, kernel, valid, compact, schedule, threads);
      });
}

std::string BadTile(int64_t tile_columns, int64_t chunk_nonzeros) {
  std::string error = BadChunk(chunk_nonzeros);
  if (!error.empty() || tile_columns >= 0) return error;
  return "tile_columns: expected >= 0, got " + std::to_string(tile_columns);
}

// The target of vectors has an attribute `transpose`, that of entries none.
ffi::Future SpmmHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets, IndexArray indices,
                        IndexArray permutation, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                        int64_t tile_columns, int64_t chunk_nonzeros, bool pack,
                        std::optional<bool> transpose) {
  const bool vectors = transpose.has_value();
  std::string error =
      CheckSpmm(values, offsets, indices, permutation, x, *y, vectors, transpose.value_or(false));
  if (error.empty()) error = BadTile(tile_columns, chunk_nonzeros);
  if (!error.empty()) return Failed("spmm: " + error);
  SpmmArgs args = {};
  args.transpose = transpose.value_or(false);
  return RunProduct(pool, values, offsets, indices, permutation, x, y,
                    {tile_columns, chunk_nonzeros, pack},
                    vectors ? Kernels().SpmmCvs : Kernels().Spmm, args);
}

ffi::Future SpmmOctetHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                             IndexArray indices, IndexArray permutation, ffi::AnyBuffer x,
                             ffi::Result<ffi::AnyBuffer> y, int64_t tile_columns,
                             int64_t chunk_nonzeros, int64_t step) {
  std::string error =
      CheckSpmm(values, offsets, indices, permutation, x, *y, /*vectors=*/true, false);
  if (error.empty()) error = BadOctets(values);
  if (error.empty()) error = BadTile(tile_columns, chunk_nonzeros);
  if (error.empty() && step != 16 && step != 32) {
    error = "step: expected 16 or 32, got " + std::to_string(step);
  }
  if (!error.empty()) return Failed("spmm: " + error);
  SpmmArgs args = {};
  args.step = step;
  return RunProduct(pool, values, offsets, indices, permutation, x, y,
                    {tile_columns, chunk_nonzeros, /*pack=*/false}, Kernels().SpmmOctet, args);
}

struct SpmmScatterCall {
  SpmmScatterArgs args;
  Workspace sums;
  std::vector<int32_t> offsets;  // of narrow products, where those that are given do not hold
  ValidStructure structure;
  std::unique_ptr<char[]> values;  // of compacted vectors
};

std::string CheckSpmmScatter(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                             ffi::AnyBuffer x, ffi::AnyBuffer y) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  const bool entries = values.dimensions().size() == 2;  // vectors of one
  std::string error = entries ? Mismatch("values", values, type, {kAnySize, kAnySize})
                              : Mismatch("values", values, type, {kAnySize, kAnySize, kAnySize});
  if (!error.empty()) return error;
  const int64_t vectors = values.dimensions()[1], length = LengthOf(values);
  if (!(error = BadLength(length)).empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("indices", indices, ffi::S32, {vectors})).empty()) return error;
  const int64_t blocks = (x.dimensions()[1] + length - 1) / length;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {blocks + 1})).empty()) return error;
  const int64_t batch = CommonBatch(values, x, &error);
  return error.empty() ? Mismatch("y", y, type, {batch, kAnySize, x.dimensions()[2]}) : error;
}

template <bool kOctets>
ffi::Future SpmmScatterHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                               IndexArray indices, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                               int64_t tile_columns, int64_t pieces) {
  std::string error = CheckSpmmScatter(values, offsets, indices, x, *y);
  if (error.empty() && kOctets) error = BadOctets(values);
  if (tile_columns < 1) {
    error = "tile_columns: expected >= 1, got " + std::to_string(tile_columns);
  }
  if (pieces < 1 || pieces > 1024) {
    error = "pieces: expected 1 to 1024, got " + std::to_string(pieces);
  }
  if (!error.empty()) return Failed("spmm: " + error);

  auto call = std::make_shared<SpmmScatterCall>();
  SpmmScatterArgs& args = call->args;
  SetOperands(values, x, *y, args);
  args.length = LengthOf(values);
  args.blocks = offsets.dimensions()[0] - 1;
  args.batch = y->dimensions()[0];
  if (args.batch == 0 || args.m == 0 || args.n == 0) return Finished();
  const int64_t vectors = indices.dimensions()[0];
  args.narrow = !kOctets && args.length == 1 && args.n <= kNarrowScatter && tile_columns >= args.n;
  if (args.narrow) {
    args.offsets = Ints(offsets);
    if (!Kernels().offsets_hold(args.offsets, args.blocks, vectors)) {
      call->offsets.resize(args.blocks + 1);
      MakeValid(args.offsets, args.blocks + 1, vectors, call->offsets.data());
      args.offsets = call->offsets.data();
    }
    args.indices = Ints(indices);
  } else {
    call->structure =
        ValidStructure({Ints(offsets), Ints(indices), nullptr, args.blocks, vectors, args.m});
    args.offsets = call->structure.view().offsets;
    args.indices = call->structure.view().indices;
  }
  if (const CompactStructure* compact = call->structure.compact()) {
    const size_t vector = args.length * DtypeBytes(args.dtype);
    call->values = TakeEntries(args.values, values.dimensions()[0], vector, *compact);
    args.values = call->values.get();
  }

  AdviseHugePages(args.y, y->size_bytes());
  args.tile_columns = std::min(tile_columns, args.n);
  args.tiles = (args.n + args.tile_columns - 1) / args.tile_columns;
  args.pieces = pieces;
  const size_t sums = size_t(args.batch) * pieces * args.m * args.n;
  call->sums = AcquireWorkspace(sums * AccumulatorBytes(args.dtype));
  if (!call->sums)
    return Failed("spmm: no memory for the sums of " + std::to_string(pieces) + " pieces");
  args.sums = call->sums.get();
  args.chunk_rows = std::max<int64_t>(1, kAddedValues / (args.n * pieces));
  args.chunks = (args.m + args.chunk_rows - 1) / args.chunk_rows;

  const int64_t entries = args.offsets[args.blocks] * args.length;
  const int64_t width = args.narrow ? std::max(args.n, kEntryWork) : args.n;
  const int64_t work = args.batch * (width * entries + args.n * args.m * pieces);
  return ParallelPhases(
      pool, {args.batch * pieces * args.tiles, args.batch * args.chunks}, work,
      [call, kernel = kOctets ? Kernels().SpmmOctetScatter : Kernels().SpmmScatter](int64_t task) {
        kernel(call->args, task);
      });
}

auto BindSpmm() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // values [batch or 1, entries] or [..., V]
      .Arg<IndexArray>()      // offsets [ceil(m / V) + 1] or [m + 1]
      .Arg<IndexArray>()      // indices [entries]
      .Arg<IndexArray>()      // permutation [0] or [entries]
      .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
      .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
      .Attr<int64_t>("tile_columns")
      .Attr<int64_t>("chunk_nonzeros")
      .Attr<bool>("pack");
}

auto BindSpmmScatter() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // values [batch or 1, vectors, V] or [..., entries]
      .Arg<IndexArray>()      // offsets [ceil(k / V) + 1]
      .Arg<IndexArray>()      // indices [vectors]
      .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
      .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
      .Attr<int64_t>("tile_columns")
      .Attr<int64_t>("pieces");
}

}  // namespace

extern "C" XLA_FFI_Error* SpmmFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<bool, EachStructure<SpmmHandler>::Call, BindSpmm>(frame, "transpose");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmOctetFfi, EachStructure<SpmmOctetHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, vectors, V]
                                  .Arg<IndexArray>()      // offsets [ceil(m / V) + 1]
                                  .Arg<IndexArray>()      // indices [vectors]
                                  .Arg<IndexArray>()      // permutation [0]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<int64_t>("tile_columns")
                                  .Attr<int64_t>("chunk_nonzeros")
                                  .Attr<int64_t>("step"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmScatterFfi, EachStructure<SpmmScatterHandler<false>>::Call,
                              BindSpmmScatter());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmOctetScatterFfi, EachStructure<SpmmScatterHandler<true>>::Call,
                              BindSpmmScatter());

}  // namespace sgap

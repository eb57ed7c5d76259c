// FFI targets sgap_top_k_csr_v1, the k greatest scores of each row as a CSR structure of capacity k
// for each row with the scores as its values; sgap_top_k_indexer_v1, the structure alone, of scores
// that an indexer computes meanwhile, and sgap_top_k_indexer_octet_v1, the same on matrix tiles: of
// bfloat16, or of bytes that are scored first.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"
#include "cpu/top_k/top_k.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskScores = 1 << 16, kTaskRows = 256, kTasksOfThread = 8;
constexpr int64_t kIndexerScores = 1 << 18;  // of a task: they stay in its cache
constexpr int64_t kIndexerRows = 64;
constexpr int64_t kPanelsOfTask = 8, kPanelsOfFewRows = 32;
constexpr int64_t kFewRows = 16;

// Rows are written where they begin if each has all that its limit allows. Where one has fewer,
// for scores of -infinity, the rows behind it move up in a last phase.
struct TopKCall {
  TopKIndexerArgs args;
  size_t value_bytes;
  int64_t batch;
  int32_t* out_offsets;  // [batch, rows + 1]
  std::vector<int32_t> offsets, counts;
  Workspace first;  // what the first phase of an indexer writes
  TaskScratch scratch;

  // Places the results of all rows, and memory of `bytes` for each of so many tasks at once. False
  // where there is none.
  bool Place(size_t bytes, int64_t tasks, int64_t threads) {
    TopKArgs& top_k = args.top_k;
    counts.resize(size_t(batch) * top_k.rows);
    offsets.resize(size_t(batch) * (top_k.rows + 1));
    for (int64_t b = 0; b < batch; ++b) {
      int32_t* begins = offsets.data() + b * (top_k.rows + 1);
      const int32_t* own = top_k.limits + b * top_k.limits_stride;
      for (int64_t r = 0; r < top_k.rows; ++r) {
        const int64_t most = std::min(top_k.k, TopKLimit(own[r], top_k.columns));
        begins[r + 1] = begins[r] + int32_t(most);
      }
    }
    top_k.offsets = offsets.data();
    top_k.counts = counts.data();
    const int64_t together = std::clamp<int64_t>(tasks, 1, std::max<int64_t>(threads, 1));
    return scratch.Acquire(together, int64_t(bytes), 0);
  }

  // Calls run(args with scratch of their own).
  template <typename Run>
  void WithScratch(Run run) {
    scratch.With([&](char* part) {
      TopKIndexerArgs own = args;
      own.top_k.scratch = part;
      run(own);
    });
  }

  void MoveUp(int64_t b) const {
    const TopKArgs& top_k = args.top_k;
    const int32_t* begins = offsets.data() + b * (top_k.rows + 1);
    const int32_t* found = counts.data() + b * top_k.rows;
    const int64_t capacity = top_k.rows * top_k.k;
    int32_t *ends = out_offsets + b * (top_k.rows + 1), *indices = top_k.indices + b * capacity;
    char* values = static_cast<char*>(top_k.values);
    if (values) values += b * capacity * value_bytes;
    int64_t place = 0;
    ends[0] = 0;
    for (int64_t r = 0; r < top_k.rows; ++r) {
      if (place != begins[r]) {
        std::memmove(indices + place, indices + begins[r], found[r] * sizeof(int32_t));
        if (values) {
          std::memmove(values + place * value_bytes, values + begins[r] * value_bytes,
                       found[r] * value_bytes);
        }
      }
      place += found[r];
      ends[r + 1] = int32_t(place);
    }
    std::memset(indices + place, 0, (capacity - place) * sizeof(int32_t));
    if (values) std::memset(values + place * value_bytes, 0, (capacity - place) * value_bytes);
  }
};

std::string BadK(int64_t k, int64_t rows, int64_t columns) {
  if (columns > INT32_MAX) return "2^31 columns or more";
  if (k >= 0 && k <= columns && (rows == 0 || k <= INT32_MAX / rows)) return "";
  return "k: expected 0 to the number of columns, and fewer than 2^31 for all rows, got " +
         std::to_string(k);
}

ffi::Future TopKHandler(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::AnyBuffer limits,
                        ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> offsets,
                        ffi::Result<ffi::AnyBuffer> indices, int64_t k) {
  const ffi::DataType type = scores.element_type();
  if (!ToDtype(type)) {
    return Failed("top_k: scores: expected float32, float64, bfloat16 or float16");
  }
  std::string error = Mismatch("scores", scores, type, {kAnySize, kAnySize, kAnySize});
  if (error.empty()) error = Mismatch("limits", limits, ffi::S32, {kAnySize, kAnySize});
  if (!error.empty()) return Failed("top_k: " + error);
  const auto shape = scores.dimensions();
  const int64_t batch = shape[0], rows = shape[1], columns = shape[2];
  const int64_t limit_batch = limits.dimensions()[0];
  if (limit_batch != batch && limit_batch != 1) {
    error = UnlikeBatches("scores and limits", batch, limit_batch);
    if (error.empty()) error = "limits: more in a batch than scores";
  }
  if (error.empty()) error = Mismatch("limits", limits, ffi::S32, {kAnySize, rows});
  if (error.empty()) error = BadK(k, rows, columns);
  if (error.empty()) error = Mismatch("values", *values, type, {batch, rows * k});
  if (error.empty()) error = Mismatch("offsets", *offsets, ffi::S32, {batch, rows + 1});
  if (error.empty()) error = Mismatch("indices", *indices, ffi::S32, {batch, rows * k});
  if (!error.empty()) return Failed("top_k: " + error);
  if (batch == 0) return Finished();

  const auto call = std::make_shared<TopKCall>();
  TopKArgs& args = call->args.top_k;
  args.dtype = *ToDtype(type);
  args.scores = scores.untyped_data();
  args.limits = Ints(limits);
  args.limits_stride = limit_batch == 1 ? 0 : rows;
  args.indices = Ints(*indices);
  args.values = values->untyped_data();
  args.rows = rows;
  args.columns = columns;
  args.k = k;
  // The first row of a task knows no threshold: more rows where the threads have tasks enough.
  const int64_t busy = batch * rows / (kTasksOfThread * std::max<int64_t>(pool.num_threads(), 1));
  args.task_rows = std::clamp<int64_t>(kTaskScores / std::max<int64_t>(columns, 1), 1, 1024);
  args.task_rows = std::max(args.task_rows, std::min(busy, kTaskRows));
  args.row_tasks = (rows + args.task_rows - 1) / args.task_rows;
  call->batch = batch;
  call->value_bytes = DtypeBytes(args.dtype);
  call->out_offsets = Ints(*offsets);
  const int64_t tasks = batch * args.row_tasks;
  if (!call->Place(size_t(TopKScratch(columns)), tasks, pool.num_threads())) {
    return Failed("top_k: no memory for its scratch");
  }
  return ParallelPhases(pool, {tasks, batch}, batch * rows * columns, [call, tasks](int64_t task) {
    if (task >= tasks) return call->MoveUp(task - tasks);
    call->WithScratch([&](const TopKIndexerArgs& own) { Kernels().TopK(own.top_k, task); });
  });
}

template <bool kTiles>
ffi::Future TopKIndexerHandler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys,
                               ffi::AnyBuffer weights, ffi::AnyBuffer limits,
                               ffi::Result<ffi::AnyBuffer> offsets,
                               ffi::Result<ffi::AnyBuffer> indices, int64_t k) {
  const ffi::DataType type = q.element_type();
  if (!ToDtype(type)) {
    return Failed("top_k: q: expected float32, float64, bfloat16 or float16");
  }
  const int64_t batch = Leading(q, 3);
  if (batch < 0 || keys.dimensions().size() < 2) {
    return Failed("top_k: expected q [..., rows, heads, depth] and keys [..., columns, depth]");
  }
  const int64_t* last = q.dimensions().end() - 3;
  const int64_t rows = last[0], heads = last[1], depth = last[2];
  const int64_t columns = *(keys.dimensions().end() - 2);
  std::string error = NotEach("keys", "q", keys, type, batch, {columns, depth});
  if (error.empty()) error = NotEach("weights", "q", weights, type, batch, {rows, heads});
  if (error.empty()) error = NotEach("limits", "q", limits, ffi::S32, batch, {rows});
  if (error.empty()) error = BadK(k, rows, columns);
  if (error.empty()) error = NotEach("offsets", "q", *offsets, ffi::S32, batch, {rows + 1});
  if (error.empty()) error = NotEach("indices", "q", *indices, ffi::S32, batch, {rows * k});
  if (error.empty() && heads == 0) error = "q: no heads";
  if (!error.empty()) return Failed("top_k: " + error);
  if (batch == 0) return Finished();

  const auto call = std::make_shared<TopKCall>();
  TopKIndexerArgs& args = call->args;
  args = {};
  TopKArgs& top_k = args.top_k;
  top_k.dtype = *ToDtype(type);
  const bool octets = kTiles && top_k.dtype == Dtype::kBFloat16;
  args.tiles = kTiles && !octets;
  top_k.limits = Ints(limits);
  top_k.limits_stride = rows;
  top_k.indices = Ints(*indices);
  top_k.rows = rows;
  top_k.columns = columns;
  top_k.k = k;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  // The keys of few rows are not packed for all of them first, and their columns are divided.
  const bool few = !octets && rows <= kFewRows;
  const int64_t busy = (batch * rows + 8 * threads - 1) / (8 * threads);
  top_k.task_rows = std::clamp<int64_t>(kIndexerScores / std::max<int64_t>(columns, 1), 1,
                                        std::clamp<int64_t>(busy, 1, kIndexerRows));
  if (few) top_k.task_rows = 1;
  top_k.row_tasks = (rows + top_k.task_rows - 1) / top_k.task_rows;
  args.q = q.untyped_data();
  args.keys = keys.untyped_data();
  args.weights = weights.untyped_data();
  args.batch = batch;
  args.heads = heads;
  args.depth = depth;
  const int64_t parts = (depth + kPanelPart - 1) / kPanelPart * kPanelPart;
  args.panel_columns = octets ? kOctetPanelColumns : kPanelColumns;
  args.panel_bytes = args.panel_columns * (octets ? parts * int64_t(DtypeBytes(top_k.dtype))
                                                  : depth * AccumulatorBytes(top_k.dtype));
  const bool rounds = Kernels().adds_integer_pairs && !octets && !few &&
                      AccumulatorBytes(top_k.dtype) == 4 && depth > 0 && depth <= kMostRoundedDepth;
  if (rounds) args.panel_bytes += RoundedPanelBytes(depth);
  args.panels_of_task = few ? kPanelsOfFewRows : kPanelsOfTask;
  args.panel_tasks = (args.PanelCount() + args.panels_of_task - 1) / args.panels_of_task;
  call->batch = batch;
  call->out_offsets = Ints(*offsets);
  // The first phase writes all scores of few rows, else all panels.
  const int64_t of_row = args.panel_columns * int64_t(AccumulatorBytes(top_k.dtype));
  const int64_t first = batch * args.PanelCount() * (few ? rows * of_row : args.panel_bytes);
  const int64_t panels = args.PanelCount();
  const bool bytes_too = rounds && ScoresBytes(columns, k, heads, depth);
  const int64_t of_bytes = bytes_too ? batch * BytePanels(panels) * BytePanelBytes(depth) : 0;
  const int64_t of_keys = bytes_too ? 4 * batch * columns * (RoundedWords(depth) + 1) : 0;
  const int64_t bounds = rounds ? 4 * batch * panels * int64_t(sizeof(float)) : 0;
  call->first = AcquireWorkspace(size_t(std::max<int64_t>(first + of_bytes + of_keys + bounds, 1)));
  if (few) {
    args.scores = call->first.get();
  } else {
    args.panels = static_cast<char*>(call->first.get());
    if (rounds) {
      char* const keys = args.panels + first + of_bytes;
      if (bytes_too) {
        args.byte_panels = args.panels + first;
        args.rounded_keys = reinterpret_cast<int32_t*>(keys);
        args.scales =
            reinterpret_cast<float*>(args.rounded_keys + batch * columns * RoundedWords(depth));
      }
      args.bounds = reinterpret_cast<float*>(keys + of_keys);
    }
  }
  const int64_t first_tasks = batch * args.panel_tasks, tasks = batch * top_k.row_tasks;
  const int64_t bytes = few ? FewRowsScratch(rows, columns, heads, depth)
                            : TopKIndexerScratch(top_k.task_rows, columns, heads, depth);
  if (!call->first || !call->Place(size_t(bytes), few ? first_tasks + tasks : tasks, threads)) {
    return Failed("top_k: no memory for its scratch");
  }
  const int64_t work = batch * rows * columns * heads * (depth + 1);
  const auto kernel = octets ? Kernels().TopKIndexerOctet : Kernels().TopKIndexer;
  const auto run = [call, kernel, first_tasks, tasks, few](int64_t task) {
    if (task >= first_tasks + tasks) return call->MoveUp(task - first_tasks - tasks);
    if (task < first_tasks && !few) return kernel(call->args, task);
    call->WithScratch([&](const TopKIndexerArgs& own) { kernel(own, task); });
  };
  return ParallelPhases(pool, {first_tasks, tasks, batch}, work, run);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopKFfi, TopKHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // scores [batch, rows, columns]
                                  .Arg<ffi::AnyBuffer>()  // limits [batch or 1, rows]
                                  .Ret<ffi::AnyBuffer>()  // values [batch, rows * k]
                                  .Ret<ffi::AnyBuffer>()  // offsets [batch, rows + 1]
                                  .Ret<ffi::AnyBuffer>()  // indices [batch, rows * k]
                                  .Attr<int64_t>("k"));

namespace {

auto IndexerBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // q [..., rows, heads, depth]
      .Arg<ffi::AnyBuffer>()  // keys [..., columns, depth]
      .Arg<ffi::AnyBuffer>()  // weights [..., rows, heads]
      .Arg<ffi::AnyBuffer>()  // limits [..., rows]
      .Ret<ffi::AnyBuffer>()  // offsets [..., rows + 1]
      .Ret<ffi::AnyBuffer>()  // indices [..., rows * k]
      .Attr<int64_t>("k");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopKIndexerFfi, TopKIndexerHandler<false>, IndexerBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TopKIndexerOctetFfi, TopKIndexerHandler<true>, IndexerBinding());

}  // namespace sgap

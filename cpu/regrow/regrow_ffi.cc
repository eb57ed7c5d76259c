// FFI target sgap_regrow_csr_v1: the structure of a sparse matrix after a step in which its groups
// move (regrow.h), and where each kept group was. Index arrays may hold anything.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/regrow/regrow.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskCells = 1 << 16;

struct RegrowCall {
  RegrowArgs args;
  std::vector<RegrowMatrix> matrices;
  std::vector<int64_t> phases;
  Workspace memory;
  TaskScratch scratch;

  // Places the memory of all matrices, and of so many tasks at once. False where there is none.
  bool Place(int64_t threads) {
    char* base = nullptr;
    int64_t used = 0;
    const auto place = [&](auto& array, int64_t count) {
      using T = std::remove_reference_t<decltype(*array)>;
      array = base ? reinterpret_cast<T*>(base + used) : nullptr;
      used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    };
    const auto norm_bytes = int64_t(AccumulatorBytes(args.norms_dtype));
    const auto score_bytes = int64_t(AccumulatorBytes(args.scores_dtype));
    const auto place_all = [&] {
      for (RegrowMatrix& of : matrices) {
        char* keys = nullptr;
        int32_t* offsets = nullptr;
        place(offsets, args.rows + 1), of.offsets = offsets;
        place(of.order, args.groups);
        place(of.moved, args.rows);
        place(of.stored, args.rows);
        place(keys, (args.groups + 16) * norm_bytes), of.keys = keys;
        place(of.marks, args.rows * args.mark_bytes);
        place(of.kept, args.rows);
        place(of.candidates, args.rows);
        place(of.begins, args.row_tasks);
        place(of.lengths, args.row_tasks);
        place(of.ties, args.row_tasks);
        place(keys, (args.rows * args.columns + 16) * score_bytes), of.candidate_keys = keys;
        place(of.candidate_columns, args.rows * args.columns);
      }
    };
    place_all();
    memory = AcquireWorkspace(size_t(used));
    if (!memory) return false;
    base = static_cast<char*>(memory.get());
    used = 0;
    place_all();
    const int64_t tasks = args.batch * args.row_tasks;
    return scratch.Acquire(std::clamp<int64_t>(tasks, 1, std::max<int64_t>(threads, 1)),
                           RegrowScratch(args.task_rows, args.columns), 0);
  }

  void Run(int64_t task) {
    size_t phase = 0;
    for (; task >= phases[phase]; ++phase) task -= phases[phase];
    RegrowArgs own = args;
    own.phase = RegrowPhase(phase);
    if (own.phase == RegrowPhase::kOrder) {
      SortRows(matrices[task / args.row_tasks], task % args.row_tasks);
    }
    const auto run = [&](char* part) {
      own.scratch = part;
      Kernels().Regrow(own, task);
    };
    const bool candidates =
        own.phase == RegrowPhase::kCandidates || own.phase == RegrowPhase::kAllCells;
    candidates ? scratch.With(run) : run(nullptr);
  }

  // Of groups in one cell the first is stored.
  void SortRows(RegrowMatrix& of, int64_t task) const {
    const int64_t begin = task * args.task_rows, end = std::min(begin + args.task_rows, args.rows);
    for (int64_t r = begin; r < end; ++r) {
      const int32_t first = of.offsets[r], count = of.offsets[r + 1] - first;
      const int32_t* indices = of.indices + first;
      int32_t falls = count > 0 && (indices[0] < 0 || indices[count - 1] >= args.columns);
      for (int32_t i = 1; i < count; ++i) falls += indices[i] <= indices[i - 1];
      of.moved[r] = falls != 0;
      of.stored[r] = count;
      if (falls == 0) continue;
      int64_t *order = of.order + first, *last = order;
      for (int32_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= args.columns) continue;
        *last++ = int64_t(indices[i]) << 32 | (first + i);
      }
      std::sort(order, last);
      last = std::unique(order, last, [](int64_t x, int64_t y) { return x >> 32 == y >> 32; });
      of.stored[r] = int32_t(last - order);
    }
  }
};

ffi::Future RegrowHandler(ffi::ThreadPool pool, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                          ffi::AnyBuffer norms, ffi::AnyBuffer scores, ffi::AnyBuffer fraction,
                          ffi::Result<ffi::AnyBuffer> out_offsets,
                          ffi::Result<ffi::AnyBuffer> out_indices,
                          ffi::Result<ffi::AnyBuffer> out_sources) {
  const auto of_norms = ToDtype(norms.element_type()), of_scores = ToDtype(scores.element_type());
  if (!of_norms || !of_scores) {
    return Failed("regrow: norms and scores: expected float32, float64, bfloat16 or float16");
  }
  const int64_t batch = Leading(scores, 2);
  if (batch < 0 || indices.dimensions().size() < 1) {
    return Failed("regrow: expected scores [..., rows, columns] and indices [..., groups]");
  }
  const int64_t rows = scores.dimensions().end()[-2], columns = scores.dimensions().end()[-1];
  const int64_t groups = indices.dimensions().end()[-1];
  if (groups > INT32_MAX || (columns > 0 && rows > INT32_MAX / columns)) {
    return Failed("regrow: 2^31 groups or more");
  }
  const auto each = [&](const char* name, ffi::AnyBuffer buffer, ffi::DataType type,
                        std::initializer_list<int64_t> shape) {
    return NotEach(name, "scores", buffer, type, batch, shape);
  };
  std::string error = each("indices", indices, ffi::S32, {groups});
  if (error.empty()) error = each("offsets", offsets, ffi::S32, {rows + 1});
  if (error.empty()) error = each("norms", norms, norms.element_type(), {groups});
  if (error.empty()) error = each("fraction", fraction, ffi::F32, {});
  if (error.empty()) error = each("new offsets", *out_offsets, ffi::S32, {rows + 1});
  if (error.empty()) error = each("new indices", *out_indices, ffi::S32, {groups});
  if (error.empty()) error = each("sources", *out_sources, ffi::S32, {groups});
  if (!error.empty()) return Failed("regrow: " + error);
  if (batch == 0) return Finished();

  const auto call = std::make_shared<RegrowCall>();
  RegrowArgs& args = call->args;
  args = {};
  args.norms_dtype = *of_norms;
  args.scores_dtype = *of_scores;
  args.batch = batch;
  args.rows = rows;
  args.columns = columns;
  args.groups = groups;
  args.task_rows = std::clamp<int64_t>(kTaskCells / std::max<int64_t>(columns, 1), 1, 1024);
  // One task where there is no row: what lies outside rows is padding.
  args.row_tasks = std::max<int64_t>((rows + args.task_rows - 1) / args.task_rows, 1);
  args.mark_bytes = (columns + 63) / 64 * 8;
  call->matrices.resize(batch);
  args.matrices = call->matrices.data();
  for (int phase = 0; phase < kRegrowPhases; ++phase) {
    call->phases.push_back(batch * (IsOfRows(phase) ? args.row_tasks : 1));
  }
  if (!call->Place(pool.num_threads())) return Failed("regrow: no memory for its scratch");
  for (int64_t b = 0; b < batch; ++b) {
    RegrowMatrix& of = call->matrices[b];
    of.indices = Ints(indices) + b * groups;
    of.norms = static_cast<const char*>(norms.untyped_data()) + b * groups * DtypeBytes(*of_norms);
    of.scores = static_cast<const char*>(scores.untyped_data()) +
                b * rows * columns * DtypeBytes(*of_scores);
    of.fraction = static_cast<const float*>(fraction.untyped_data())[b];
    of.out_offsets = Ints(*out_offsets) + b * (rows + 1);
    of.out_indices = Ints(*out_indices) + b * groups;
    of.out_sources = Ints(*out_sources) + b * groups;
    MakeValid(Ints(offsets) + b * (rows + 1), rows + 1, groups, const_cast<int32_t*>(of.offsets));
  }
  return ParallelPhases(pool, call->phases, batch * (rows * columns + groups),
                        [call](int64_t task) { call->Run(task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RegrowFfi, RegrowHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // offsets [..., rows + 1]
                                  .Arg<ffi::AnyBuffer>()    // indices [..., groups]
                                  .Arg<ffi::AnyBuffer>()    // norms [..., groups]
                                  .Arg<ffi::AnyBuffer>()    // scores [..., rows, columns]
                                  .Arg<ffi::AnyBuffer>()    // fraction [...]
                                  .Ret<ffi::AnyBuffer>()    // offsets [..., rows + 1]
                                  .Ret<ffi::AnyBuffer>()    // indices [..., groups]
                                  .Ret<ffi::AnyBuffer>());  // sources [..., groups]

}  // namespace sgap

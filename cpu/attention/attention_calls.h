// What the handlers of both directions of attention share: where keys and sums lie in memory, the
// phases of tasks, one call for each structure, and the bindings of the terms.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/attention/attention_operands.h"
#include "cpu/common/each_structure.h"
#include "cpu/common/parallel.h"

namespace sgap::attention {

constexpr int64_t kCopyBytes = 64 << 10;   // of one task
constexpr int64_t kHeldBytes = 1 << 20;    // of copies and sums, for each thread
constexpr int64_t kMostBytes = 256 << 20;  // of these, where tasks need not wait for it
constexpr int64_t kExpWork = 16;           // multiply-adds that take as long as one exponential

// The number of key heads in a group, each of which takes `bytes` of memory and has `tasks` that
// can run at once: few, so that the memory stays in the cache, but enough work for `threads`. Where
// that takes kMostBytes, each thread has one task at a time. Results do not depend on it.
inline int64_t GroupSize(const AttentionProblem& problem, int64_t bytes, int64_t tasks,
                         int64_t threads) {
  constexpr int64_t kTasks = 4;  // of a thread: they end at about the same time
  const int64_t all = problem.batch * problem.key_heads;
  const int64_t fit = threads * kHeldBytes / std::max<int64_t>(bytes, 1);
  const auto of_tasks = [&](int64_t count) {
    return (count * threads + tasks - 1) / std::max<int64_t>(tasks, 1);
  };
  const int64_t most = kMostBytes / std::max<int64_t>(bytes, 1);
  const int64_t busy = std::clamp(most, of_tasks(1), of_tasks(kTasks));
  return std::clamp<int64_t>(std::max(fit, busy), 1, std::max<int64_t>(all, 1));
}

// Whether all batch elements share keys or values: these are copied once, so there is one group.
inline bool SharesKeys(const Operands& in, int64_t batch) {
  return batch > 1 && (in.k.dimensions()[0] == 1 || in.v.dimensions()[0] == 1);
}

// How many key heads of a group have rows of their own in x.
inline int64_t Slots(const AttentionProblem& problem, ffi::AnyBuffer x) {
  const bool shared = BatchStride(x) == 0 && problem.batch > 1;
  return shared ? problem.key_heads : problem.group;
}

// Bytes of the copies of a group's keys and values.
inline int64_t CopiesBytes(const Operands& in, const AttentionProblem& problem) {
  const int64_t row = Slots(problem, in.k) * problem.padded_depth +
                      Slots(problem, in.v) * problem.padded_value_depth;
  return problem.keys * row * CopiedBytes(problem, in.octets);
}

// Bytes of the keys and values of one head in accumulators.
inline int64_t HeadBytes(const AttentionProblem& problem) {
  const int64_t row = problem.padded_depth + problem.padded_value_depth;
  return problem.keys * row * int64_t(AccumulatorBytes(problem.dtype));
}

// Sets how K and V are read: where they are, or from copies of a group's in the CopiesBytes at
// `memory`.
inline void PlaceKeys(const Operands& in, char* memory, AttentionProblem* out) {
  const auto rows = [&](ffi::AnyBuffer x, int64_t padded, char* copies) {
    const int64_t slots = copies ? Slots(*out, x) : 0;
    const int64_t depth = x.dimensions()[3];
    const void* source = in.From(x, in.window.first_key_head, depth);
    return KeyRows{source, depth, padded, BatchStride(x), copies, slots};
  };
  const int64_t element = CopiedBytes(*out, in.octets);
  const int64_t k_bytes = Slots(*out, in.k) * out->keys * out->padded_depth * element;
  out->k = rows(in.k, out->padded_depth, memory);
  out->v = rows(in.v, out->padded_value_depth, memory ? memory + k_bytes : nullptr);
  const int64_t row = std::max<int64_t>(out->padded_depth, out->padded_value_depth) * element;
  out->copy_rows = std::max<int64_t>(1, kCopyBytes / std::max<int64_t>(1, row));
  out->copy_chunks = (out->keys + out->copy_rows - 1) / out->copy_rows;
}

// Tasks of each phase: in each group copying, then `phases` phases of `tasks` for each key head.
inline std::vector<int64_t> PhasesOfGroups(const AttentionProblem& problem, int64_t phases,
                                           int64_t tasks) {
  std::vector<int64_t> found;
  const int64_t all = problem.batch * problem.key_heads;
  for (int64_t first = 0; first < all; first += problem.group) {
    const int64_t count = std::min(problem.group, all - first);
    found.push_back(SGAP_ISA::CopyTasks(problem, problem.k, count) +
                    SGAP_ISA::CopyTasks(problem, problem.v, count));
    for (int64_t i = 0; i < phases; ++i) found.push_back(count * tasks);
  }
  return found;
}

// Why K and V cannot be read where they are; empty if they can.
inline std::string CannotRead(const AttentionProblem& problem, bool octets) {
  const bool narrow = problem.dtype == Dtype::kBFloat16 || problem.dtype == Dtype::kFloat16;
  const bool ragged =
      problem.depth != problem.padded_depth || problem.value_depth != problem.padded_value_depth;
  return (narrow && !octets) || ragged
             ? "pack: these K and V can be read only where they are packed"
             : "";
}

// Empty for what kernels of tiles take: bfloat16, in vectors of 4 to 32 rows.
inline std::string BadOctets(const AttentionProblem& problem) {
  const int64_t length = problem.length;
  const bool holds = length >= 4 && length <= 32 && (length & (length - 1)) == 0;
  if (problem.dtype != Dtype::kBFloat16 || !holds)
    return "expected bfloat16 in vectors of 4, 8, 16 or 32 rows";
  if (std::max(problem.depth, problem.value_depth) > kMostOctetDepth)
    return "expected heads of at most " + std::to_string(kMostOctetDepth) + " numbers";
  return "";
}

inline int64_t MultiplyAdds(const AttentionProblem& problem) {
  const int64_t width = std::max<int64_t>(problem.blocks.width, 1);
  const int64_t entries = (problem.vectors + 1) * problem.length * width;
  const int64_t scores = problem.batch * problem.heads * entries;
  return scores * (problem.depth + problem.value_depth + kExpWork);
}

// Runs call(pool, window, offsets, indices) for the window of each structure. Structures are for as
// many heads of keys each, sequence by sequence: for whole sequences, or for heads of one.
template <typename Call>
ffi::Future EachWindow(ffi::ThreadPool threads, const char* op, ffi::AnyBuffer k,
                       IndexArray offsets, IndexArray indices, ffi::AnyBuffer result, Call call) {
  const auto rank4 = [](ffi::AnyBuffer x) { return x.dimensions().size() == 4; };
  if (!rank4(result) || !rank4(k) || k.dimensions()[2] < 1) {
    return Failed(std::string(op) + ": k and the first result: expected rank 4 and heads");
  }
  const int64_t batch = result.dimensions()[0], heads = k.dimensions()[2];
  StructureCount count;
  count.See(offsets);
  count.See(indices);
  if (!count.Found()) return call(Pool(threads), Window{0, batch, 0, heads}, offsets, indices);
  const int64_t structures = *count.Found();
  const bool fits = structures <= batch
                        ? structures > 0 && batch % structures == 0
                        : batch > 0 && structures % batch == 0 && heads % (structures / batch) == 0;
  std::string error = count.Error();
  if (error.empty() && !fits && batch > 0) {
    error = "index arrays: expected one structure for as many heads of keys each, of " +
            std::to_string(batch) + " x " + std::to_string(heads) + ", got " +
            std::to_string(structures);
  }
  if (!error.empty()) return Failed(std::string(op) + ": " + error);
  const auto entries = int64_t(indices.element_count());
  return RunEach(threads, batch == 0 ? 0 : structures, entries, [&](const Pool& pool, int64_t i) {
    StructureSlice slice(i, structures);
    const int64_t of_batch = std::max<int64_t>(1, structures / batch);  // of one sequence
    const int64_t own = heads / of_batch;
    const Window window = structures <= batch
                              ? Window{batch / structures * i, batch / structures, 0, heads}
                              : Window{i / of_batch, 1, i % of_batch * own, own};
    return call(pool, window, slice(offsets), slice(indices));
  });
}

// What the targets with terms have beside the others: arrays, which come before the structure,
// results, which come last, and attributes.
template <bool kTerms, typename Binding>
decltype(auto) WithTermArrays(Binding&& bound) {
  if constexpr (!kTerms) {
    return std::move(bound);
  } else {
    return std::move(bound)
        .template Arg<ffi::AnyBuffer>()   // slopes [batch or 1, H, 1]
        .template Arg<ffi::AnyBuffer>()   // table [batch or 1, H, range]
        .template Arg<ffi::AnyBuffer>()   // query_segments [batch or 1, L]
        .template Arg<ffi::AnyBuffer>()   // key_segments [batch or 1, S]
        .template Arg<ffi::AnyBuffer>()   // offset [batch or 1, 1]
        .template Arg<ffi::AnyBuffer>();  // seeds [batch or 1, H, 2]
  }
}

template <bool kTerms, typename Binding>
decltype(auto) WithTermNumbers(Binding&& bound) {
  if constexpr (!kTerms) {
    return std::move(bound);
  } else {
    return std::move(bound)
        .template Attr<double>("softcap")
        .template Attr<int64_t>("kept")
        .template Attr<double>("keep_scale");
  }
}

}  // namespace sgap::attention

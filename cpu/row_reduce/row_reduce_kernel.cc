#include <type_traits>

#include "cpu/common/partition.h"
#include "cpu/row_reduce/row_reduce.h"
#include "cpu/row_reduce/row_reduce_loops.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {
namespace {

// The first `count` lanes, one row each; mostly the only one.
template <typename T>
void StoreRows(T* target, Vector<Accumulator<T>, kLanes<T>> x, int64_t count) {
  if (count == 1) {
    const Vector<Accumulator<T>, 4> lanes = {x[0]};
    StorePartial<T, 4>(target, lanes, 1);
  } else if (count > 0) {
    StoreCount(target, x, static_cast<int>(count));
  }
}

// The sum in the order of the entries, in one pass over them.
struct AddInOrder : Add {};

// The sum of a row of entries of bfloat16, two registers to a load: one instruction widens either,
// and there are half as many ends for the processor to foresee.
inline Vector<float, 16> SumRow(const BFloat16* values, int64_t count) {
  Vector<float, 16> even{}, odd{};
  const auto add = [&](Vector<uint16_t, 32> bits) {
    const auto pairs = BitCast<Vector<uint32_t, 16>>(bits);
    even += WidenBFloat16<16>(pairs);
    odd += BitCast<Vector<float, 16>>(pairs & 0xffff0000u);
  };
  const auto* const bits = reinterpret_cast<const uint16_t*>(values);
  int64_t i = 0;
  for (; count - i >= 32; i += 32) add(LoadBits<32>(bits + i, 32));
  if (i < count) add(LoadBits<32>(bits + i, static_cast<int>(count - i)));
  return FoldRows(even + odd, OneRow<BFloat16>{count}, Add());
}

// The combination of each of kCount * kLanes neighbouring rows of a block row, over vectors of
// `length` values: register by register, lines of memory would be read again and again.
template <typename T, int kCount, typename Combine, typename Store>
void CombineRows(const T* values, int64_t length, int64_t vectors, Accumulator<T> identity,
                 Store&& store) {
  using V = Vector<Accumulator<T>, kLanes<T>>;
  V combined[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) combined[i] = V{} + identity;
  for (int64_t p = 0; p < vectors; ++p, values += length) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      combined[i] = Combine()(combined[i], Load<T, kLanes<T>>(values + i * kLanes<T>));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) store(combined[i], i * kLanes<T>);
}

template <typename T, typename Walk, typename Combine>
void RowReduceTask(const RowReduceArgs& args, Accumulator<T> identity, int64_t task) {
  using Acc = Accumulator<T>;
  const RowPhases& phases = args.phases;
  const RowPhaseTask at = FindPhase(phases, task);
  const T* values = static_cast<const T*>(args.values) + at.batch * args.numbers;
  T* out = static_cast<T*>(args.rows) + at.batch * phases.rows;
  // Calls store(combinations, how many rows they are of, the first row) for a block row.
  const auto reduce = [&](int64_t begin, int64_t end, auto&& store) {
    if constexpr (std::is_same_v<Walk, Strided<T>> && !std::is_same_v<Combine, Add>) {
      const T* from = values + begin * phases.length;
      int64_t row = 0;
      const auto some = [&](auto count) {
        constexpr int kRows = decltype(count)::value * kLanes<T>;
        for (; phases.length - row >= kRows; row += kRows) {
          CombineRows<T, decltype(count)::value, Combine>(
              from + row, phases.length, end - begin, identity,
              [&](auto x, int64_t at) { store(x, kLanes<T>, row + at); });
        }
      };
      some(std::integral_constant<int, 8>());
      some(std::integral_constant<int, 4>());
      some(std::integral_constant<int, 1>());
      if (row == phases.length) return;
      const Strided<T> walk = {(end - begin) * phases.length, phases.length,
                               static_cast<int>(phases.length - row)};
      const auto term = [&](int64_t i, int count) { return LoadCount(from + row + i, count); };
      return store(Reduce(walk, identity, Combine(), term), walk.Rows(), row);
    }
    Walk::Over(phases.length, begin, end, [&](const Walk& walk, int64_t first, int64_t row) {
      const auto term = [&](int64_t i, int count) { return LoadCount(values + first + i, count); };
      if constexpr (kVectorBytes == 64 && std::is_same_v<Walk, OneRow<BFloat16>> &&
                    std::is_base_of_v<Add, Combine>) {
        return store(SumRow(values + first, walk.numbers), 1, row);
      }
      store(Reduce(walk, identity, Combine(), term), walk.Rows(), row);
    });
  };
  if (at.phase == 0) {
    const RowTask& rows = phases.tasks[at.index];
    if (rows.piece >= 0) {
      double* partial = Partial(phases, at.batch, rows.piece);
      return reduce(rows.entry_begin, rows.entry_end, [&](auto x, int count, int64_t row) {
        for (int i = 0; i < count; ++i) partial[row + i] = x[i];
      });
    }
    for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
      const int64_t first = r * phases.length, begin = phases.offsets[r];
      if (args.operation == RowOperation::kMaxOrZero && begin == phases.offsets[r + 1]) {
        for (int64_t i = first; i < first + phases.length && i < phases.rows; ++i) out[i] = T{};
        continue;
      }
      reduce(begin, phases.offsets[r + 1], [&](auto x, int count, int64_t row) {
        const int64_t left = phases.rows - first - row;
        const bool all = std::is_same_v<Walk, OneRow<T>> || count <= left;
        StoreRows(out + first + row, x, all ? count : left);
      });
    }
  } else if (at.phase == 1) {
    const SplitRow& split = phases.splits[at.index];
    const int64_t first = split.row * phases.length;
    for (int64_t j = 0; j < phases.length && first + j < phases.rows; ++j) {
      Acc total = identity;
      for (int64_t i = 0; i < split.pieces; ++i) {
        total = Combine()(total, Acc(Partial(phases, at.batch, split.first_piece + i)[j]));
      }
      StoreScalar(out + first + j, total);
    }
  }
}

// As StoreCount, of values of type T, which need no rounding.
template <typename T>
void CopyCount(T* target, const T (&lanes)[kLanes<T>], int count) {
  if constexpr (sizeof(T) >= 4) {
    StoreCount(target, Load<T, kLanes<T>>(lanes), count);
  } else if (count == kLanes<T>) {
    __builtin_memcpy(target, lanes, sizeof(lanes));
  } else {
    for (int i = 0; i < count; ++i) target[i] = lanes[i];
  }
}

// Copies of each row's vector to its entries, where a vector is one of many lanes.
template <typename T>
void CopyVectors(const T* row, int64_t length, int64_t vectors, T* to) {
  for (int64_t p = 0; p < vectors; ++p, to += length) __builtin_memcpy(to, row, length * sizeof(T));
}

template <typename T, typename Walk>
void RowBroadcastTask(const RowBroadcastArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_vectors;
  const T* rows = static_cast<const T*>(args.rows) + batch * args.m;
  T* values = static_cast<T*>(args.values) + batch * args.vectors * args.length;
  const int64_t left = args.vectors - begin;
  const int64_t stop = begin + (left < args.chunk_vectors ? left : args.chunk_vectors);
  const int64_t stored = args.offsets[args.block_rows];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t p = end * args.length; p < stop * args.length; ++p) values[p] = T{};
  if (begin == end) return;
  int64_t r = RowOfEntry(args.offsets, args.block_rows, begin);
  for (int64_t p = begin; p < end; ++r) {
    const int64_t row_end = args.offsets[r + 1] < end ? args.offsets[r + 1] : end;
    if constexpr (std::is_same_v<Walk, Strided<T>>) {
      if ((r + 1) * args.length <= args.m) {
        CopyVectors(rows + r * args.length, args.length, row_end - p, values + p * args.length);
        p = row_end;
        continue;
      }
    }
    Walk::Over(args.length, p, row_end, [&](const Walk& walk, int64_t first, int64_t row) {
      row += r * args.length;
      if constexpr (std::is_same_v<Walk, OneRow<T>>) {
        const T value = rows[row];
        for (int64_t i = 0; i < walk.numbers; ++i) values[first + i] = value;
        return;
      }
      T lanes[kLanes<T>];
      for (int i = 0; i < kLanes<T>; ++i) {
        lanes[i] = row + walk.Row(i) < args.m ? rows[row + walk.Row(i)] : T{};
      }
      ForRegisters(walk,
                   [&](int64_t i, int count) { CopyCount(values + first + i, lanes, count); });
    });
    p = row_end;
  }
}

}  // namespace

void RowReduce(const RowReduceArgs& args, int64_t task) {
  DispatchWalk(args.dtype, args.phases.length, [&](auto type, auto of) {
    using T = typename decltype(type)::type;
    using Walk = typename decltype(of)::type;
    if (args.operation == RowOperation::kSum) {
      RowReduceTask<T, Walk, Add>(args, 0, task);
    } else if (args.operation == RowOperation::kSumOnePass) {
      RowReduceTask<T, Walk, AddInOrder>(args, 0, task);
    } else {
      RowReduceTask<T, Walk, Greatest>(args, -static_cast<Accumulator<T>>(__builtin_inf()), task);
    }
  });
}

void RowBroadcast(const RowBroadcastArgs& args, int64_t task) {
  DispatchWalk(args.dtype, args.length, [&](auto type, auto walk) {
    RowBroadcastTask<typename decltype(type)::type, typename decltype(walk)::type>(args, task);
  });
}

}  // namespace sgap::SGAP_ISA

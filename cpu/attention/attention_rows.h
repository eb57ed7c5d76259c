// What the forward and the backward kernel of attention share: copying, rows, blocks of scores.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/attention/attention_terms.h"
#include "cpu/attention/attention_tiles.h"

namespace sgap::SGAP_ISA {

constexpr int64_t kMostRowNumbers = 2 * kMostDepth;  // of the rows of one pass

// Whether long vectors are taken in groups of rows (attention_groups.h), and the fewest and the
// most rows of a pass then: 16 rows fill 32 registers without groups.
constexpr bool kGroupsRows = kVectorBytes >= 32;
template <typename Acc>
constexpr int kFewestGroupedRows = kVectorBytes == 64 ? 32 : 2 * kLanes<Acc>;
constexpr int kMostGroupedRows = 64;
template <typename Acc>
constexpr int kMostPassRows = kGroupsRows ? kMostGroupedRows : kLanes<Acc>;

template <typename T>
void PrefetchRow(const T* row, int64_t depth) {
  for (int64_t d = 0; d < depth; d += 64 / int64_t(sizeof(T))) Prefetch(row + d);
}

constexpr int64_t kCopyAhead = 8;  // prefetched while some are copied for tiles

// Copies a chunk of the keys of one of `count` heads; those of a chunk follow each other, as they
// lie.
template <typename T, typename Copy>
void CopyKeys(const AttentionProblem& args, const KeyRows& x, const GroupTask& at, int64_t count) {
  constexpr int kSize = kLanes<T>;
  const int64_t head = at.first + at.task % count, chunk = at.task / count;
  const int64_t begin = chunk * args.copy_rows;
  const int64_t end = begin + args.copy_rows < args.keys ? begin + args.copy_rows : args.keys;
  const int64_t stride = args.row_key_heads * x.depth;
  const T* from = static_cast<const T*>(x.source) + head / args.key_heads * x.batch_stride +
                  head % args.key_heads * x.depth + begin * stride;
  Copy* to = static_cast<Copy*>(x.copies) + (head % x.slots * args.keys + begin) * x.padded;
  for (int64_t i = begin; i < end; ++i, from += stride, to += x.padded) {
    int64_t d = 0;
    if constexpr (std::is_same_v<T, Copy> && sizeof(T) == 2) {  // for tiles: whole parts
      if (i + kCopyAhead < end) PrefetchRow(from + kCopyAhead * stride, x.depth);
      for (; d < x.padded; d += 32) {
        const int64_t left = x.depth - d;
        const int count = int(left < 0 ? 0 : left < 32 ? left : 32);
        const auto bits = LoadBits<32>(reinterpret_cast<const uint16_t*>(from + d), count);
        __builtin_memcpy(to + d, &bits, sizeof(bits));
      }
    } else {
      for (; d + kSize <= x.depth; d += kSize) Store<Copy, kSize>(to + d, Load<T, kSize>(from + d));
      for (; d < x.depth; ++d) to[d] = LoadScalar<T>(from + d);
      for (; d < x.padded; ++d) to[d] = Copy{};
    }
  }
}

// Whether the task was one of copying; else it counts from the end of those.
template <typename T, typename Copy = Accumulator<T>>
bool CopyTask(const AttentionProblem& args, GroupTask* at) {
  for (const KeyRows* x : {&args.k, &args.v}) {
    const int64_t tasks = CopyTasks(args, *x, at->count);
    if (at->task < tasks) return CopyKeys<T, Copy>(args, *x, *at, tasks / args.copy_chunks), true;
    at->task -= tasks;
  }
  return false;
}

// The keys or values of a head: the first, in accumulators, and how far apart they are.
template <typename Acc>
struct HeadKeys {
  const Acc* first;
  int64_t stride;

  HeadKeys(const AttentionProblem& args, const KeyRows& x, int64_t batch, int64_t key_head) {
    if (x.copies) {
      const int64_t slot = (batch * args.key_heads + key_head) % x.slots;
      first = static_cast<const Acc*>(x.copies) + slot * args.keys * x.padded;
      stride = x.padded;
    } else {
      first = static_cast<const Acc*>(x.source) + batch * x.batch_stride + key_head * x.depth;
      stride = args.row_key_heads * x.depth;
    }
  }
};

// rows [count, depth], `stride` apart, times `scale` -> [height, padded]; zero where there is none.
template <typename T>
void LoadRows(const T* rows, int64_t stride, int64_t count, int64_t depth, int height,
              int64_t padded, Accumulator<T> scale, Accumulator<T>* out) {
  constexpr int kSize = kLanes<T>;
  for (int64_t r = 0; r < height; ++r, out += padded) {
    int64_t d = 0;
    if (r < count) {
      const T* row = rows + r * stride;
      for (; d + kSize <= depth; d += kSize) {
        Store<Accumulator<T>, kSize>(out + d, Load<T, kSize>(row + d) * scale);
      }
      for (; d < depth; ++d) out[d] = LoadScalar<T>(row + d) * scale;
    }
    for (; d < padded; ++d) out[d] = 0;
  }
}

template <typename T>
void StoreRow(const Accumulator<T>* row, int64_t depth, Accumulator<T> scale, T* out) {
  constexpr int kSize = kLanes<T>;
  int64_t d = 0;
  for (; d + kSize <= depth; d += kSize) {
    Store<T, kSize>(out + d, Load<Accumulator<T>, kSize>(row + d) * scale);
  }
  for (; d < depth; ++d) StoreScalar<T>(out + d, row[d] * scale);
}

// Some rows of a block row in one head: where they are and what they see.
struct AttentionRows {
  int64_t batch, head;
  int64_t row, height;  // `height` of these rows are in the matrix
  int64_t lane, lanes;  // of a vector: the first, and how many
};

// Some of the keys. `whole`: all of them, whatever the structure holds.
struct KeyPiece {
  int32_t begin, end;
  bool whole;
};

inline KeyPiece KeyPieceOf(int64_t keys, int64_t piece, int64_t pieces) {
  return {int32_t(keys * piece / pieces), int32_t(keys * (piece + 1) / pieces), pieces == 1};
}

// The next vectors of [begin, end) that follow each other and whose keys are in the piece. Nothing
// is assumed about their order: nobody has checked a traced structure.
struct Run {
  int64_t begin, end;
};

inline Run NextRun(const AttentionProblem& args, const KeyPiece& keys, int64_t begin, int64_t end) {
  if (keys.whole) return {begin, end};
  constexpr int kStep = kVectorBytes / 4;
  using Numbers = Vector<uint32_t, kStep>;
  const auto width = uint32_t(keys.end - keys.begin);
  const auto inside = [&](int64_t p) {
    return uint32_t(args.indices[p]) - uint32_t(keys.begin) < width;
  };
  const auto count = [&](int64_t p) {
    Numbers columns;
    __builtin_memcpy(&columns, args.indices + p, sizeof(columns));
    const Numbers found = columns - uint32_t(keys.begin) < width ? Numbers{} + 1 : Numbers{};
    return FoldLanes<1, uint32_t, kStep>(found)[0];
  };
  while (begin + kStep <= end && count(begin) == 0) begin += kStep;
  while (begin < end && !inside(begin)) ++begin;
  int64_t stop = begin;
  while (stop + kStep <= end && count(stop) == kStep) stop += kStep;
  while (stop < end && inside(stop)) ++stop;
  return {begin, stop};
}

// Prefetches the rows of this pass, or of the next one: `depth` values each, `stride` apart; `rows`
// is row 0 of the head. They lie too far apart for the hardware prefetcher.
template <typename T>
void PrefetchPass(const AttentionProblem& args, const AttentionRows& at, bool next, const T* rows,
                  int64_t stride, int64_t depth) {
  const int64_t begin = next ? at.row + at.lanes : at.row;
  const int64_t end = begin + at.lanes < args.rows ? begin + at.lanes : args.rows;
  for (int64_t i = begin; i < end; ++i) PrefetchRow(rows + i * stride, depth);
}

// Calls body(rows of the pass, AttentionRows) for the rows of a block row: how many is a constant,
// or an int where they are groups of as many as a vector has lanes.
template <typename Acc, typename Body>
void ForRows(const AttentionProblem& args, int64_t batch, int64_t head, int64_t block,
             Body&& body) {
  constexpr int kMost = kLanes<Acc>;
  const int64_t padded =
      args.padded_depth > args.padded_value_depth ? args.padded_depth : args.padded_value_depth;
  for (int64_t lane = 0, taken = 0; lane < args.length; lane += taken) {
    const int64_t left = args.length - lane, row = block * args.length + lane;
    int64_t grouped = 0;
    if (kGroupsRows && left >= kFewestGroupedRows<Acc>) {
      const int64_t fit = kMostRowNumbers / (padded > 0 ? padded : 1);
      grouped = left < kMostGroupedRows ? left : kMostGroupedRows;
      grouped = (grouped < fit ? grouped : fit) / kMost * kMost;
    }
    int rows = 1;
    while (rows < kMost && rows < left && 2 * rows * padded <= kMostRowNumbers) rows *= 2;
    const bool groups = grouped >= kFewestGroupedRows<Acc>;
    taken = groups ? grouped : left < rows ? left : rows;
    int64_t height = args.rows - row;
    height = height < 0 ? 0 : height < taken ? height : taken;
    const AttentionRows at{batch, head, row, height, lane, taken};
    if constexpr (kGroupsRows) {
      if (groups) {
        body(int(grouped), at);
        continue;
      }
    }
    const auto run = [&](auto count) { body(count, at); };
    if constexpr (kMost >= 16) {
      if (rows == 16) run(std::integral_constant<int, 16>());
    }
    if constexpr (kMost >= 8) {
      if (rows == 8) run(std::integral_constant<int, 8>());
    }
    if constexpr (kMost >= 4) {
      if (rows == 4) run(std::integral_constant<int, 4>());
    }
    if (rows == 2) run(std::integral_constant<int, 2>());
    if (rows == 1) run(std::integral_constant<int, 1>());
  }
}

// Where the rows of some columns are. A loop of its own, which compilers turn into vectors.
template <typename Row>
void PointAt(Row* rows, int64_t stride, const int32_t* columns, int count, Row** out) {
  for (int j = 0; j < count; ++j) out[j] = rows + size_t(columns[j]) * size_t(stride);
}

// Adds the bias, times `factor`, to the scores of the `count` vectors from `begin` on: place(key,
// row) says where each is.
template <typename Acc, typename Place>
void AddBias(const AttentionProblem& args, const AttentionRows& at, int64_t begin, int count,
             Place place, Acc* scores) {
  const Acc* bias = static_cast<const Acc*>(args.bias) + at.batch * args.bias_stride +
                    at.head * args.bias_head_stride + begin * args.length + at.lane;
  for (int j = 0; j < count; ++j, bias += args.length) {
    for (int r = 0; r < at.height; ++r) scores[place(j, r)] += bias[r];
  }
}

// The place of the first row of a pass among the keys.
inline int64_t PlaceOfRow(const AttentionProblem& args, const AttentionRows& at) {
  const ScoreTerms& terms = args.terms;
  return at.row + (terms.offset ? terms.offset[at.batch * terms.offset_stride] : 0);
}

inline int64_t LengthOfKeys(const AttentionProblem& args, const AttentionRows& at) {
  return args.lengths ? args.lengths[at.batch * args.lengths_stride] : args.keys;
}

// All rows of a pass see the keys below this one, but for the structure and for segments.
inline int64_t SeenByAll(const AttentionProblem& args, const AttentionRows& at) {
  const int64_t length = LengthOfKeys(args, at), own = PlaceOfRow(args, at);
  return args.is_causal && own + 1 < length ? own + 1 : length;
}

// Scores of -inf where kRows rows do not see a key. The order of the columns is not relied on:
// nobody has checked a traced structure.
template <int kRows, typename Acc, typename Place>
void Mask(const AttentionProblem& args, const AttentionRows& at, int64_t begin, int count,
          Place place, Acc* scores) {
  const int64_t length = LengthOfKeys(args, at), own = PlaceOfRow(args, at);
  const int64_t first = SeenByAll(args, at);
  const int32_t* columns = args.indices + begin;
  for (int j = 0; j < count; ++j) {
    if (columns[j] < first) continue;  // seen by all rows
    for (int r = 0; r < kRows; ++r) {
      const bool seen = columns[j] < length && (!args.is_causal || columns[j] <= own + r);
      if (!seen) scores[place(j, r)] = -Acc(__builtin_inf());
    }
  }
}

// Makes scores of the products of kRows rows with the `count` vectors from `begin` on: with terms
// and a bias, and -inf where a row does not see a key, if `masks`, and from `count` up to `padded`.
// The derivatives of a soft cap are written to `curbs`, unless that is null.
template <int kRows, typename Acc>
void FinishScores(const AttentionProblem& args, const AttentionRows& at, int64_t begin, int count,
                  int padded, bool masks, BlockTerms<Acc, kRows>* terms, Acc* scores, Acc* curbs) {
  using Tile = AttentionTile<Acc, kRows>;
  const auto place = [](int key, int row) { return Tile::At(key, row); };
  if (terms->Curbs()) terms->Curb(padded, scores, curbs);
  if (args.bias) AddBias(args, at, begin, count, place, scores);
  if (args.terms.any) {
    terms->SetColumns(args, begin, count, padded);
    terms->Add(padded, scores);
  }
  if (masks) Mask<kRows>(args, at, begin, count, place, scores);
  for (int j = count; j < padded; ++j) {
    for (int r = 0; r < kRows; ++r) scores[Tile::At(j, r)] = -Acc(__builtin_inf());
  }
}

// The scores of kRows rows with up to kMostKeys keys, and where these and their values are.
template <typename Acc, int kRows>
struct ScoreBlock {
  using Tile = AttentionTile<Acc, kRows>;
  static constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  static constexpr int kMostKeys = kRows > 8 ? 128 : 256;

  alignas(64) Acc scores[kMostKeys * kRows];
  const Acc* keys[kMostKeys + Tile::kTogether];
  const Acc* values[kMostKeys];
  int count, padded;  // keys, and to a whole number of steps
  int known;          // of `keys`
  BlockTerms<Acc, kRows> terms;

  ScoreBlock(const AttentionProblem& args, const AttentionRows& at)
      : terms(args, at.batch, at.head, at.row, at.height) {}

  // The vectors [begin, begin + count), count at least 1; left holds the rows times the scale. The
  // derivatives of a soft cap are written to `curbs`, unless that is null.
  void Compute(const AttentionProblem& args, const AttentionRows& at, const Acc* left,
               int64_t begin, int64_t end, Acc* curbs = nullptr) {
    const int64_t key_head = at.head / (args.heads / args.key_heads);
    const HeadKeys<Acc> k(args, args.k, at.batch, key_head), v(args, args.v, at.batch, key_head);
    count = end - begin < kMostKeys ? int(end - begin) : kMostKeys;
    padded = (count + Tile::kFew - 1) / Tile::kFew * Tile::kFew;
    // With the keys that the next block begins with: Products prefetches those too.
    known = end - begin < count + Tile::kTogether ? int(end - begin) : count + Tile::kTogether;
    PointAt(k.first, k.stride, args.indices + begin, known, keys);
    PointAt(v.first, v.stride, args.indices + begin, count, values);
    for (int j = known; j < padded; ++j) keys[j] = keys[known - 1];
    for (int j = count; j < padded; ++j) values[j] = values[count - 1];
    Products(left, args.padded_depth, keys, known, scores);
    FinishScores<kRows>(args, at, begin, count, padded, args.is_causal || args.lengths, &terms,
                        scores, curbs);
  }

  // Dot products of the rows with those that `with` points to, which are prefetched, up to `known`
  // of them, one step ahead.
  void Products(const Acc* left, int64_t depth, const Acc* const* with, int known, Acc* out) const {
    const auto prefetch = [&](int first) {
      for (int i = first; i < first + Tile::kTogether && i < known; ++i)
        PrefetchRow(with[i], depth);
    };
    int j = 0;
    for (; j + Tile::kTogether <= padded; j += Tile::kTogether) {
      prefetch(j + Tile::kTogether);
      // Of rows that follow each other the addresses need no loads.
      const int64_t stride = with[j + 1] - with[j];
      bool even = kRows >= 4;
      for (int i = 1; kRows >= 4 && i < Tile::kTogether; ++i)
        even &= with[j + i] - with[j] == i * stride;
      if (even) {
        const auto key = [first = with[j], stride](int i) { return first + i * stride; };
        Tile::template Dots<Tile::kTogether>(left, depth, key, out + j * kRows);
      } else {
        const auto key = [keys = with + j](int i) { return keys[i]; };
        Tile::template Dots<Tile::kTogether>(left, depth, key, out + j * kRows);
      }
    }
    for (; j < padded; j += Tile::kFew) {
      prefetch(j + Tile::kTogether);
      const auto key = [keys = with + j](int i) { return keys[i]; };
      Tile::template Dots<Tile::kFew>(left, depth, key, out + j * kRows);
    }
  }
};

}  // namespace sgap::SGAP_ISA

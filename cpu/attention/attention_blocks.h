// Attention in blocks of keys that each query, or a few queries together, chose: BCSR(r, c) with
// few rows r. Row by row every row would load the keys of its blocks again. Here a task takes block
// after block, and against a block up to 64 of the rows that see it, wherever they lie, as
// attention_groups.h takes the rows of a long vector. What is known of a row is kept in memory from
// one block to the next; a row meets its blocks in ascending order.
#pragma once

#include "cpu/attention/attention_groups.h"

namespace sgap::SGAP_ISA {

inline int64_t Lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The keys before this one exist and are not padding.
inline int64_t KnownKeys(const AttentionProblem& args, int64_t batch) {
  const int64_t length = args.lengths ? args.lengths[batch * args.lengths_stride] : args.keys;
  return Lesser(length, args.keys);
}

// How many rows are taken together: a block row at least.
static_assert(kMostRowNumbers >= kMostBlockRows * kMostBlockDepth);
inline int MostRowsTogether(const AttentionProblem& args) {
  const int64_t depth =
      args.padded_depth > args.padded_value_depth ? args.padded_depth : args.padded_value_depth;
  return int(Lesser(kMostRowNumbers / (depth > 0 ? depth : 1), kMostGroupedRows));
}

// The block rows that see a block of keys, ascending.
struct SeeingRows {
  const int32_t *begin, *end;

  // Those of block rows [first, last).
  SeeingRows(const KeyBlocks& blocks, int64_t block, int64_t first, int64_t last)
      : begin(blocks.rows + blocks.offsets[block]), end(blocks.rows + blocks.offsets[block + 1]) {
    begin = LowerBound(begin, end, first);
    end = LowerBound(begin, end, last);
  }

  static const int32_t* LowerBound(const int32_t* low, const int32_t* high, int64_t least) {
    while (low < high) {
      const int32_t* middle = low + (high - low) / 2;
      *middle < least ? low = middle + 1 : high = middle;
    }
    return low;
  }
};

// Some rows that see a block, and some of its keys.
template <typename Acc>
struct BlockPass {
  using Groups = RowGroups<Acc>;
  using V = typename Groups::V;
  static constexpr int kRows = Groups::kRows, kMostKeys = Groups::kMostKeys;

  int height;                      // rows; groups have further ones that do not exist
  int64_t rows[kMostGroupedRows];  // ascending
  typename Groups::Seen seen;
  int count, padded;  // keys, and to a whole number of steps
  const Acc *keys[kMostKeys], *values[kMostKeys];
  alignas(64) Acc scores[Groups::kMost * kMostKeys * kRows];

  // Takes up to `most` rows, those of the block rows from `next` on, and returns the first block
  // row that the next pass is to take. A block row that comes again, as a traced structure may
  // store a block twice, is for the next pass, too.
  const int32_t* Take(const AttentionProblem& args, const int32_t* next, const int32_t* end,
                      int most) {
    height = 0;
    for (int64_t last = -1; next < end && *next != last && height + args.length <= most; ++next) {
      last = *next;
      const int64_t first = last * args.length;
      for (int64_t i = first; i < first + args.length && i < args.rows; ++i) rows[height++] = i;
    }
    seen.groups = (height + kRows - 1) / kRows;
    return next;
  }

  // What `from` [all rows, depth] has of the rows, and zeros up to whole groups.
  void Gather(const Acc* from, int64_t depth, Acc* to) const {
    for (int i = 0; i < seen.groups * kRows; ++i, to += depth) {
      const Acc* row = i < height ? from + rows[i] * depth : nullptr;
      for (int64_t d = 0; d < depth; d += kRows) {
        Store<Acc, kRows>(to + d, row ? Load<Acc, kRows>(row + d) : V{});
      }
    }
  }
  void Scatter(const Acc* from, int64_t depth, Acc* to) const {
    for (int i = 0; i < height; ++i, from += depth) {
      Acc* const row = to + rows[i] * depth;
      for (int64_t d = 0; d < depth; d += kRows) {
        Store<Acc, kRows>(row + d, Load<Acc, kRows>(from + d));
      }
    }
  }
  // One number of each row; `absent` where there is none.
  void GatherOne(const Acc* from, Acc absent, Acc* to) const {
    for (int i = 0; i < seen.groups * kRows; ++i) to[i] = i < height ? from[rows[i]] : absent;
  }
  void ScatterOne(const Acc* from, Acc* to) const {
    for (int i = 0; i < height; ++i) to[rows[i]] = from[i];
  }

  // The gathered rows as RowGroups::Dots wants them.
  void Interleave(const Acc* gathered, int64_t depth, Acc* left) const {
    for (int64_t at = 0; at < seen.groups * kRows * depth; at += kRows * depth) {
      Groups::Tile::Interleave(gathered + at, depth, depth, left + at);
    }
  }

  // Keys [begin, begin + number) of a head are next.
  void Meet(const AttentionProblem& args, const HeadKeys<Acc>& k, const HeadKeys<Acc>& v,
            int64_t begin, int number) {
    count = number;
    padded = (count + Groups::kTogether - 1) / Groups::kTogether * Groups::kTogether;
    for (int j = 0; j < padded; ++j) {
      const int64_t key = begin + (j < count ? j : count - 1);
      keys[j] = k.first + key * k.stride;
      values[j] = v.first + key * v.stride;
    }
    first_ = begin;
    causal_ = args.is_causal && rows[0] < begin + count - 1;
    for (int g = 0; g < seen.groups; ++g) {
      const int64_t last = rows[(g + 1) * kRows < height ? (g + 1) * kRows - 1 : height - 1];
      const int64_t sees = last < begin ? 0 : last - begin + 1;
      seen.keys[g] = causal_ && sees < padded ? int(sees) : padded;
    }
  }

  // Scores of -inf where a row of a group does not see a key, and where there is no row or no key.
  void Mask(int group) {
    using Number = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
    using Numbers = Vector<Number, kRows>;
    constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
    Acc* const own = scores + Groups::At(group, 0);
    const int first = group * kRows;
    if (causal_ || first + kRows > height) {
      Numbers last;  // the last key that each row sees
      for (int r = 0; r < kRows; ++r) {
        const int64_t ahead = causal_ && first + r < height ? rows[first + r] - first_ : count - 1;
        last[r] = first + r >= height || ahead < 0 ? -1 : Number(ahead < count ? ahead : count - 1);
      }
      for (int j = 0; j < count; ++j) {
        const V s = Load<Acc, kRows>(own + j * kRows);
        Store<Acc, kRows>(own + j * kRows, Numbers{} + Number(j) <= last ? s : V{} + kLeast);
      }
    }
    for (int j = count; j < padded; ++j) Store<Acc, kRows>(own + j * kRows, V{} + kLeast);
  }

 private:
  int64_t first_;  // the first of the keys
  bool causal_;    // whether some row does not see some key
};

}  // namespace sgap::SGAP_ISA

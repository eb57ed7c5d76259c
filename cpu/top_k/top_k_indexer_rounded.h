// Scores of an indexer from q and keys rounded to integers of 16 bits, whose products are twice as
// fast, with a bound of what they are off. Nearly all columns of a row are selected or left out by
// that bound; the scores of the others are computed as without rounding, so the same are selected.
#pragma once

#include "cpu/top_k/top_k_indexer.h"

namespace sgap::SGAP_ISA {

// Whether one instruction multiplies integers and adds their products. With AVX2, which takes two,
// this is no faster (1.03 to 1.1 of the time, on Zen 4).
#if defined(__AVX512VNNI__)
constexpr bool kRoundsIndexer = true;
#else
constexpr bool kRoundsIndexer = false;
#endif

constexpr float kGreatestBound = 0x1p100f;
constexpr float kLeastMagnitude = 0x1p-80f;  // with which scales stay finite

// A vector as `scale` times integers: the norm of that and of the difference, neither too small.
struct RoundedVector {
  float scale, norm, off;
};

// The greatest value of an integer: of sums of `depth` products none is beyond 2^31. Half less than
// a whole number, to the next of which it is rounded in any rounding mode.
inline float GreatestInteger(int64_t depth) {
  const auto most = float(int64_t(46340 / __builtin_sqrtf(float(depth)))) - 1.5f;
  return most < 32766.5f ? most : 32766.5f;
}

// The lowest bits of each lane. Written out where GCC would go lane by lane.
template <typename Integer>
inline Vector<Integer, 16> LowestBits(Vector<int32_t, 16> x) {
  if constexpr (sizeof(Integer) == 2) {
    return BitCast<Vector<Integer, 16>>(NarrowWords<16>(BitCast<Vector<uint32_t, 16>>(x)));
  } else {
#if defined(__AVX512F__)
    return BitCast<Vector<Integer, 16>>(_mm512_cvtepi32_epi8(BitCast<__m512i>(x)));
#else
    return __builtin_convertvector(x, Vector<Integer, 16>);
#endif
  }
}

// 16 elements from d on, with zeros behind the last one.
template <typename T>
inline Vector<float, 16> LoadPart(const T* x, int64_t depth, int64_t d) {
  return depth - d >= 16 ? Load<T, 16>(x + d) : LoadPartial<T, 16>(x + d, int(depth - d));
}

// The greatest magnitude of x[0 .. depth), or kLeastMagnitude; infinite where an element is not
// finite.
template <typename T>
float GreatestMagnitude(const T* x, int64_t depth) {
  constexpr int N = 16;
  using Ints = Vector<int32_t, N>;
  Ints magnitudes = {};
  for (int64_t d = 0; d < depth; d += N) {
    const Ints magnitude = BitCast<Ints>(LoadPart(x, depth, d)) & INT32_MAX;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  const int32_t bits = GreatestLane<int32_t, N>(magnitudes);
  const float greatest = BitCast<float>(bits), infinity = __builtin_inff();
  if (bits >= BitCast<int32_t>(infinity)) return infinity;
  return greatest > kLeastMagnitude ? greatest : kLeastMagnitude;
}

// x[0 .. depth), which is `greatest` at most, to Integers of 16 or 8 bits, `most` at most, and
// zeros up to a multiple of 16: write(i, word) for each word of them, and each(d, integers, what
// they are off by) for each 16 of them, the latter in units of the integers. Norms of infinity if
// the greatest is infinite.
template <typename Integer, typename T, typename Write, typename Each>
RoundedVector RoundVector(const T* x, int64_t depth, float greatest, float most, Write&& write,
                          Each&& each) {
  constexpr int N = 16, kWords = N * sizeof(Integer) / 4;
  using Floats = Vector<float, N>;
  using Ints = Vector<int32_t, N>;
  const float infinity = __builtin_inff();
  if (!(greatest < infinity)) {
    for (int64_t i = 0; i < (depth + N - 1) / N * kWords; ++i) write(i, 0);
    for (int64_t d = 0; d < depth; d += N) each(d, Floats{}, Floats{});
    return {0, infinity, infinity};
  }
  const float inverse = most / greatest, scale = greatest / most;
  Floats norm = {}, off = {};
  for (int64_t d = 0; d < depth; d += N) {
    constexpr float kShift = 0x1.8p23f;  // the integer is in the lowest bits of x + this
    const Floats scaled = LoadPart(x, depth, d) * inverse, shifted = scaled + kShift;
    const Floats rounded = shifted - kShift, difference = scaled - rounded;
    norm += rounded * rounded;
    off += difference * difference;
    each(d, rounded, difference);
    const auto low = LowestBits<Integer>(BitCast<Ints>(shifted));
    const auto words = BitCast<Vector<uint32_t, kWords>>(low);
    for (int i = 0; i < kWords; ++i) write(d / N * kWords + i, words[i]);
  }
  const auto root = [](const Floats& squares) {
    return 1.001f * __builtin_sqrtf(FoldLanes<1, float, N>(squares)[0]);
  };
  // Scaling has rounded each of up to `most`.
  const float scaling = most * 0x1p-21f * __builtin_sqrtf(float(depth));
  return {scale, scale * root(norm), scale * (root(off) + scaling)};
}

template <typename Integer, typename T, typename Write>
RoundedVector RoundVector(const T* x, int64_t depth, float greatest, float most, Write&& write) {
  return RoundVector<Integer>(x, depth, greatest, most, write,
                              [](int64_t, const auto&, const auto&) {});
}

// Writes a key, of which `greatest` is the greatest magnitude, to column j of a panel of rounded
// ones: words [RoundedWords, kPanelColumns] and a scale for each column. Zeros for null. Its words
// go to `row` too, unless that is null.
template <typename T>
RoundedVector PackRounded(const T* key, int64_t depth, float greatest, float most, int64_t j,
                          char* panel, int32_t* row) {
  const int64_t words = RoundedWords(depth);
  auto* out = reinterpret_cast<uint32_t*>(panel) + j;
  const auto write = [&](int64_t i, uint32_t word) {
    out[i * kPanelColumns] = word;
    if (row) row[i] = int32_t(word);
  };
  RoundedVector found = {};
  if (key) {
    found = RoundVector<int16_t>(key, depth, greatest, most, write);
  } else {
    for (int64_t i = 0; i < words; ++i) write(i, 0);
  }
  reinterpret_cast<float*>(panel + 4 * words * kPanelColumns)[j] = found.scale;
  return found;
}

// Products of Pairs of integers.
struct RoundedProducts {
  using Value = int32_t;  // two of them
  using Score = float;

  template <typename V>
  static V Add(V sum, [[maybe_unused]] V keys, [[maybe_unused]] V q) {
#if defined(__AVX512VNNI__)
    return BitCast<V>(
        _mm512_dpwssd_epi32(BitCast<__m512i>(sum), BitCast<__m512i>(keys), BitCast<__m512i>(q)));
#else
    return sum;
#endif
  }

  template <typename V>
  static auto Positive(V sum) {
    constexpr int N = sizeof(V) / sizeof(sum[0]);
    return __builtin_convertvector(sum > 0 ? sum : V{}, Vector<float, N>);
  }
};

// The greatest norms of the keys that some rows see, and of what rounding takes from one.
struct KeyBounds {
  float norm = 0, off = 0;
};

// Of 16 bits; or of bytes, in units of each key's integers.
inline KeyBounds GreatestBounds(const TopKIndexerArgs& args, const IndexerRows& at, bool bytes) {
  constexpr int N = 16;  // of four panels
  Vector<float, N> greatest = {};
  const float* bounds = args.bounds + 4 * at.batch * args.PanelCount();
  const int64_t count = (at.columns + kPanelColumns - 1) / kPanelColumns * 4;
  for (int64_t i = 0; i < count; i += N) {
    const auto x = LoadPart(bounds, count, i);
    greatest = x > greatest ? x : greatest;
  }
  KeyBounds found;
  for (int i = bytes ? 2 : 0; i < N; i += 4) {
    found.norm = greatest[i] > found.norm ? greatest[i] : found.norm;
    found.off = greatest[i + 1] > found.off ? greatest[i + 1] : found.off;
  }
  return found;
}

// How much the scores of a row from rounded values, q' and k', may differ from those that are
// computed without rounding: |q . k - q' . k'| <= |q - q'| |k| + |q'| |k - k'|, and the rounding of
// both sums.
struct RowBound {
  float off = 0, sizes = 0, weights = 0, greatest = 0;

  void Add(float weight, const RoundedVector& q, const KeyBounds& keys) {
    const float size = weight < 0 ? -weight : weight, norm = q.norm + q.off;
    off += size * (q.off * keys.norm + q.norm * keys.off);
    sizes += size * norm;
    weights += size;
    greatest = norm > greatest ? norm : greatest;
  }

  // What sums lose where numbers that are too small for a float32 are zero.
  float Small(const KeyBounds& keys, int64_t depth, int64_t heads) const {
    const float large = 0x1p15f * float(depth) * keys.norm;
    return (weights * (1 + greatest + keys.norm) + float(heads) * large) * float(depth) *
               0x1p-122f +
           0x1p-120f;
  }

  // Whether no sum overflows, and all is finite. Before the factor of a key a sum is up to
  // sizes * 2^16, whatever the keys' norm.
  bool Holds(const KeyBounds& keys) const {
    return greatest * keys.norm < kGreatestBound && weights < kGreatestBound &&
           sizes < kGreatestBound && sizes * keys.norm < kGreatestBound;
  }

  // Infinite if that does not hold.
  float Of(const KeyBounds& keys, int64_t depth, int64_t heads) const {
    const float terms = float(depth + 2 * heads + 32);
    const float sum =
        1.01f * (off + terms * 0x1p-22f * sizes * keys.norm) + Small(keys, depth, heads);
    return Holds(keys) && sum < kGreatestBound ? sum : __builtin_inff();
  }
};

// Of the columns of a row that its bound leaves open: their indices, their places among the
// candidates, their scores and the keys of these.
struct OpenColumns {
  int32_t *columns, *places;
  float* scores;
  int32_t* keys;
};

// The memory of a task beside IndexerScratch.
struct RoundedScratch {
  int32_t* q;
  float* off;  // of each row
  OpenColumns open;
  float* memory;  // for the scores of some columns

  RoundedScratch(char* from, int64_t pairs, int64_t words, int64_t rows, int64_t columns) {
    const auto take = [&](int64_t count) {
      char* const begin = AlignedLine(from);
      from = begin + 4 * count;
      return begin;
    };
    const auto ints = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count)); };
    const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count)); };
    const int64_t room = columns + 64;
    q = ints(pairs * words), off = floats(rows);
    open = {ints(room), ints(room), floats(room), ints(room)};
    memory = floats(0);
  }
};

// q and weights of a task's rows as Pairs has them, the latter with the scales of q, and the bound
// of each row. False where one does not hold.
template <typename T, int kTogether>
bool RoundPairs(const TopKIndexerArgs& args, const IndexerRows& at, const KeyBounds& keys,
                int64_t whole, const RoundedScratch& own, float* weights) {
  const int64_t words = RoundedWords(args.depth);
  const float most = GreatestInteger(args.depth);
  const T* from = static_cast<const T*>(args.q) + at.place * args.depth;
  const T* from_weights = static_cast<const T*>(args.weights) + at.place;
  RowBound bound;
  for (int64_t i = 0; i < whole; ++i, from += args.depth) {
    int32_t* out = own.q + i / kTogether * kTogether * words + i % kTogether;
    const auto write = [&](int64_t w, uint32_t word) { out[w * kTogether] = int32_t(word); };
    if (i >= at.pairs) {
      for (int64_t w = 0; w < words; ++w) write(w, 0);
      weights[i] = 0;
      continue;
    }
    const float greatest = GreatestMagnitude(from, args.depth);
    const RoundedVector found = RoundVector<int16_t>(from, args.depth, greatest, most, write);
    const float weight = LoadScalar(from_weights + i);
    weights[i] = weight * found.scale;
    bound.Add(weight, found, keys);
    if ((i + 1) % args.heads != 0) continue;
    const float off = bound.Of(keys, args.depth, args.heads);
    if (!(off < kGreatestBound)) return false;
    own.off[i / args.heads] = off;
    bound = {};
  }
  return true;
}

// The lowest bits, in order, moved to the places where the mask has bits.
inline uint64_t Deposit(uint64_t bits, uint64_t mask) {
#if defined(__BMI2__)
  return _pdep_u64(bits, mask);
#else
  uint64_t found = 0;
  for (; mask != 0; mask &= mask - 1, bits >>= 1) found |= bits & 1 ? mask & -mask : 0;
  return found;
#endif
}

// The lowest `most` of the bits that are set.
template <typename Bits>
inline Bits First(Bits bits, int64_t most) {
  while (__builtin_popcountll(bits) > most) bits &= ~(Bits(1) << (63 - __builtin_clzll(bits)));
  return bits;
}

// Of 64 candidates, which are chosen, and which are open.
struct CandidateBits {
  static constexpr int kCount = 64;
  uint64_t chosen, open;

  // In the memory of keys, which has room for 16 more than there are candidates.
  static CandidateBits* In(int32_t* keys) {
    const auto address = reinterpret_cast<uintptr_t>(keys);
    return reinterpret_cast<CandidateBits*>(reinterpret_cast<char*>(keys) + (-address & 7));
  }
};

// The candidates of a row, by their scores.
struct SortedCandidates {
  static constexpr int N = 16;
  CandidateBits* bits;
  int64_t chosen = 0, opened = 0;

  // Those with scores from `high` on are chosen, others from `low` on are open.
  SortedCandidates(int64_t candidates, float low, float high, const RowScratch<float>& scratch,
                   const OpenColumns& open)
      : bits(CandidateBits::In(scratch.keys)) {
    CandidateBits* own = bits;
    for (int64_t i = 0; i < candidates; i += CandidateBits::kCount, ++own) {
      uint64_t above = 0, from = 0;
#pragma GCC unroll 4
      for (int j = 0; j < CandidateBits::kCount; j += N) {
        Vector<float, N> x;
        __builtin_memcpy(&x, scratch.scores + i + j, sizeof(x));
        above |= uint64_t(LanesFrom<float, N>(x, high)) << j;
        from |= uint64_t(LanesFrom<float, N>(x, low)) << j;
      }
      const int64_t left = candidates - i;
      const uint64_t exist =
          left < CandidateBits::kCount ? (uint64_t(1) << left) - 1 : ~uint64_t(0);
      *own = {above & exist, from & exist & ~above};
      chosen += __builtin_popcountll(own->chosen);
      opened += PackBits(own->open, int32_t(i), open.places + opened);
    }
    for (int64_t i = 0; i < opened; ++i) open.columns[i] = scratch.columns[open.places[i]];
  }

  // Chooses those of the open ones, in order, for which taken(i), of N from i on, has a bit: after
  // it nobody reads their scores.
  template <typename Taken>
  void Choose(const OpenColumns& open, Taken&& taken) const {
    char* const stream = reinterpret_cast<char*>(open.scores);
    for (int64_t i = 0; i < opened; i += N) {
      const auto found = uint16_t(taken(i));
      __builtin_memcpy(stream + i / 8, &found, sizeof(found));
    }
    CandidateBits* own = bits;
    for (int64_t from = 0; from < opened; ++own) {
      for (const uint64_t half : {uint64_t(0xffffffff), ~uint64_t(0xffffffff)}) {
        const uint64_t places = own->open & half;
        uint64_t next;  // of which 57 bits at least are those from `from` on
        __builtin_memcpy(&next, stream + from / 8, sizeof(next));
        own->chosen |= Deposit(next >> (from % 8), places);
        from += __builtin_popcountll(places);
      }
    }
  }

  // Writes the columns of the first k that are chosen. As many are.
  void Write(const int32_t* columns, int64_t k, int32_t* indices) const {
    const CandidateBits* own = bits;
    for (int64_t written = 0; written < k; ++own, columns += CandidateBits::kCount) {
      const int32_t* from = columns;
      for (uint64_t mask = First(own->chosen, k - written); mask != 0; mask >>= N, from += N) {
        Vector<int32_t, N> x;
        __builtin_memcpy(&x, from, sizeof(x));
        written += PackOnly<int32_t, N>(uint16_t(mask), x, indices + written);
      }
    }
  }
};

// Selects the k greatest candidates: those with scores from `high` on are among them, those below
// `low` are not, and of the others score(columns, count, out) computes the scores without rounding,
// up to a multiple of a vector of them. Returns a score that the k-th greatest one is not less
// than; NaN if the others are more than `most`, or if `low` and `high` cannot be right.
template <typename Score>
float SelectBetween(int64_t candidates, int64_t k, float low, float high, int64_t most,
                    const RowScratch<float>& scratch, const OpenColumns& open, int32_t* indices,
                    Score&& score) {
  constexpr int N = SortedCandidates::N;
  const SortedCandidates sorted(candidates, low, high, scratch, open);
  const int64_t left = k - sorted.chosen;
  if (sorted.opened > most || left < 0 || sorted.opened < left) return __builtin_nanf("");
  float last = low;
  if (left > 0) {
    score(open.columns, sorted.opened, open.scores);
    for (int64_t i = 0; i < sorted.opened; i += N) {
      Vector<float, N> x;
      __builtin_memcpy(&x, open.scores + i, sizeof(x));
      const auto keys = KeysOf<float, N>(x);
      __builtin_memcpy(open.keys + i, &keys, sizeof(keys));
    }
    const RankedKey<int32_t> kth = RankKeys(open.keys, sorted.opened, left, int64_t(0));
    int64_t ties = kth.from == left ? left : left - kth.above;
    sorted.Choose(open, [&](int64_t i) {
      Vector<int32_t, N> keys;
      __builtin_memcpy(&keys, open.keys + i, sizeof(keys));
      const uint32_t from = LanesFrom<int32_t, N>(keys, kth.key);
      const uint32_t above = LanesFrom<int32_t, N>(keys, kth.key + 1);
      const uint32_t equal = First(from & ~above, ties);
      ties -= __builtin_popcount(equal);
      return above | equal;
    });
    last = ScoreOf<float>(kth.key);
  }
  sorted.Write(scratch.columns, k, indices);
  return last;
}

// Selects the first k candidates with a score of 0, the greatest there is: those with 0 here, of
// which there are as many, certainly have it, and of others from `low` on score(columns, count,
// out) computes it.
template <typename Score>
void SelectZeros(int64_t candidates, int64_t k, float low, const RowScratch<float>& scratch,
                 const OpenColumns& open, int32_t* indices, Score&& score) {
  constexpr int N = SortedCandidates::N;
  const SortedCandidates sorted(candidates, low, 0, scratch, open);
  if (sorted.opened > 0) {
    score(open.columns, sorted.opened, open.scores);
    sorted.Choose(open, [&](int64_t i) {
      Vector<float, N> x;
      __builtin_memcpy(&x, open.scores + i, sizeof(x));
      return LanesFrom<float, N>(x, 0);
    });
  }
  sorted.Write(scratch.columns, k, indices);
}

// What scores off by at most `off` say less than about the k-th greatest of them: others that are
// this much less may be among the k greatest, and those that are this much greater are.
inline float Reach(float off, float kth) {
  return 2 * off + 0x1p-20f * (__builtin_fabsf(kth) + off);
}

// SelectRow of scores that are off by at most `off`; `score` as for SelectBetween. -1 if too many
// would be computed, or if `off` cannot be right.
template <typename Score>
int32_t SelectRounded(const float* scores, int64_t count, int64_t k, float off,
                      RowScratch<float>& scratch, const OpenColumns& open, int32_t* indices,
                      Score&& score) {
  if (k <= 0 || count <= 0) return 0;
  if (count <= k) {  // all are finite
    for (int64_t i = 0; i < count; ++i) indices[i] = int32_t(i);
    return int32_t(count);
  }
  scratch.margin = 2 * off;
  int64_t candidates = CandidatesOrAll(scores, count, k, 0, scratch);
  const int32_t* const keys = AfterPacking(KeysOfCandidates(candidates, scratch), candidates);
  // The k-th greatest score is within `off` of the k-th greatest of these.
  const float kth = ScoreOf<float>(KeyOfRank(keys, candidates, k, int64_t(0)));
  if (scratch.reached > -__builtin_inff()) scratch.TryNext(kth, candidates, k);
  const float reach = Reach(off, kth);
  const float low = kth - reach, high = kth + reach;
  if (low < scratch.reached) candidates = Candidates(scores, count, 0, low, scratch);
  const float last =
      SelectBetween(candidates, k, low, high, 3 * count / 4, scratch, open, indices, score);
  return __builtin_isnan(last) ? -1 : int32_t(k);
}

}  // namespace sgap::SGAP_ISA

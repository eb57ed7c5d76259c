// The phases of a step in which the groups of a sparse matrix move (regrow.h).
#include "cpu/regrow/regrow.h"
#include "cpu/simd/simd.h"
#include "cpu/top_k/top_k_ranks.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int64_t kSampled = 8192;  // cells

// The key of the greatest finite number: infinity counts as that.
template <typename Acc>
const Key<Acc> kGreatest = BitCast<Key<Acc>>(Acc(__builtin_inf())) - 1;

template <typename Acc, int N>
Vector<Acc, N> Magnitude(Vector<Acc, N> x) {
  using Keys = Vector<Key<Acc>, N>;
  return BitCast<Vector<Acc, N>>(BitCast<Keys>(x) & (Keys{} + ~kAbsent<Acc>));
}

// The stored groups of a row, by ascending column.
struct RowOfGroups {
  const int32_t* columns;
  const int64_t* order;  // null where the columns ascend as they are
  int64_t begin, count;

  RowOfGroups(const RegrowMatrix& of, int64_t row)
      : columns(of.indices + of.offsets[row]),
        order(of.moved[row] ? of.order + of.offsets[row] : nullptr),
        begin(of.offsets[row]),
        count(of.stored[row]) {}

  int32_t Column(int64_t i) const { return order ? int32_t(order[i] >> 32) : columns[i]; }
  int32_t Position(int64_t i) const { return order ? int32_t(order[i]) : int32_t(begin + i); }
};

struct Rows {
  int64_t begin, end;
  Rows(const RegrowArgs& args, int64_t task) : begin(task * args.task_rows) {
    end = begin + args.task_rows < args.rows ? begin + args.task_rows : args.rows;
  }
};

// Takes what is greater than `least`, and the first `ties` of what equals it.
template <typename K>
struct Taker {
  K least;
  int64_t ties;

  bool operator()(K key) {
    const bool equal = key == least;
    const bool taken = (key > least) | (equal & (ties > 0));
    ties -= equal;
    return taken;
  }
};

// Shares `ties` among the tasks, in their order: each may take as many as it has, until none is
// left.
template <typename Equal>
void ShareTies(const RegrowArgs& args, RegrowMatrix& of, int64_t ties, Equal equal_of_task) {
  for (int64_t task = 0; task < args.row_tasks; ++task) {
    of.ties[task] = ties;
    if (ties > 0) ties -= equal_of_task(task);
  }
}

template <typename K>
int64_t CountEqual(const K* keys, int64_t count, K key) {
  return CountFrom(keys, count, key) - CountFrom<K>(keys, count, key + 1);
}

// The key that `rank` of `count` keys reach, and how many of those that equal it belong to them.
template <typename K>
struct LastTaken {
  K key;
  int64_t ties;

  LastTaken(const K* keys, int64_t count, int64_t rank)
      : key(~(K(1) << (8 * sizeof(K) - 1))), ties(0) {
    if (rank <= 0) return;  // no key is greater than the greatest
    key = KeyOfRank(keys, count, rank, 0);
    ties = rank - CountFrom<K>(keys, count, key + 1);
  }
};

// The phases that read norms, of type T.
template <typename T>
struct OfNorms {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  static constexpr int N = kLanes<T>;

  static void Order(const RegrowArgs& args, RegrowMatrix& of, int64_t task) {
    K* keys = static_cast<K*>(of.keys);
    const auto absent = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) keys[i] = kAbsent<Acc>;
    };
    const Rows rows(args, task);
    if (task == 0) absent(0, of.offsets[0]);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const RowOfGroups row(of, r);
      const T* norms = static_cast<const T*>(of.norms);
      for (int64_t i = 0; i < row.count; i += N) {
        const int64_t left = row.count - i < N ? row.count - i : N;
        Vector<Acc, N> x = {};
        if (row.order) {
          for (int64_t lane = 0; lane < left; ++lane)
            x[lane] = LoadScalar(norms + row.Position(i + lane));
        } else if (left == N) {
          x = Load<T, N>(norms + row.begin + i);
        } else {
          x = LoadPartial<T, N>(norms + row.begin + i, int(left));
        }
        const auto found = KeysOf<Acc, N>(Magnitude<Acc, N>(x));
        __builtin_memcpy(keys + row.begin + i, &found, size_t(left) * sizeof(K));
      }
      absent(row.begin + row.count, of.offsets[r + 1]);
    }
    if (rows.end == args.rows) absent(of.offsets[args.rows], args.groups);
  }

  static void Kept(const RegrowArgs& args, RegrowMatrix& of) {
    int64_t stored = 0;
    for (int64_t r = 0; r < args.rows; ++r) stored += of.stored[r];
    // A share that is no number drops nothing.
    const float share = of.fraction > 0 ? (of.fraction < 1 ? of.fraction : 1.f) : 0.f;
    const auto dropped = int64_t(__builtin_nearbyintf(share * float(stored)));
    of.keep = stored - (dropped < stored ? dropped : stored);
    const K* keys = static_cast<const K*>(of.keys);
    const LastTaken<K> last(keys, args.groups, of.keep);
    of.kept_key = last.key;
    ShareTies(args, of, last.ties, [&](int64_t task) {
      const Rows rows(args, task);
      const int64_t begin = of.offsets[rows.begin];
      return CountEqual(keys + begin, of.offsets[rows.end] - begin, last.key);
    });
  }

  static void Mark(const RegrowArgs& args, RegrowMatrix& of, int64_t task) {
    const Rows rows(args, task);
    Taker<K> taken{K(of.kept_key), of.ties[task]};
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const RowOfGroups row(of, r);
      const K* keys = static_cast<const K*>(of.keys) + row.begin;
      uint8_t* marks = of.marks + r * args.mark_bytes;
      __builtin_memset(marks, 0, size_t(args.mark_bytes));
      int32_t kept = 0;
      for (int64_t i = 0; i < row.count; ++i) {
        const bool own = taken(keys[i]);
        const int32_t column = row.Column(i);
        marks[column >> 3] |= uint8_t(own << (column & 7));
        kept += own;
      }
      of.kept[r] = kept;
    }
  }
};

inline bool Marked(const uint8_t* marks, int64_t column) {
  return marks[column >> 3] >> (column & 7) & 1;
}

// Bit i: whether column + i is marked, for N columns from a multiple of N on.
template <int N>
inline uint32_t Marks(const uint8_t* marks, int64_t column) {
  uint32_t bits = marks[column >> 3];
  if constexpr (N == 16) bits |= uint32_t(marks[(column >> 3) + 1]) << 8;
  if constexpr (N < 8) bits = bits >> (column & 7) & ((1u << N) - 1);
  return bits;
}

// The phases that read scores, of type T.
template <typename T>
struct OfScores {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  static constexpr int N = kLanes<T>;

  static void Sample(const RegrowArgs& args, RegrowMatrix& of) {
    const int64_t cells = args.rows * args.columns;
    of.grow = (args.groups < cells ? args.groups : cells) - of.keep;
    of.found = 0;
    of.all_cells = true;
    const int64_t empty = cells - of.keep;
    if (of.grow <= 0 || cells < 4 * kSampled) return;
    const T* scores = static_cast<const T*>(of.scores);
    K keys[kSampled + N];
    int64_t sampled = 0;
    // An odd step: of columns that are a power of two every one is drawn.
    for (int64_t cell = 0, step = cells / kSampled | 1; cell < cells && sampled < kSampled;
         cell += step) {
      const int64_t row = cell / args.columns, column = cell % args.columns;
      if (Marked(of.marks + row * args.mark_bytes, column)) continue;
      Vector<Acc, N> x = {};
      x[0] = LoadScalar(scores + cell);
      const K key = KeysOf<Acc, N>(Magnitude<Acc, N>(x))[0];
      keys[sampled++] = key < kGreatest<Acc> ? key : kGreatest<Acc>;
    }
    const double expected = double(sampled) * double(of.grow) / double(empty);
    const auto rank = int64_t(expected + 3 * __builtin_sqrt(expected) + 2);
    if (rank > sampled / 2) return;
    const K key = KeyOfRank(keys, sampled, rank, rank / 8 + 1);
    if (key < 0) return;  // NaN
    of.least = double(ScoreOf<Acc>(key));
    of.all_cells = false;
  }

  static void Candidates(const RegrowArgs& args, RegrowMatrix& of, int64_t task) {
    const Rows rows(args, task);
    const int64_t columns = args.columns;
    Acc* found = reinterpret_cast<Acc*>(args.scratch);
    auto* found_columns = reinterpret_cast<int32_t*>(found + args.task_rows * columns + 16);
    const Acc least = of.all_cells ? Acc(0) : Acc(of.least);
    const uint32_t always = of.all_cells ? ~0u : 0u;  // NaN too
    int64_t count = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const T* scores = static_cast<const T*>(of.scores) + r * columns;
      const uint8_t* marks = of.marks + r * args.mark_bytes;
      const int64_t before = count;
      Vector<int32_t, N> numbers = LaneNumbers<int32_t, N>();
      const auto append = [&](int64_t i, Vector<Acc, N> x, uint32_t lanes) {
        x = Magnitude<Acc, N>(x);
        const uint32_t mask = (LanesFrom<Acc, N>(x, least) | always) & lanes & ~Marks<N>(marks, i);
        count += PackLanes<Acc, N, 4>(mask, x, numbers, found + count, found_columns + count);
        numbers += N;
      };
      int64_t i = 0;
      for (; i + N <= columns; i += N) append(i, Load<T, N>(scores + i), (1u << N) - 1);
      if (i < columns) {
        append(i, LoadPartial<T, N>(scores + i, int(columns - i)), (1u << (columns - i)) - 1);
      }
      of.candidates[r] = int32_t(count - before);
    }
    const Vector<K, N> greatest = Vector<K, N>{} + kGreatest<Acc>;
    for (int64_t i = 0; i < count; i += N) {
      Vector<Acc, N> x;
      __builtin_memcpy(&x, found + i, sizeof(x));
      Vector<K, N> keys = KeysOf<Acc, N>(x);
      keys = keys > greatest ? greatest : keys;
      __builtin_memcpy(found + i, &keys, sizeof(keys));
    }
    const int64_t begin = __atomic_fetch_add(&of.found, count, __ATOMIC_RELAXED);
    of.begins[task] = begin;
    of.lengths[task] = count;
    __builtin_memcpy(static_cast<K*>(of.candidate_keys) + begin, found, size_t(count) * sizeof(K));
    __builtin_memcpy(of.candidate_columns + begin, found_columns, size_t(count) * sizeof(int32_t));
  }

  static void Grown(const RegrowArgs& args, RegrowMatrix& of) {
    const K* keys = static_cast<const K*>(of.candidate_keys);
    const LastTaken<K> last(keys, of.found, of.grow);
    of.grown_key = last.key;
    ShareTies(args, of, last.ties, [&](int64_t task) {
      return CountEqual(keys + of.begins[task], of.lengths[task], last.key);
    });
  }

  static void Count(const RegrowArgs& args, RegrowMatrix& of, int64_t task) {
    const Rows rows(args, task);
    const K* keys = static_cast<const K*>(of.candidate_keys) + of.begins[task];
    Taker<K> taken{K(of.grown_key), of.ties[task]};
    for (int64_t r = rows.begin; r < rows.end; keys += of.candidates[r], ++r) {
      int32_t count = of.kept[r];
      for (int32_t i = 0; i < of.candidates[r]; ++i) count += taken(keys[i]);
      of.out_offsets[r + 1] = count;
    }
  }

  static void Write(const RegrowArgs& args, RegrowMatrix& of, int64_t task) {
    const Rows rows(args, task);
    const K* keys = static_cast<const K*>(of.candidate_keys) + of.begins[task];
    const int32_t* columns = of.candidate_columns + of.begins[task];
    Taker<K> taken{K(of.grown_key), of.ties[task]};
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const RowOfGroups row(of, r);
      const uint8_t* marks = of.marks + r * args.mark_bytes;
      int32_t* indices = of.out_indices + of.out_offsets[r];
      int32_t* sources = of.out_sources + of.out_offsets[r];
      int64_t place = 0, i = 0;
      const auto put_kept_before = [&](int32_t end) {
        for (; i < row.count && row.Column(i) < end; ++i) {
          const int32_t column = row.Column(i);
          if (!Marked(marks, column)) continue;
          indices[place] = column;
          sources[place++] = row.Position(i);
        }
      };
      for (int32_t c = 0; c < of.candidates[r]; ++c) {
        if (!taken(keys[c])) continue;
        put_kept_before(columns[c]);
        indices[place] = columns[c];
        sources[place++] = -1;
      }
      put_kept_before(INT32_MAX);
      keys += of.candidates[r];
      columns += of.candidates[r];
    }
    if (rows.end != args.rows) return;
    for (int64_t p = of.out_offsets[args.rows]; p < args.groups; ++p) {  // padding
      of.out_indices[p] = 0;
      of.out_sources[p] = -1;
    }
  }
};

void OffsetsOfCounts(const RegrowArgs& args, RegrowMatrix& of) {
  of.out_offsets[0] = 0;
  for (int64_t r = 0; r < args.rows; ++r) of.out_offsets[r + 1] += of.out_offsets[r];
}

}  // namespace

void Regrow(const RegrowArgs& args, int64_t task) {
  const int64_t tasks = IsOfRows(int(args.phase)) ? args.row_tasks : 1;
  RegrowMatrix& of = args.matrices[task / tasks];
  task %= tasks;
  using Phase = RegrowPhase;
  if (args.phase <= Phase::kMark) {
    return DispatchDtype(args.norms_dtype, [&](auto type) {
      using Norms = OfNorms<typename decltype(type)::type>;
      if (args.phase == Phase::kOrder) return Norms::Order(args, of, task);
      if (args.phase == Phase::kKept) return Norms::Kept(args, of);
      Norms::Mark(args, of, task);
    });
  }
  if (args.phase == Phase::kOffsets) return OffsetsOfCounts(args, of);
  if (args.phase == Phase::kEnough) {
    of.again = !of.all_cells && of.found < of.grow;
    if (of.again) of.all_cells = true, of.found = 0;
    return;
  }
  DispatchDtype(args.scores_dtype, [&](auto type) {
    using Scores = OfScores<typename decltype(type)::type>;
    switch (args.phase) {
      case Phase::kSample:
        return Scores::Sample(args, of);
      case Phase::kCandidates:
        return Scores::Candidates(args, of, task);
      case Phase::kAllCells:
        return of.again ? Scores::Candidates(args, of, task) : void();
      case Phase::kGrown:
        return Scores::Grown(args, of);
      case Phase::kCount:
        return Scores::Count(args, of, task);
      default:
        return Scores::Write(args, of, task);
    }
  });
}

}  // namespace sgap::SGAP_ISA

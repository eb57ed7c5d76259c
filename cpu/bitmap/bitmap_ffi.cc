// FFI targets sgap_bitmap_of_mask_v1 and sgap_bitmap_of_scores_v1, the bits of a mask and of the
// scores that reach a bound; sgap_bitmap_entries_v1, the rows and columns of the bits that are set,
// of which the first nse are stored and all are counted; and sgap_reached_csr_v1 and
// sgap_nonzero_csr_v1, which make bits and take the entries of a matrix there, while its numbers
// are in the cache.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/bitmap/bitmap.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskWords = 1 << 12;
constexpr int64_t kWordWork = 8, kEntryWork = 2, kScoreWork = 1;  // in units of ParallelTasks

int64_t WordsOf(int64_t columns) { return (columns + kWordColumns - 1) / kWordColumns; }

// A number of a type, and which of its bits say that it is not 0: all but signs.
struct NumberBits {
  int bytes;  // 0: of no kernel
  uint64_t significant;
};

NumberBits BitsOfNumber(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
    case ffi::S8:
    case ffi::U8:
      return {1, 0xff};
    case ffi::S16:
    case ffi::U16:
      return {2, 0xffff};
    case ffi::F16:
    case ffi::BF16:
      return {2, 0x7fff};
    case ffi::S32:
    case ffi::U32:
      return {4, 0xffffffff};
    case ffi::F32:
      return {4, 0x7fffffff};
    case ffi::S64:
    case ffi::U64:
      return {8, ~uint64_t(0)};
    case ffi::F64:
      return {8, ~uint64_t(0) >> 1};
    case ffi::C64:
      return {8, 0x7fffffff7fffffff};
    case ffi::C128:
      return {16, ~uint64_t(0) >> 1};
    default:
      return {0, 0};
  }
}

ffi::Future BitmapOfMaskHandler(ffi::ThreadPool pool, ffi::AnyBuffer mask,
                                ffi::Result<ffi::AnyBuffer> words) {
  const int64_t rows = Leading(mask, 1);
  if (rows < 0 || mask.element_type() != ffi::PRED) {
    return Failed("bitmap: mask: expected booleans [..., columns]");
  }
  BitmapOfNonzeroArgs args;
  args.columns = mask.dimensions().back();
  args.row_words = WordsOf(args.columns);
  const std::string error = NotEach("words", "mask", *words, ffi::U32, rows, {args.row_words});
  if (!error.empty()) return Failed("bitmap: " + error);
  args.x = static_cast<const char*>(mask.untyped_data());
  args.words = static_cast<uint32_t*>(words->untyped_data());
  args.rows = rows;
  args.task_words = kTaskWords;
  args.element_bytes = 1;
  args.significant = 0xff;
  const int64_t all = rows * args.row_words;
  if (all == 0) return Finished();
  return ParallelTasks(pool, (all + kTaskWords - 1) / kTaskWords, all * kWordWork,
                       [args](int64_t task) { Kernels().BitmapOfNonzero(args, task); });
}

// Checks scores [..., columns], least [...] and limits [...], and takes them.
std::string SetScores(ffi::AnyBuffer scores, ffi::AnyBuffer least, ffi::AnyBuffer limits,
                      BitmapOfScoresArgs& args) {
  const int64_t rows = Leading(scores, 1);
  const ffi::DataType type = scores.element_type();
  if (rows < 0 || !ToDtype(type)) {
    return "scores: expected [..., columns] in float32, float64, bfloat16 or float16";
  }
  const ffi::DataType wide = type == ffi::F64 ? ffi::F64 : ffi::F32;
  std::string error = NotEach("least", "scores", least, wide, rows, {});
  if (error.empty()) error = NotEach("limits", "scores", limits, ffi::S32, rows, {});
  args.dtype = *ToDtype(type);
  args.scores = scores.untyped_data();
  args.least = least.untyped_data();
  args.limits = Ints(limits);
  args.rows = rows;
  args.columns = scores.dimensions().back();
  args.row_words = WordsOf(args.columns);
  args.task_words = kTaskWords;
  return error;
}

ffi::Future BitmapOfScoresHandler(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::AnyBuffer least,
                                  ffi::AnyBuffer limits, ffi::Result<ffi::AnyBuffer> words) {
  BitmapOfScoresArgs args;
  std::string error = SetScores(scores, least, limits, args);
  if (error.empty()) {
    error = NotEach("words", "scores", *words, ffi::U32, args.rows, {args.row_words});
  }
  if (!error.empty()) return Failed("bitmap: " + error);
  args.words = static_cast<uint32_t*>(words->untyped_data());
  const int64_t all = args.rows * args.row_words;
  if (all == 0) return Finished();
  return ParallelTasks(pool, (all + kTaskWords - 1) / kTaskWords, args.rows * args.columns,
                       [args](int64_t task) { Kernels().BitmapOfScores(args, task); });
}

// The entries of a batch of bitmaps.
struct EntriesCall {
  BitmapEntriesArgs args = {};  // of the first one
  int64_t batch = 0;
  std::vector<int64_t> counts, begins;  // [batch, tasks], [batch, tasks + 1]

  // False where nothing is left to be done.
  bool Place() {
    const int64_t all = args.rows * args.row_words;
    if (all == 0 || batch == 0) {
      std::fill_n(args.offsets, batch * (args.rows + 1), 0);
      std::fill_n(args.columns, batch * args.nse, 0);
      if (args.entry_rows) std::fill_n(args.entry_rows, batch * args.nse, 0);
      if (args.values) std::fill_n(args.values, batch * args.nse * args.element_bytes, 0);
      return false;
    }
    args.task_words = kTaskWords;
    args.tasks = (all + kTaskWords - 1) / kTaskWords;
    counts.resize(size_t(batch * args.tasks));
    begins.resize(size_t(batch * (args.tasks + 1)));
    return true;
  }

  BitmapEntriesArgs Of(int64_t b) {
    BitmapEntriesArgs own = args;
    own.words += b * args.rows * args.row_words;
    own.offsets += b * (args.rows + 1);
    own.columns += b * args.nse;
    if (own.entry_rows) own.entry_rows += b * args.nse;
    if (own.x) own.x += b * args.rows * args.x_columns * args.element_bytes;
    if (own.values) own.values += b * args.nse * args.element_bytes;
    own.counts = counts.data() + b * args.tasks;
    return own;
  }

  int64_t* Begins(int64_t b) { return begins.data() + b * (args.tasks + 1); }

  void Count(int64_t b, int64_t task) {
    BitmapEntriesArgs own = Of(b);
    own.phase = BitmapPhase::kCount;
    Kernels().BitmapEntries(own, task);
  }

  void Write(int64_t b, int64_t task) {
    BitmapEntriesArgs own = Of(b);
    own.phase = BitmapPhase::kWrite;
    own.begin = Begins(b)[task];
    own.end = Begins(b)[task + 1];
    Kernels().BitmapEntries(own, task);
  }

  void WriteEnd(int64_t b, int64_t task) {
    BitmapEntriesArgs own = Of(b);
    own.phase = BitmapPhase::kEnd;
    own.end = Begins(b)[args.tasks];
    Kernels().BitmapEntries(own, task);
  }
};

// Checks what is stored of each of `batch` matrices, and takes it.
std::string SetEntries(int64_t batch, int64_t rows, int64_t row_words, ffi::AnyBuffer offsets,
                       ffi::AnyBuffer columns, EntriesCall& call) {
  if (columns.dimensions().size() < 1) return "columns: expected [..., nse]";
  const int64_t nse = columns.dimensions().back();
  std::string error = NotEach("offsets", "words", offsets, ffi::S32, batch, {rows + 1});
  if (error.empty()) error = NotEach("columns", "words", columns, ffi::S32, batch, {nse});
  if (error.empty() &&
      (rows > INT32_MAX || row_words > INT32_MAX / kWordColumns || nse > INT32_MAX)) {
    error = "2^31 rows, columns or entries, or more";
  }
  call.batch = batch;
  call.args.offsets = Ints(offsets);
  call.args.columns = Ints(columns);
  call.args.rows = rows, call.args.row_words = row_words, call.args.nse = nse;
  return error;
}

ffi::Future BitmapEntriesHandler(ffi::ThreadPool pool, ffi::AnyBuffer words,
                                 ffi::Result<ffi::AnyBuffer> offsets,
                                 ffi::Result<ffi::AnyBuffer> rows,
                                 ffi::Result<ffi::AnyBuffer> columns) {
  const int64_t batch = Leading(words, 2);
  if (batch < 0 || words.element_type() != ffi::U32) {
    return Failed("bitmap: expected words uint32 [..., rows, row_words]");
  }
  const auto call = std::make_shared<EntriesCall>();
  BitmapEntriesArgs& args = call->args;
  const int64_t* last = words.dimensions().end() - 2;
  std::string error = SetEntries(batch, last[0], last[1], *offsets, *columns, *call);
  if (error.empty()) error = NotEach("rows", "words", *rows, ffi::S32, batch, {args.nse});
  if (!error.empty()) return Failed("bitmap: " + error);
  args.words = static_cast<const uint32_t*>(words.untyped_data());
  args.entry_rows = Ints(*rows);
  if (!call->Place()) return Finished();
  const int64_t tasks = batch * args.tasks, all = args.rows * args.row_words;
  return ParallelPhases(pool, {tasks, batch, tasks},
                        batch * (all * kWordWork + args.nse * kEntryWork),
                        [call, tasks, batch](int64_t task) {
                          const int64_t each = call->args.tasks;
                          if (task < tasks) return call->Count(task / each, task % each);
                          task -= tasks;
                          if (task < batch) {
                            const int64_t* counts = call->counts.data() + task * each;
                            int64_t* begins = call->Begins(task);
                            std::partial_sum(counts, counts + each, begins + 1);
                            return;
                          }
                          task -= batch;
                          call->Write(task / each, task % each);
                          call->WriteEnd(task / each, task % each);
                        });
}

// The entries of matrices whose numbers make the bits. A task's place is known when those before it
// are counted: whoever counts the last of these writes its entries, whose numbers are still in the
// cache.
struct DenseEntriesCall : EntriesCall {
  BitmapOfScoresArgs scores = {};  // of rows that reach a bound, or
  BitmapOfNonzeroArgs nonzero = {};
  const uint32_t* kept = nullptr;  // [batch, rows, row_words]: bits that are set anyhow
  Workspace words;
  std::atomic<int64_t> taken{0};  // tasks that have begun
  std::mutex mutex;
  std::vector<uint8_t> counted;  // [batch, tasks]
  std::vector<int64_t> next;     // [batch]: the first task whose place is not known

  // False where there is no memory.
  bool PlaceWords() {
    words = AcquireWorkspace(size_t(batch * args.rows * args.row_words) * sizeof(uint32_t));
    args.words = static_cast<uint32_t*>(words.get());
    counted.resize(size_t(batch * args.tasks));
    next.resize(size_t(batch));
    return bool(words);
  }

  void MakeWords(int64_t b, int64_t task) {
    const BitmapEntriesArgs whole = Of(b);
    uint32_t* own_words = const_cast<uint32_t*>(whole.words);
    if (scores.scores) {
      BitmapOfScoresArgs own = scores;
      own.scores = whole.x;
      own.least = static_cast<const char*>(scores.least) +
                  size_t(b * args.rows) * AccumulatorBytes(scores.dtype);
      own.limits = scores.limits + b * args.rows;
      own.words = own_words;
      own.rows = args.rows;
      Kernels().BitmapOfScores(own, task);
    } else {
      BitmapOfNonzeroArgs own = nonzero;
      own.x = whole.x;
      own.words = own_words;
      Kernels().BitmapOfNonzero(own, task);
    }
    if (!kept) return;
    const int64_t all = args.rows * args.row_words, begin = task * args.task_words;
    const int64_t end = std::min(begin + args.task_words, all);
    for (int64_t i = begin; i < end; ++i) own_words[i] |= kept[b * all + i];
  }

  void MakeAndWrite(int64_t b, int64_t task) {
    MakeWords(b, task);
    Count(b, task);
    int64_t first, end;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      counted[size_t(b * args.tasks + task)] = 1;
      first = end = next[size_t(b)];
      for (; end < args.tasks && counted[size_t(b * args.tasks + end)]; ++end) {
        Begins(b)[end + 1] = Begins(b)[end] + counts[size_t(b * args.tasks + end)];
      }
      next[size_t(b)] = end;
    }
    for (; first < end; ++first) Write(b, first);
  }
};

// Checks x [..., rows, columns] and the results, and takes them.
std::string SetDenseEntries(ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                            ffi::AnyBuffer columns, EntriesCall& call) {
  BitmapEntriesArgs& args = call.args;
  const int64_t batch = Leading(x, 2);
  const ffi::DataType type = x.element_type();
  args.element_bytes = BitsOfNumber(type).bytes;
  if (batch < 0 || args.element_bytes == 0) {
    return "expected numbers [..., rows, columns] of a dtype of 1 to 16 bytes";
  }
  const int64_t* last = x.dimensions().end() - 2;
  std::string error = SetEntries(batch, last[0], WordsOf(last[1]), offsets, columns, call);
  if (error.empty()) error = NotEach("values", "columns", values, type, batch, {args.nse});
  args.x = static_cast<const char*>(x.untyped_data());
  args.values = static_cast<char*>(values.untyped_data());
  args.x_columns = last[1];
  return error;
}

ffi::Future RunDenseEntries(ffi::ThreadPool pool, std::shared_ptr<DenseEntriesCall> call) {
  const BitmapEntriesArgs& args = call->args;
  if (!call->Place()) return Finished();
  if (!call->PlaceWords()) return Failed("bitmap: no memory for its words");
  call->scores.task_words = call->nonzero.task_words = args.task_words;
  const int64_t tasks = call->batch * args.tasks;
  const int64_t work =
      call->batch * (args.rows * args.x_columns * kScoreWork + args.nse * kEntryWork);
  // Threads begin with tasks far from each other, and would know no place for long.
  const bool in_order = pool.num_threads() > 1;
  return ParallelPhases(pool, {tasks, tasks}, work, [call, tasks, in_order](int64_t task) {
    const int64_t each = call->args.tasks;
    if (task < tasks) {
      if (in_order) task = call->taken.fetch_add(1, std::memory_order_relaxed);
      return call->MakeAndWrite(task / each, task % each);
    }
    call->WriteEnd((task - tasks) / each, (task - tasks) % each);
  });
}

ffi::Future ReachedHandler(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::AnyBuffer least,
                           ffi::AnyBuffer limits, ffi::AnyBuffer kept,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> offsets,
                           ffi::Result<ffi::AnyBuffer> columns) {
  const auto call = std::make_shared<DenseEntriesCall>();
  const BitmapEntriesArgs& args = call->args;
  std::string error = SetScores(scores, least, limits, call->scores);
  if (error.empty()) error = SetDenseEntries(scores, *values, *offsets, *columns, *call);
  const auto shape = kept.dimensions();
  const int64_t kept_words = shape.size() == 0 ? -1 : shape.back();
  if (error.empty() && kept_words != 0) {
    error = NotEach("kept", "scores", kept, ffi::U32, call->batch, {args.rows, args.row_words});
    call->kept = static_cast<const uint32_t*>(kept.untyped_data());
  }
  if (!error.empty()) return Failed("reached: " + error);
  return RunDenseEntries(pool, call);
}

ffi::Future NonzeroHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> offsets,
                           ffi::Result<ffi::AnyBuffer> columns) {
  const auto call = std::make_shared<DenseEntriesCall>();
  const std::string error = SetDenseEntries(x, *values, *offsets, *columns, *call);
  if (!error.empty()) return Failed("nonzero: " + error);
  BitmapOfNonzeroArgs& bits = call->nonzero;
  bits.rows = call->args.rows;
  bits.columns = call->args.x_columns;
  bits.row_words = call->args.row_words;
  bits.element_bytes = call->args.element_bytes;
  bits.significant = BitsOfNumber(x.element_type()).significant;
  return RunDenseEntries(pool, call);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    BitmapOfMaskFfi, BitmapOfMaskHandler,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(BitmapOfScoresFfi, BitmapOfScoresHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // scores [..., columns]
                                  .Arg<ffi::AnyBuffer>()    // least [...]
                                  .Arg<ffi::AnyBuffer>()    // limits [...]
                                  .Ret<ffi::AnyBuffer>());  // words [..., row_words]

XLA_FFI_DEFINE_HANDLER_SYMBOL(BitmapEntriesFfi, BitmapEntriesHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // words [..., rows, row_words]
                                  .Ret<ffi::AnyBuffer>()    // offsets [..., rows + 1]
                                  .Ret<ffi::AnyBuffer>()    // rows [..., nse]
                                  .Ret<ffi::AnyBuffer>());  // columns [..., nse]

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReachedFfi, ReachedHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // scores [..., rows, columns]
                                  .Arg<ffi::AnyBuffer>()    // least [..., rows]
                                  .Arg<ffi::AnyBuffer>()    // limits [..., rows]
                                  .Arg<ffi::AnyBuffer>()    // kept [..., rows, 0 or row_words]
                                  .Ret<ffi::AnyBuffer>()    // values [..., nse]
                                  .Ret<ffi::AnyBuffer>()    // offsets [..., rows + 1]
                                  .Ret<ffi::AnyBuffer>());  // columns [..., nse]

XLA_FFI_DEFINE_HANDLER_SYMBOL(NonzeroFfi, NonzeroHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // x [..., rows, columns]
                                  .Ret<ffi::AnyBuffer>()    // values [..., nse]
                                  .Ret<ffi::AnyBuffer>()    // offsets [..., rows + 1]
                                  .Ret<ffi::AnyBuffer>());  // columns [..., nse]

}  // namespace sgap

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

// The bits of a batch of scores.
struct ScoresCall {
  BitmapOfScoresArgs args = {};  // of the first one
  int64_t batch = 0;
  int64_t scores_stride = 0, kept_stride = 0;  // bytes from one to the next, 0 where shared

  // Checks scores [1 or batch, rows, columns], least and limits [batch, rows], and kept
  // [1 or batch, rows, 0 or columns], and takes them.
  std::string Set(ffi::AnyBuffer scores, ffi::AnyBuffer least, ffi::AnyBuffer limits,
                  ffi::AnyBuffer kept) {
    const ffi::DataType type = scores.element_type();
    if (!ToDtype(type)) return "scores: expected float32, float64, bfloat16 or float16";
    std::string error = Mismatch("scores", scores, type, {kAnySize, kAnySize, kAnySize});
    if (!error.empty()) return error;
    const int64_t own = scores.dimensions()[0];
    args.rows = scores.dimensions()[1];
    args.columns = scores.dimensions()[2];
    error = Mismatch("least", least, type == ffi::F64 ? ffi::F64 : ffi::F32, {kAnySize, args.rows});
    if (!error.empty()) return error;
    batch = least.dimensions()[0];
    error = Mismatch("limits", limits, ffi::S32, {batch, args.rows});
    if (error.empty()) error = Mismatch("kept", kept, ffi::PRED, {kAnySize, args.rows, kAnySize});
    if (!error.empty()) return error;
    const int64_t kept_batch = kept.dimensions()[0], kept_columns = kept.dimensions()[2];
    if ((own != 1 && own != batch) || (kept_batch != 1 && kept_batch != batch)) {
      return "scores and kept: expected batches of 1 or of " + std::to_string(batch);
    }
    if (kept_columns != 0 && kept_columns != args.columns) {
      return "kept: expected none or " + std::to_string(args.columns) + " columns, got " +
             std::to_string(kept_columns);
    }
    const int64_t places = args.rows * args.columns;
    args.dtype = *ToDtype(type);
    scores_stride = own == 1 ? 0 : places * int64_t(DtypeBytes(args.dtype));
    kept_stride = kept_batch == 1 ? 0 : places;
    args.scores = scores.untyped_data();
    args.least = least.untyped_data();
    args.limits = Ints(limits);
    if (kept_columns > 0) args.kept = static_cast<const uint8_t*>(kept.untyped_data());
    args.row_words = WordsOf(args.columns);
    args.task_words = kTaskWords;
    return "";
  }

  int64_t Tasks() const { return (args.rows * args.row_words + kTaskWords - 1) / kTaskWords; }

  // words: of the whole batch.
  void Run(uint32_t* words, int64_t b, int64_t task) const {
    BitmapOfScoresArgs own = args;
    own.scores = static_cast<const char*>(args.scores) + b * scores_stride;
    own.least =
        static_cast<const char*>(args.least) + size_t(b * args.rows) * AccumulatorBytes(args.dtype);
    own.limits += b * args.rows;
    if (own.kept) own.kept += b * kept_stride;
    own.words = words + b * args.rows * args.row_words;
    Kernels().BitmapOfScores(own, task);
  }
};

ffi::Future BitmapOfScoresHandler(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::AnyBuffer least,
                                  ffi::AnyBuffer limits, ffi::AnyBuffer kept,
                                  ffi::Result<ffi::AnyBuffer> result) {
  ScoresCall call;
  std::string error = call.Set(scores, least, limits, kept);
  if (error.empty()) {
    error = Mismatch("words", *result, ffi::U32, {call.batch, call.args.rows, call.args.row_words});
  }
  if (!error.empty()) return Failed("bitmap: " + error);
  auto* const words = static_cast<uint32_t*>(result->untyped_data());
  const int64_t tasks = call.Tasks(), work = call.batch * call.args.rows * call.args.columns;
  if (tasks * call.batch == 0) return Finished();
  return ParallelTasks(pool, tasks * call.batch, work * kScoreWork,
                       [=](int64_t task) { call.Run(words, task / tasks, task % tasks); });
}

// The entries of a batch of bitmaps.
struct EntriesCall {
  BitmapEntriesArgs args = {};  // of the first one
  int64_t batch = 0;
  int64_t x_stride = 0;                 // bytes from one matrix to the next, 0 where all share one
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
    if (own.x) own.x += b * x_stride;
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
// are counted: whoever counts the last of these writes its entries, mostly of its own task or of
// one that has just ended, so that their numbers are still in a cache.
struct DenseEntriesCall : EntriesCall {
  ScoresCall scores;                 // whose bits are of scores that reach a bound, where it has
  BitmapOfNonzeroArgs nonzero = {};  // some; else of numbers that are not 0
  Workspace memory;
  std::atomic<int64_t> begun{0};  // tasks
  std::mutex mutex;
  std::vector<uint8_t> counted;  // [batch, tasks]
  std::vector<int64_t> next;     // [batch]: the first task whose place is not known

  // False where there is no memory.
  bool PlaceWords() {
    memory = AcquireWorkspace(size_t(batch * args.rows * args.row_words) * sizeof(uint32_t));
    args.words = Words();
    counted.resize(size_t(batch * args.tasks));
    next.resize(size_t(batch));
    return bool(memory);
  }

  uint32_t* Words() { return static_cast<uint32_t*>(memory.get()); }

  void MakeWords(int64_t b, int64_t task) {
    if (scores.batch > 0) return scores.Run(Words(), b, task);
    BitmapOfNonzeroArgs own = nonzero;
    own.x = Of(b).x;
    own.words = Words() + b * args.rows * args.row_words;
    Kernels().BitmapOfNonzero(own, task);
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

// Checks x [1 or batch, rows, columns] and the results, and takes them.
std::string SetDenseEntries(int64_t batch, ffi::AnyBuffer x, ffi::AnyBuffer values,
                            ffi::AnyBuffer offsets, ffi::AnyBuffer columns, EntriesCall& call) {
  BitmapEntriesArgs& args = call.args;
  const ffi::DataType type = x.element_type();
  args.element_bytes = BitsOfNumber(type).bytes;
  if (x.dimensions().size() != 3 || args.element_bytes == 0) {
    return "expected numbers [batch, rows, columns] of a dtype of 1 to 16 bytes";
  }
  const int64_t rows = x.dimensions()[1];
  args.x_columns = x.dimensions()[2];
  std::string error = SetEntries(batch, rows, WordsOf(args.x_columns), offsets, columns, call);
  if (error.empty()) error = Mismatch("values", values, type, {batch, args.nse});
  args.x = static_cast<const char*>(x.untyped_data());
  args.values = static_cast<char*>(values.untyped_data());
  call.x_stride = x.dimensions()[0] == 1 ? 0 : rows * args.x_columns * args.element_bytes;
  return error;
}

ffi::Future RunDenseEntries(ffi::ThreadPool pool, std::shared_ptr<DenseEntriesCall> call) {
  const BitmapEntriesArgs& args = call->args;
  if (!call->Place()) return Finished();
  if (!call->PlaceWords()) return Failed("bitmap: no memory for its words");
  const int64_t tasks = call->batch * args.tasks;
  const int64_t work =
      call->batch * (args.rows * args.x_columns * kScoreWork + args.nse * kEntryWork);
  // ParallelPhases gives each thread tasks of its own that follow each other. The second thread
  // would know no place before the first one has ended: threads take the next task of all instead.
  const bool takes_next = pool.num_threads() > 1;
  return ParallelPhases(pool, {tasks, tasks}, work, [call, tasks, takes_next](int64_t task) {
    const int64_t each = call->args.tasks;
    if (task < tasks) {
      if (takes_next) task = call->begun.fetch_add(1, std::memory_order_relaxed);
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
  std::string error = call->scores.Set(scores, least, limits, kept);
  if (error.empty()) {
    error = SetDenseEntries(call->scores.batch, scores, *values, *offsets, *columns, *call);
  }
  if (!error.empty()) return Failed("reached: " + error);
  return RunDenseEntries(pool, call);
}

ffi::Future NonzeroHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> offsets,
                           ffi::Result<ffi::AnyBuffer> columns) {
  const auto call = std::make_shared<DenseEntriesCall>();
  const int64_t batch = x.dimensions().size() > 0 ? x.dimensions()[0] : 0;
  const std::string error = SetDenseEntries(batch, x, *values, *offsets, *columns, *call);
  if (!error.empty()) return Failed("nonzero: " + error);
  BitmapOfNonzeroArgs& bits = call->nonzero;
  bits.task_words = kTaskWords;
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
                                  .Arg<ffi::AnyBuffer>()    // scores [1 or batch, rows, columns]
                                  .Arg<ffi::AnyBuffer>()    // least [batch, rows]
                                  .Arg<ffi::AnyBuffer>()    // limits [batch, rows]
                                  .Arg<ffi::AnyBuffer>()    // kept [1 or batch, rows, 0 or columns]
                                  .Ret<ffi::AnyBuffer>());  // words [batch, rows, row_words]

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
                                  .Arg<ffi::AnyBuffer>()    // scores [1 or batch, rows, columns]
                                  .Arg<ffi::AnyBuffer>()    // least [batch, rows]
                                  .Arg<ffi::AnyBuffer>()    // limits [batch, rows]
                                  .Arg<ffi::AnyBuffer>()    // kept [1 or batch, rows, 0 or columns]
                                  .Ret<ffi::AnyBuffer>()    // values [batch, nse]
                                  .Ret<ffi::AnyBuffer>()    // offsets [batch, rows + 1]
                                  .Ret<ffi::AnyBuffer>());  // columns [batch, nse]

XLA_FFI_DEFINE_HANDLER_SYMBOL(NonzeroFfi, NonzeroHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // x [batch, rows, columns]
                                  .Ret<ffi::AnyBuffer>()    // values [batch, nse]
                                  .Ret<ffi::AnyBuffer>()    // offsets [batch, rows + 1]
                                  .Ret<ffi::AnyBuffer>());  // columns [batch, nse]

}  // namespace sgap

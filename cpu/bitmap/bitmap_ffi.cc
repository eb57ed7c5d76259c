// FFI targets sgap_bitmap_of_mask_v1, which packs a mask into bits, and sgap_bitmap_entries_v1, the
// rows and columns of the bits that are set, of which the first nse are stored and all are counted.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/bitmap/bitmap.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskWords = 1 << 12;
constexpr int64_t kWordWork = 8, kEntryWork = 2;  // in units of ParallelTasks

ffi::Future BitmapOfMaskHandler(ffi::ThreadPool pool, ffi::AnyBuffer mask,
                                ffi::Result<ffi::AnyBuffer> words) {
  const int64_t rows = Leading(mask, 1);
  if (rows < 0 || mask.element_type() != ffi::PRED) {
    return Failed("bitmap: mask: expected booleans [..., columns]");
  }
  const int64_t columns = mask.dimensions().back();
  const int64_t row_words = (columns + kWordColumns - 1) / kWordColumns;
  const std::string error = NotEach("words", "mask", *words, ffi::U32, rows, {row_words});
  if (!error.empty()) return Failed("bitmap: " + error);
  BitmapOfMaskArgs args;
  args.mask = static_cast<const uint8_t*>(mask.untyped_data());
  args.words = static_cast<uint32_t*>(words->untyped_data());
  args.rows = rows, args.columns = columns, args.row_words = row_words;
  args.task_words = kTaskWords;
  const int64_t all = rows * row_words;
  if (all == 0) return Finished();
  return ParallelTasks(pool, (all + kTaskWords - 1) / kTaskWords, all * kWordWork,
                       [args](int64_t task) { Kernels().BitmapOfMask(args, task); });
}

ffi::Future BitmapEntriesHandler(ffi::ThreadPool pool, ffi::AnyBuffer words,
                                 ffi::Result<ffi::AnyBuffer> offsets,
                                 ffi::Result<ffi::AnyBuffer> rows,
                                 ffi::Result<ffi::AnyBuffer> columns) {
  const int64_t batch = Leading(words, 2);
  if (batch < 0 || words.element_type() != ffi::U32 || columns->dimensions().size() < 1) {
    return Failed("bitmap: expected words uint32 [..., rows, row_words] and columns [..., nse]");
  }
  const int64_t* last = words.dimensions().end() - 2;
  const int64_t nse = columns->dimensions().back();
  std::string error = NotEach("offsets", "words", *offsets, ffi::S32, batch, {last[0] + 1});
  if (error.empty()) error = NotEach("rows", "words", *rows, ffi::S32, batch, {nse});
  if (error.empty()) error = NotEach("columns", "words", *columns, ffi::S32, batch, {nse});
  if (error.empty() &&
      (last[0] > INT32_MAX || last[1] > INT32_MAX / kWordColumns || nse > INT32_MAX)) {
    error = "2^31 rows, columns or entries, or more";
  }
  if (!error.empty()) return Failed("bitmap: " + error);
  struct Call {
    BitmapEntriesArgs args;
    std::vector<int64_t> begins;
  };
  const auto call = std::make_shared<Call>();
  BitmapEntriesArgs& args = call->args;
  args.words = static_cast<const uint32_t*>(words.untyped_data());
  args.offsets = Ints(*offsets);
  args.entry_rows = Ints(*rows);
  args.columns = Ints(*columns);
  args.rows = last[0], args.row_words = last[1], args.nse = nse;
  const int64_t all = args.rows * args.row_words;
  if (all == 0 || batch == 0) {
    std::fill_n(args.offsets, batch * (args.rows + 1), 0);
    std::fill_n(args.entry_rows, batch * nse, 0);
    std::fill_n(args.columns, batch * nse, 0);
    return Finished();
  }
  args.task_words = kTaskWords;
  args.tasks = (all + kTaskWords - 1) / kTaskWords;
  call->begins.resize(size_t(batch * (args.tasks + 1)));
  args.begins = call->begins.data();
  const int64_t tasks = batch * args.tasks;
  return ParallelPhases(pool, {tasks, batch, tasks}, batch * (all * kWordWork + nse * kEntryWork),
                        [call, tasks, batch](int64_t task) {
                          BitmapEntriesArgs own = call->args;
                          if (task >= tasks && task < tasks + batch) {
                            int64_t* begins = own.begins + (task - tasks) * (own.tasks + 1);
                            for (int64_t t = 0; t < own.tasks; ++t) begins[t + 1] += begins[t];
                            return;
                          }
                          own.phase = task < tasks ? BitmapPhase::kCount : BitmapPhase::kWrite;
                          Kernels().BitmapEntries(own, task < tasks ? task : task - tasks - batch);
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    BitmapOfMaskFfi, BitmapOfMaskHandler,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(BitmapEntriesFfi, BitmapEntriesHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace sgap

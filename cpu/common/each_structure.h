// Calls on several structures: the index arrays have a leading axis, and the handler of one
// structure runs for each. The tasks of all these calls are those of one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace sgap {

// An index array of one structure; with another axis before, of several structures.
struct IndexArray : xla::ffi::AnyBuffer {
  using AnyBuffer::AnyBuffer;
};

}  // namespace sgap

template <>
struct xla::ffi::ArgDecoding<sgap::IndexArray> {
  static std::optional<sgap::IndexArray> Decode(XLA_FFI_ArgType type, void* arg,
                                                DiagnosticEngine& diagnostic) {
    if (!ArgDecoding<AnyBuffer>::Decode(type, arg, diagnostic)) return std::nullopt;
    return sgap::IndexArray(static_cast<const XLA_FFI_Buffer*>(arg));
  }
};

namespace sgap {

// The parts of buffers that belong to one structure; what it hands out lives as long as it does.
class StructureSlice {
 public:
  StructureSlice(int64_t structure, int64_t structures)
      : structure_(structure), structures_(structures) {}

  // Index arrays lose their first axis; an absent one, of rank 1 and empty, has none.
  IndexArray operator()(IndexArray buffer) {
    if (buffer.dimensions().size() < 2) return buffer;
    return IndexArray(Part(buffer, 1, 1));
  }
  // Of data the first axis is the batch: 1 where all structures share it, else as many elements for
  // each structure.
  xla::ffi::AnyBuffer operator()(xla::ffi::AnyBuffer buffer) {
    const auto shape = buffer.dimensions();
    if (shape.size() == 0 || shape[0] == 1) return buffer;
    return xla::ffi::AnyBuffer(Part(buffer, shape[0] / structures_, 0));
  }
  xla::ffi::Result<xla::ffi::AnyBuffer> operator()(xla::ffi::Result<xla::ffi::AnyBuffer> buffer) {
    return (*this)(*buffer);
  }
  template <typename Attribute>
  Attribute operator()(Attribute attribute) {
    return attribute;
  }

 private:
  // `count` elements of the first axis for each structure; without the first `dropped` axes.
  const XLA_FFI_Buffer* Part(xla::ffi::AnyBuffer buffer, int64_t count, size_t dropped);

  struct Owned {
    XLA_FFI_Buffer buffer;
    std::vector<int64_t> shape;
  };
  const int64_t structure_, structures_;
  std::list<Owned> parts_;
};

// How many structures a call's index arrays are of; none where there is one and no axis for more.
// Error() says what does not fit; a result has elements for each structure.
class StructureCount {
 public:
  void See(IndexArray buffer);
  void See(xla::ffi::AnyBuffer buffer);
  void See(xla::ffi::Result<xla::ffi::AnyBuffer> buffer);
  template <typename Attribute>
  void See(const Attribute&) {}

  const std::optional<int64_t>& Found() const { return found_; }
  std::string Error() const;

 private:
  std::optional<int64_t> found_;
  bool single_ = false, several_counts_ = false;
  std::vector<int64_t> batches_, results_;
};

// Runs calls as one, whose tasks are all of theirs.
xla::ffi::Future RunTogether(xla::ffi::ThreadPool threads, DeferredCalls calls);

// Runs call(pool, i), which returns a handler's future, for each i below `count`, all as one call.
// Each looks at up to `entries` / `count` indices at once. Where that is much, call() runs on
// several threads, for several i at a time: it may write nothing that these share.
template <typename Call>
xla::ffi::Future RunEach(xla::ffi::ThreadPool threads, int64_t count, int64_t entries, Call call) {
  constexpr int64_t kFewEntries = 1 << 17;
  struct Begun {
    DeferredCalls calls;
    std::string error;
    std::exception_ptr thrown;
  };
  std::vector<Begun> begun(count);
  const auto begin = [&](int64_t i) {
    try {
      xla::ffi::Future future = call(Pool(threads, &begun[i].calls, count), i);
      future.OnReady([&](const std::optional<xla::ffi::Error>& found) {
        if (found) begun[i].error = found->message();
      });
    } catch (...) {
      begun[i].thrown = std::current_exception();
    }
  };
  const bool together = entries >= kFewEntries && count > 1 && threads.num_threads() > 1;
  if (together) RunAndWait(threads, count, begin);
  DeferredCalls all;
  for (int64_t i = 0; i < count; ++i) {
    if (!together) begin(i);
    if (begun[i].thrown) std::rethrow_exception(begun[i].thrown);
    if (!begun[i].error.empty()) return Failed(begun[i].error);
    std::move(begun[i].calls.begin(), begun[i].calls.end(), std::back_inserter(all));
  }
  return RunTogether(threads, std::move(all));
}

// Of a result as a whole: a page may hold parts of several structures, which handlers see alone.
inline void AdviseWhole(xla::ffi::Result<xla::ffi::AnyBuffer> result) {
  AdviseHugePages(result->untyped_data(), result->size_bytes());
}
template <typename Argument>
void AdviseWhole(const Argument&) {}

// kHandler(Pool, ...) for one structure, as a handler of index arrays of one structure or several.
template <auto kHandler>
struct EachStructure;

template <typename... Args, xla::ffi::Future (*kHandler)(Pool, Args...)>
struct EachStructure<kHandler> {
  static xla::ffi::Future Call(xla::ffi::ThreadPool threads, Args... args) {
    StructureCount count;
    (count.See(args), ...);
    if (!count.Found()) return kHandler(threads, args...);
    const std::string wrong = count.Error();
    if (!wrong.empty()) return Failed(wrong);
    (AdviseWhole(args), ...);
    // Most of these handlers look at indices in their tasks.
    return RunEach(threads, *count.Found(), /*entries=*/0, [&](const Pool& pool, int64_t i) {
      StructureSlice slice(i, *count.Found());
      return kHandler(pool, slice(args)...);
    });
  }
};

}  // namespace sgap

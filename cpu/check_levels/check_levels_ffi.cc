// Structures that are only known at run time. FFI targets sgap_check_csr_v1 and sgap_check_coo_v1,
// which fail for one that is wrong; sgap_valid_offsets_v1, which makes offsets valid; and
// sgap_check_levels_v1, by which a program asks whether loops that trust index arrays may run over
// these.
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/check_levels/check_levels.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

std::string At(const char* name, int64_t position) {
  return std::string(name) + "[" + std::to_string(position) + "]: ";
}

std::string CheckOffsets(const char* name, const int32_t* offsets, int64_t m, int64_t nnz) {
  if (offsets[0] != 0) return At(name, 0) + "expected 0, got " + std::to_string(offsets[0]);
  for (int64_t r = 0; r < m; ++r) {
    if (offsets[r + 1] < offsets[r]) {
      return At(name, r + 1) + "expected at least " + std::to_string(offsets[r]) + " (row " +
             std::to_string(r) + " begins there), got " + std::to_string(offsets[r + 1]);
    }
  }
  if (offsets[m] > nnz) {
    return At(name, m) + "expected at most nnz=" + std::to_string(nnz) + ", got " +
           std::to_string(offsets[m]);
  }
  return "";
}

std::string CheckIndices(const int32_t* offsets, int64_t m, const int32_t* indices,
                         int64_t columns) {
  constexpr int64_t kBlock = 4096;
  const int64_t stored = offsets[m];
  for (int64_t begin = 0; begin < stored; begin += kBlock) {
    const int64_t end = std::min(stored, begin + kBlock);
    int32_t least = 0, greatest = 0;
    for (int64_t p = begin; p < end; ++p) {
      least = std::min(least, indices[p]);
      greatest = std::max(greatest, indices[p]);
    }
    if (least >= 0 && greatest < columns) continue;
    for (int64_t p = begin; p < end; ++p) {
      if (indices[p] >= 0 && indices[p] < columns) continue;
      const int64_t row = std::upper_bound(offsets, offsets + m + 1, p) - offsets - 1;
      return At("column_indices", p) + "(row " + std::to_string(row) +
             "): expected 0 <= column < " + std::to_string(columns) + ", got " +
             std::to_string(indices[p]);
    }
  }
  return "";
}

// Within a row, columns rise: neither unsorted nor stored twice.
std::string CheckOrder(const int32_t* offsets, int64_t m, const int32_t* indices) {
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t p = offsets[r] + 1; p < offsets[r + 1]; ++p) {
      if (indices[p] > indices[p - 1]) continue;
      return At("column_indices", p) + "(row " + std::to_string(r) + "): expected more than " +
             std::to_string(indices[p - 1]) + " before it, got " + std::to_string(indices[p]);
    }
  }
  return "";
}

ffi::Error CheckCsrHandler(ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> indices,
                           ffi::Result<ffi::Buffer<ffi::S32>> out, int64_t columns) {
  const auto shape = offsets.dimensions();
  if (shape.size() != 1 || shape[0] < 1 || indices.dimensions().size() != 1 ||
      out->element_count() != offsets.element_count()) {
    return ffi::Error::InvalidArgument(
        "check: expected offsets [m + 1], indices [nnz] and a result like offsets, got " +
        ShapeString(shape) + ", " + ShapeString(indices.dimensions()) + ", " +
        ShapeString(out->dimensions()));
  }
  const int64_t m = shape[0] - 1;
  std::string error = CheckOffsets("row_offsets", offsets.typed_data(), m, indices.dimensions()[0]);
  if (error.empty()) error = CheckIndices(offsets.typed_data(), m, indices.typed_data(), columns);
  if (error.empty()) error = CheckOrder(offsets.typed_data(), m, indices.typed_data());
  if (!error.empty()) return ffi::Error::InvalidArgument("SparseArray: " + error);
  std::copy_n(offsets.typed_data(), m + 1, out->typed_data());
  return ffi::Error::Success();
}

// Bounds, then the coordinates of each dimension: in range, and sorted, each tuple once.
std::string CheckCoordinates(const int32_t* bounds, int64_t nnz,
                             const std::vector<const int32_t*>& levels,
                             ffi::Span<const int64_t> sizes) {
  const std::string error = CheckOffsets("bounds", bounds, 1, nnz);
  if (!error.empty()) return error;
  for (size_t l = 0; l < levels.size(); ++l) {
    for (int64_t p = 0; p < bounds[1]; ++p) {
      if (levels[l][p] >= 0 && levels[l][p] < sizes[l]) continue;
      return At(("level " + std::to_string(l)).c_str(), p) + "expected 0 <= index < " +
             std::to_string(sizes[l]) + ", got " + std::to_string(levels[l][p]);
    }
  }
  for (int64_t p = 1; p < bounds[1]; ++p) {
    size_t l = 0;
    while (l < levels.size() && levels[l][p] == levels[l][p - 1]) ++l;
    if (l < levels.size() && levels[l][p] > levels[l][p - 1]) continue;
    return "coordinates: expected them sorted and each once, got entry " + std::to_string(p) +
           (l == levels.size() ? " like" : " before") + " entry " + std::to_string(p - 1);
  }
  return "";
}

ffi::Error CheckCooHandler(ffi::Buffer<ffi::S32> bounds, ffi::RemainingArgs coordinates,
                           ffi::Result<ffi::Buffer<ffi::S32>> out, ffi::Span<const int64_t> sizes) {
  std::vector<const int32_t*> levels;
  int64_t nnz = -1;
  for (size_t l = 0; l < coordinates.size(); ++l) {
    const auto buffer = coordinates.get<ffi::Buffer<ffi::S32>>(l);
    const bool alike = buffer.has_value() && buffer->dimensions().size() == 1 &&
                       (nnz < 0 || buffer->dimensions()[0] == nnz);
    if (!alike) return ffi::Error::InvalidArgument("check: expected coordinates [nnz] of int32");
    nnz = buffer->dimensions()[0];
    levels.push_back(buffer->typed_data());
  }
  if (levels.empty() || sizes.size() != levels.size() || bounds.element_count() != 2 ||
      out->element_count() != 2) {
    return ffi::Error::InvalidArgument("check: expected bounds [2], and a size of each dimension");
  }
  const std::string error = CheckCoordinates(bounds.typed_data(), nnz, levels, sizes);
  if (!error.empty()) return ffi::Error::InvalidArgument("SparseArray: " + error);
  std::copy_n(bounds.typed_data(), 2, out->typed_data());
  return ffi::Error::Success();
}

// Offsets within 0 .. nnz that do not fall: each is the largest up to it, clamped.
ffi::Error ValidOffsetsHandler(ffi::Buffer<ffi::S32> offsets,
                               ffi::Result<ffi::Buffer<ffi::S32>> out, int64_t nnz) {
  const auto shape = offsets.dimensions();
  if (shape.size() < 1 || out->element_count() != offsets.element_count() || nnz < 0 ||
      nnz > INT32_MAX) {
    return ffi::Error::InvalidArgument("valid_offsets: expected offsets [..., n] and as many out");
  }
  const int64_t size = shape[shape.size() - 1];
  const int64_t count = size > 0 ? int64_t(offsets.element_count()) / size : 0;
  AfterXla(&finished_calls);
  for (int64_t i = 0; i < count; ++i) {
    MakeValid(offsets.typed_data() + i * size, size, nnz, out->typed_data() + i * size);
  }
  BeforeXla(&finished_calls);
  return ffi::Error::Success();
}

// Index values of a piece: a few microseconds of work.
constexpr int64_t kPiece = 1 << 15;

struct Level {
  const int32_t* offsets = nullptr;
  const int32_t* coordinates = nullptr;
  int64_t parents = 0, capacity = 0;
};

struct LevelsCall {
  std::vector<LevelPiece> pieces;
  std::vector<int64_t> found;
  std::vector<const int32_t*> tuples;
  CheckLevelsArgs args;
  int levels = 0;
  int64_t numbers = 0;

  void Add(LevelPiece piece) {
    for (int64_t begin = piece.begin; begin < piece.end; begin += kPiece) {
      LevelPiece part = piece;
      part.begin = begin;
      part.end = std::min(begin + kPiece, piece.end);
      numbers += part.end - part.begin;
      pieces.push_back(part);
    }
  }

  // Whether all pieces passed: no value out of range, and no falls but those allowed at the starts
  // of segments (counted negative), level by level.
  bool Holds() const {
    std::vector<int64_t> falls(levels);
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].level < 0 && found[i] != 0) return false;
      if (pieces[i].level >= 0) falls[pieces[i].level] += found[i];
    }
    return std::all_of(falls.begin(), falls.end(), [](int64_t count) { return count == 0; });
  }
};

ffi::Future CheckLevelsHandler(ffi::ThreadPool pool, ffi::RemainingArgs args,
                               ffi::Result<ffi::Buffer<ffi::PRED>> out, std::string_view kinds,
                               std::string_view orders, ffi::Span<const int64_t> sizes) {
  if (kinds.size() != orders.size() || kinds.size() != sizes.size() || kinds.empty()) {
    return Failed("check_levels: expected a kind, an order and a size of each level");
  }
  auto call = std::make_shared<LevelsCall>();
  call->levels = static_cast<int>(kinds.size());
  bool* const holds = out->typed_data();
  *holds = false;
  size_t next = 0;
  std::string error;
  const auto take = [&](Level* level, const int32_t** array) -> int64_t {
    auto buffer = args.get<ffi::AnyBuffer>(next);
    const std::string name = "check_levels: array " + std::to_string(next++);
    if (buffer.has_error()) {
      error = name + ": " + buffer.error().message();
    } else {
      error = Mismatch(name.c_str(), *buffer, ffi::S32, {kAnySize});
    }
    if (!error.empty()) return 0;
    *array = Ints(*buffer);
    const int64_t count = buffer->dimensions()[0];
    if (array == &level->offsets && count != level->parents + 1) {
      error = name + ": expected " + std::to_string(level->parents + 1) + " offsets, got " +
              std::to_string(count);
    }
    return count;
  };
  int64_t capacity = 1, used = 1;  // of the level above
  for (size_t l = 0; l < kinds.size(); ++l) {
    const char kind = kinds[l], order = orders[l];
    if (kind == 'd') {
      capacity = used = sizes[l];
      continue;
    }
    Level level;
    level.parents = capacity;
    if (kind == 'c') take(&level, &level.offsets);
    if (error.empty()) level.capacity = take(&level, &level.coordinates);
    if (!error.empty()) return Failed(error);
    if (kind == 's' && level.capacity < used) return Failed("check_levels: too few coordinates");
    if (kind == 'c') {
      const int64_t last = level.offsets[used];
      if (level.offsets[0] != 0 || last < 0 || last > level.capacity) return Finished();
      const bool stored = l > 0 && kinds[l - 1] == 'c';  // such a parent has a child
      const auto rise = stored ? LevelCheck::kRises : LevelCheck::kStays;
      call->Add({rise, false, -1, 1, used + 1, level.offsets, nullptr, -1});
      if (order == '<' || order == '=') {
        const auto check = order == '<' ? LevelCheck::kRises : LevelCheck::kStays;
        const int place = static_cast<int>(l);
        call->Add({check, false, place, 1, last, level.coordinates, nullptr, sizes[l]});
        call->Add({LevelCheck::kStarts, order == '<', place, 0, used, level.coordinates,
                   level.offsets, last});
      }
      used = last;
      capacity = level.capacity;
    }
    // Of one coordinate nothing is compared.
    if (order == '.' || order == 't' || used == 1) {
      call->Add({LevelCheck::kRange, false, -1, 0, used, level.coordinates, nullptr, sizes[l]});
    }
    call->tuples.push_back(level.coordinates);
  }
  if (orders.back() == 't') {
    call->Add({LevelCheck::kTuples, false, -1, 1, used, nullptr, nullptr, 0});
  }
  const auto count = static_cast<int64_t>(call->pieces.size());
  call->found.resize(count);
  call->args = {call->pieces.data(), call->found.data(), call->tuples.data(),
                static_cast<int>(call->tuples.size())};
  return ParallelPhases(pool, {count, 1}, call->numbers,
                        [call, holds, count, kernel = Kernels().CheckLevels](int64_t task) {
                          if (task < count) return kernel(call->args, task);
                          *holds = call->Holds();
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ValidOffsetsFfi, ValidOffsetsHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // offsets [..., n]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // valid ones
                                  .Attr<int64_t>("nnz"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckCsrFfi, CheckCsrHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // offsets [m + 1]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // indices [nnz]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // offsets again
                                  .Attr<int64_t>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckCooFfi, CheckCooHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // bounds [2]
                                  .RemainingArgs()               // coordinates [nnz], by level
                                  .Ret<ffi::Buffer<ffi::S32>>()  // bounds again
                                  .Attr<ffi::Span<const int64_t>>("sizes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckLevelsFfi, CheckLevelsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()                  // index arrays, level by level
                                  .Ret<ffi::Buffer<ffi::PRED>>()    // []
                                  .Attr<std::string_view>("kinds")  // d, c or s: as their levels
                                  .Attr<std::string_view>("orders")
                                  .Attr<ffi::Span<const int64_t>>("sizes"));

}  // namespace sgap

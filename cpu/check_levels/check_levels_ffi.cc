// FFI target sgap_check_levels_v1: whether loops that trust index arrays may run over these. A
// program asks at run time what nobody could check while it was traced.
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/check_levels/check_levels.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Numbers of a piece: few microseconds.
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

  // Of all pieces. Falls of a level and those that may be are as many.
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
                        [call, holds, count, kernel = Kernels().check_levels](int64_t task) {
                          if (task < count) return kernel(call->args, task);
                          *holds = call->Holds();
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckLevels, CheckLevelsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()                  // index arrays, level by level
                                  .Ret<ffi::Buffer<ffi::PRED>>()    // []
                                  .Attr<std::string_view>("kinds")  // d, c or s: as their levels
                                  .Attr<std::string_view>("orders")
                                  .Attr<ffi::Span<const int64_t>>("sizes"));

}  // namespace sgap

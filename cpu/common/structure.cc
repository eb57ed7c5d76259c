#include "cpu/common/structure.h"

#include <algorithm>
#include <cstring>

namespace sgap {

void MakeValid(const int32_t* offsets, int64_t count, int64_t nnz, int32_t* out) {
  int32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    greatest = std::max(greatest, int32_t(std::min<int64_t>(offsets[i], nnz)));
    out[i] = greatest;
  }
}

// A branch at each entry would be mispredicted where some are wrong here and there.
CompactStructure::CompactStructure(const Structure& given)
    : rows(given.rows),
      nnz(given.nnz),
      offsets(new int32_t[given.rows + 1]),
      indices(new int32_t[given.nnz]),
      entries(new int32_t[given.nnz]) {
  const std::unique_ptr<int32_t[]> valid(new int32_t[rows + 1]);
  MakeValid(given.offsets, rows + 1, nnz, valid.get());
  const auto size = static_cast<uint32_t>(given.size), places = static_cast<uint32_t>(nnz);
  int32_t kept = 0;
  offsets[0] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int32_t p = valid[r]; p < valid[r + 1]; ++p) {
      const int32_t entry = given.permutation ? given.permutation[p] : p;
      indices[kept] = given.indices[p];
      entries[kept] = entry;
      kept += uint32_t(given.indices[p]) < size && uint32_t(entry) < places;
    }
    offsets[r + 1] = kept;
  }
}

std::unique_ptr<char[]> TakeEntries(const void* operand, int64_t batch, size_t bytes,
                                    const CompactStructure& structure) {
  if (!operand) return nullptr;
  const int64_t count = structure.nnz, kept = structure.Count();
  std::unique_ptr<char[]> taken(new char[batch * count * bytes]);
  const char* from = static_cast<const char*>(operand);
  for (int64_t b = 0; b < batch; ++b, from += count * bytes) {
    for (int64_t p = 0; p < kept; ++p) {
      std::memcpy(&taken[(b * count + p) * bytes], from + structure.entries[p] * bytes, bytes);
    }
  }
  return taken;
}

void PutEntries(const char* compact, int64_t batch, size_t bytes, const CompactStructure& structure,
                void* result) {
  const int64_t count = structure.nnz, kept = structure.Count();
  char* to = static_cast<char*>(result);
  std::memset(to, 0, batch * count * bytes);
  for (int64_t b = 0; b < batch; ++b, to += count * bytes, compact += count * bytes) {
    for (int64_t p = 0; p < kept; ++p) {
      std::memcpy(to + structure.entries[p] * bytes, compact + p * bytes, bytes);
    }
  }
}

}  // namespace sgap

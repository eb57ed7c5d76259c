#include "structure.h"

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

CompactStructure::CompactStructure(const Structure& given)
    : offsets(given.rows + 1), indices(given.nnz), entries(given.nnz) {
  std::vector<int32_t> valid(given.rows + 1);
  MakeValid(given.offsets, given.rows + 1, given.nnz, valid.data());
  const auto within = [](int32_t index, int64_t size) { return index >= 0 && index < size; };
  int32_t kept = 0;
  for (int64_t r = 0; r < given.rows; ++r) {
    for (int32_t p = valid[r]; p < valid[r + 1]; ++p) {
      if (!within(given.indices[p], given.size)) continue;
      if (given.permutation && !within(given.permutation[p], given.nnz)) continue;
      indices[kept] = given.indices[p];
      entries[kept++] = given.permutation ? given.permutation[p] : p;
    }
    offsets[r + 1] = kept;
  }
}

std::unique_ptr<char[]> TakeEntries(const void* operand, int64_t batch, size_t bytes,
                                    const std::vector<int32_t>& entries) {
  if (!operand) return nullptr;
  const size_t count = entries.size();
  std::unique_ptr<char[]> taken(new char[batch * count * bytes]);
  const char* from = static_cast<const char*>(operand);
  for (int64_t b = 0; b < batch; ++b, from += count * bytes) {
    for (size_t p = 0; p < count; ++p) {
      std::memcpy(&taken[(b * count + p) * bytes], from + entries[p] * bytes, bytes);
    }
  }
  return taken;
}

void PutEntries(const char* compact, int64_t batch, size_t bytes, const CompactStructure& structure,
                void* result) {
  const size_t count = structure.entries.size(), kept = structure.offsets.back();
  char* to = static_cast<char*>(result);
  std::memset(to, 0, batch * count * bytes);
  for (int64_t b = 0; b < batch; ++b, to += count * bytes, compact += count * bytes) {
    for (size_t p = 0; p < kept; ++p) {
      std::memcpy(to + structure.entries[p] * bytes, compact + p * bytes, bytes);
    }
  }
}

}  // namespace sgap

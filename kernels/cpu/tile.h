// The inner product of the CPU backend: rows of A times one packed panel of B. GEMM and attention are built on it.
#pragma once

#include <cstdint>
#include <memory>

namespace qe::cpu {

// Columns of a packed panel: panel[p][j], p over the summed index, columns beyond the matrix zero.
inline constexpr int kPanel = 32;

// Element (i, p) of a matrix is data[i · row + p · depth].
struct Strided {
  const float* data;
  std::int64_t row;
  std::int64_t depth;
};

// sums[i · pitch + j] continues its sum by a(i, p) · panel[p][j] for p < depth, one std::fma after the other, p
// ascending; i < m, j < kPanel. The bits do not depend on how a sum is cut into calls.
void multiply_panel(const Strided& a, std::int64_t m, const float* panel, std::int64_t depth, float* sums,
                    std::int64_t pitch);

// Uninitialised working memory of one call.
using Scratch = std::unique_ptr<float[]>;
inline Scratch make_scratch(std::int64_t floats) {
  return std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(floats));
}

}  // namespace qe::cpu

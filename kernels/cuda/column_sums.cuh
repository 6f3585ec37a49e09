// Column sums of a matrix whose blocks of rows were summed apart: the partials are added in index order and reach the
// gradient in one addition. Owns the second of the two launches; a kernel that has the rows at hand makes the partials.
#pragma once

#include <iterator>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.cuh"

namespace qe::cuda {

inline constexpr int kSumColumns = 32;  // of a block
inline constexpr int kSumLanes = 8;     // threads that share a column: lane l adds partials l, l + 8, …

// partials [count, outputs, cols]; gradients[o][c] += Σ over count, o the grid's second index.
// Bytes: 4 read for each partial.
struct ColumnSums {
  const float* partials;
  int count;
  int cols;
  float* gradients[3];  // the first null one ends them
};
// A template, so that each file that launches it may have it.
template <int kLanes>
__global__ void __launch_bounds__(kSumColumns* kLanes) add_column_sums(const __grid_constant__ ColumnSums sums) {
  __shared__ float lanes[kLanes][kSumColumns];
  const int column = static_cast<int>(threadIdx.x) % kSumColumns, lane = static_cast<int>(threadIdx.x) / kSumColumns;
  const int c = static_cast<int>(blockIdx.x) * kSumColumns + column;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * sums.cols;
  float sum = 0.0f;
  if (c < sums.cols) {
    const float* from = sums.partials + blockIdx.y * static_cast<std::int64_t>(sums.cols) + c;
#pragma unroll 8
    for (int i = lane; i < sums.count; i += kLanes) sum += from[i * step];
  }
  lanes[lane][column] = sum;
  __syncthreads();
  if (lane != 0 || c >= sums.cols) return;
  for (int l = 1; l < kLanes; ++l) sum += lanes[l][column];
  sums.gradients[blockIdx.y][c] += sum;
}

inline bool partials_fit(const Launch& launch, std::int64_t count, std::int64_t outputs, std::int64_t cols) {
  return static_cast<std::size_t>(count * outputs * cols) * sizeof(float) <= launch.scratch.bytes;
}
// Scratch for count partials of `outputs` columns' sums; the launch that fills it comes before add_partials.
inline float* partials_in(const Launch& launch, std::int64_t count, std::int64_t outputs, std::int64_t cols) {
  QE_EXPECTS(partials_fit(launch, count, outputs, cols), "the partial column sums fit the scratch memory");
  return launch.scratch.as<float>();
}
inline void add_partials(const Launch& launch, const ColumnSums& sums) {
  unsigned outputs = 1;
  while (outputs < std::size(sums.gradients) && sums.gradients[outputs] != nullptr) ++outputs;
  launch_kernel(
      {dim3(static_cast<unsigned>(tiles(sums.cols, kSumColumns)), outputs), kSumColumns * kSumLanes, 1, launch.stream},
      &add_column_sums<kSumLanes>, sums);
}

}  // namespace qe::cuda

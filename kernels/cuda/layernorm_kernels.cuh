// Kernels of LayerNorm. Owns how rows are dealt to threads and how their sums meet; the FP8 tail is operand_tile.cuh's.
//
// A cluster of up to eight blocks shares 32 rows. A block has one warp for each four rows; a warp works through the
// block's segments of 256 columns, eight columns a lane. Sums of a row: a lane's own, the lanes by exchange, then the
// cluster's blocks in one order, each warp leaving its sums in every block's shared memory. A row is read once from
// memory and then again from the cache: in the forward for the mean, the variance and the result, in the backward for
// the sums and the result.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/operand_tile.cuh"

namespace qe::cuda {

inline constexpr int kRowsOfBlock = 32;
inline constexpr int kQuads = kRowsOfBlock / kPatchRows;
inline constexpr int kNormThreads = kQuads * kWarp;
inline constexpr int kSegment = kWarp * kLaneElements;  // columns
inline constexpr int kMaxCluster = 8;

using RowSums = float[kPatchRows];
// One sum of each row from each block of the cluster.
struct RowParts {
  float4 parts[kMaxCluster][kQuads];
};

// Where a thread stands. A block holds `segments` segments.
struct NormPlace {
  int lane, quad, first_row, row, first_col;
  __device__ explicit NormPlace(int segments)
      : lane(static_cast<int>(threadIdx.x) % kWarp),
        quad(static_cast<int>(threadIdx.x) / kWarp),
        first_row(static_cast<int>(blockIdx.y) * kRowsOfBlock),
        row(first_row + quad * kPatchRows),
        first_col(static_cast<int>(blockIdx.x) * segments * kSegment) {}
  __device__ int column(int segment) const { return first_col + segment * kSegment + lane * kLaneElements; }
};

// The warp's sum of row lane % 4. The first two exchanges halve what is left to add, so four sums cost six of them.
__device__ __forceinline__ float sum_lanes(const RowSums& sums, int lane) {
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
  float a = odd ? sums[1] : sums[0], b = odd ? sums[3] : sums[2];
  a += __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
  b += __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1);
  float sum = (high ? b : a) + __shfl_xor_sync(0xffffffffu, high ? a : b, 2);
#pragma unroll
  for (int lanes = kPatchRows; lanes < kWarp; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  return sum;
}
// Leaves the warp's sums of its four rows in all blocks of the cluster, four lanes a block; a barrier of the cluster
// makes them readable.
__device__ __forceinline__ void share_sums(const cooperative_groups::cluster_group& cluster, RowParts& to,
                                           const NormPlace& at, const RowSums& sums) {
  const float sum = sum_lanes(sums, at.lane);
  const int block = at.lane / kPatchRows;
  auto* mine = reinterpret_cast<float*>(&to.parts[cluster.block_rank()][at.quad]) + at.lane % kPatchRows;
  if (block < static_cast<int>(cluster.num_blocks())) *cluster.map_shared_rank(mine, block) = sum;
}
// The cluster's sums divided by count.
__device__ __forceinline__ void take_means(const RowParts& from, int blocks, int quad, float count, RowSums& means) {
  float4 total = from.parts[0][quad];
  for (int b = 1; b < blocks; ++b) {
    const float4 part = from.parts[b][quad];
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }
  means[0] = total.x / count, means[1] = total.y / count, means[2] = total.z / count, means[3] = total.w / count;
}

// Four rows of one segment of a matrix.
template <class T>
using RawPatch = Eight<T>[kPatchRows];
template <bool kVector, class T>
__device__ __forceinline__ void load_patch(const MatrixView<const T>& x, int row, int col, int rows, int cols,
                                           RawPatch<T>& raw) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) raw[i] = load_eight<kVector>(x.row(row + i), col, cols, row + i < rows);
}
template <bool kVector>
__device__ __forceinline__ void load_vector(const float* from, int col, int cols, float (&v)[kLaneElements]) {
  to_floats(load_eight<kVector>(from, col, cols, true), v);
}

template <class T>
struct NormForward {
  MatrixView<const T> x;
  const float *gamma, *beta;
  float epsilon;
  float *mean, *rstd;
  int segments;  // of a block
  OperandTarget out;
};

template <bool kVector, class T>
__device__ __forceinline__ void sum_rows(const NormForward<T>& a, const NormPlace& at, RowSums& sums) {
#pragma unroll 2
  for (int s = 0; s < a.segments; ++s) {
    RawPatch<T> raw;
    load_patch<kVector>(a.x, at.row, at.column(s), a.out.rows, a.out.cols, raw);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float v[kLaneElements];
      to_floats(raw[i], v);
      sums[i] += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
  }
}
template <bool kVector, class T>
__device__ __forceinline__ void sum_squares(const NormForward<T>& a, const NormPlace& at, const RowSums& mean,
                                            RowSums& sums) {
  for (int s = 0; s < a.segments; ++s) {
    const int col = at.column(s);
    RawPatch<T> raw;
    load_patch<kVector>(a.x, at.row, col, a.out.rows, a.out.cols, raw);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float v[kLaneElements];
      to_floats(raw[i], v);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float d = (kVector ? col : col + k) < a.out.cols ? v[k] - mean[i] : 0.0f;
        sums[i] = __fmaf_rn(d, d, sums[i]);
      }
    }
  }
}
// The patch's result; rows outside the matrix are zeros.
template <bool kVector, class T>
__device__ __forceinline__ void normalize_patch(const NormForward<T>& a, const NormPlace& at, int col,
                                                const RowSums& mean, const RowSums& rstd, Patch& v) {
  RawPatch<T> raw;
  float gamma[kLaneElements], beta[kLaneElements];
  load_patch<kVector>(a.x, at.row, col, a.out.rows, a.out.cols, raw);
  load_vector<kVector>(a.gamma, col, a.out.cols, gamma);
  load_vector<kVector>(a.beta, col, a.out.cols, beta);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    to_floats(raw[i], v[i]);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float y = __fmaf_rn((v[i][k] - mean[i]) * rstd[i], gamma[k], beta[k]);
      v[i][k] = at.row + i < a.out.rows ? y : 0.0f;
    }
  }
}

// Bytes an element, BF16 x and both FP8 layouts: 2 read, 2 written.
template <class T, bool kVector>
__global__ void __launch_bounds__(kNormThreads, sizeof(T) == 2 ? 3 : 2) normalize_rows(const NormForward<T> a) {
  __shared__ RowParts sums, squares;
  __shared__ TransposeTile<kSegment, kRowsOfBlock> transposed;
  __shared__ std::uint32_t warp_amaxes[kQuads];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // waited for where another block's shared memory is first written: it must run by then
  const int blocks = static_cast<int>(cluster.num_blocks());
  const NormPlace at(a.segments);
  const float count = static_cast<float>(a.out.cols);

  RowSums mean{}, rstd{};
  sum_rows<kVector>(a, at, mean);
  cluster.barrier_wait();
  share_sums(cluster, sums, at, mean);
  cluster.sync();
  take_means(sums, blocks, at.quad, count, mean);
  sum_squares<kVector>(a, at, mean, rstd);
  share_sums(cluster, squares, at, rstd);
  cluster.sync();
  take_means(squares, blocks, at.quad, count, rstd);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    rstd[i] = __frcp_rn(__fsqrt_rn(rstd[i] + a.epsilon));
    if (cluster.block_rank() != 0 || at.lane != 0 || at.row + i >= a.out.rows) continue;
    a.mean[at.row + i] = mean[i];
    a.rstd[at.row + i] = rstd[i];
  }

  const bool fp8 = a.out.type == DType::kE4M3 || a.out.type == DType::kE5M2;
  const float scale = fp8 ? *a.out.scale : 1.0f;
  float amax = 0.0f;
  for (int s = 0; s < a.segments; ++s) {
    const int col = at.column(s);
    Patch v;
    normalize_patch<kVector>(a, at, col, mean, rstd, v);
    if (!fp8) {
      write_wide<kVector>(a.out, at.row, col, v);
      continue;
    }
    amax = amax_of(v, amax);
    std::uint32_t words[kLaneElements];
    write_codes<kVector>(a.out, at.row, col, v, scale, words);
    if (a.out.columnwise == nullptr) continue;
    if (s > 0) __syncthreads();  // the previous segment has left
    transposed.put(at.lane * kLaneElements, at.quad, words);
    __syncthreads();
    transposed.template write<kVector>(a.out, at.first_row, at.first_col + s * kSegment, static_cast<int>(threadIdx.x),
                                       kNormThreads);
  }
  if (!fp8) return;
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) write_scale_inv(a.out, scale);
  if (a.out.amax == nullptr) return;
  const std::uint32_t m = warp_amax(amax);
  if (at.lane == 0) warp_amaxes[at.quad] = m;
  __syncthreads();
  if (threadIdx.x == 0) raise_amax(a.out.amax, warp_amaxes, kQuads);
}

template <class T>
struct NormBackward {
  MatrixView<const T> grad_out, x, residual;  // residual.data null: none
  MatrixView<T> grad_x;                       // may be the residual's memory
  const float *mean, *rstd, *gamma;
  float* partials;  // [blocks of rows, 2, cols]: gamma's, then beta's
  int rows, cols;
  int segments;  // of a block
};

// Column sums over a block's rows: every quad leaves its own, one thread a column adds them in order.
struct ColumnParts {
  float4 parts[kQuads][2][kSegment / 4];

  __device__ void put(int quad, int lane, const float (&gamma)[kLaneElements], const float (&beta)[kLaneElements]) {
    parts[quad][0][2 * lane] = {gamma[0], gamma[1], gamma[2], gamma[3]};
    parts[quad][0][2 * lane + 1] = {gamma[4], gamma[5], gamma[6], gamma[7]};
    parts[quad][1][2 * lane] = {beta[0], beta[1], beta[2], beta[3]};
    parts[quad][1][2 * lane + 1] = {beta[4], beta[5], beta[6], beta[7]};
  }
  __device__ float sum(int which, int column) const {
    float total = 0.0f;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) total += reinterpret_cast<const float*>(parts[q][which])[column];
    return total;
  }
};

// One segment: what it adds to the rows' sums of dy·gamma and dy·gamma·normalized, and its columns' sums over the rows
// of the warp of dy·normalized and dy.
template <bool kVector, class T>
__device__ __forceinline__ void sum_segment(const NormBackward<T>& a, const NormPlace& at, int col, const RowSums& mean,
                                            const RowSums& rstd, RowSums& sum_grad, RowSums& sum_product,
                                            float (&grad_gamma)[kLaneElements], float (&grad_beta)[kLaneElements]) {
  RawPatch<T> raw_x, raw_dy;
  float gamma[kLaneElements];
  load_patch<kVector>(a.x, at.row, col, a.rows, a.cols, raw_x);
  load_patch<kVector>(a.grad_out, at.row, col, a.rows, a.cols, raw_dy);
  load_vector<kVector>(a.gamma, col, a.cols, gamma);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float v[kLaneElements], g[kLaneElements];
    to_floats(raw_x[i], v);
    to_floats(raw_dy[i], g);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float normalized = (v[k] - mean[i]) * rstd[i];
      grad_gamma[k] = __fmaf_rn(g[k], normalized, grad_gamma[k]);
      grad_beta[k] += g[k];
      const float scaled = g[k] * gamma[k];
      sum_grad[i] += scaled;
      sum_product[i] = __fmaf_rn(scaled, normalized, sum_product[i]);
    }
  }
}

// One segment of dx = rstd · (dy·gamma − mean_grad − normalized · mean_product) + residual.
template <bool kVector, class T>
__device__ __forceinline__ void write_segment(const NormBackward<T>& a, const NormPlace& at, int col,
                                              const RowSums& mean, const RowSums& rstd, const RowSums& mean_grad,
                                              const RowSums& mean_product) {
  RawPatch<T> raw_x, raw_dy, raw_residual{};
  float gamma[kLaneElements];
  load_patch<kVector>(a.x, at.row, col, a.rows, a.cols, raw_x);
  load_patch<kVector>(a.grad_out, at.row, col, a.rows, a.cols, raw_dy);
  if (a.residual.data != nullptr) load_patch<kVector>(a.residual, at.row, col, a.rows, a.cols, raw_residual);
  load_vector<kVector>(a.gamma, col, a.cols, gamma);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float v[kLaneElements], g[kLaneElements], r[kLaneElements];
    to_floats(raw_x[i], v);
    to_floats(raw_dy[i], g);
    to_floats(raw_residual[i], r);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float normalized = (v[k] - mean[i]) * rstd[i];
      v[k] = rstd[i] * __fmaf_rn(-mean_product[i], normalized, g[k] * gamma[k] - mean_grad[i]) + r[k];
    }
    if (at.row + i < a.rows) store_eight<kVector>(a.grad_x.row(at.row + i), col, a.cols, v);
  }
}

// Bytes an element, BF16: 6 read (4 without residual), 2 written; the partials 1/4 written and read.
template <class T, bool kVector>
__global__ void __launch_bounds__(kNormThreads, sizeof(T) == 2 ? 2 : 1) differentiate_rows(const NormBackward<T> a) {
  __shared__ RowParts grads, products;
  __shared__ ColumnParts column_parts;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // waited for where another block's shared memory is first written: it must run by then
  const int blocks = static_cast<int>(cluster.num_blocks());
  const NormPlace at(a.segments);
  RowSums mean, rstd, mean_grad{}, mean_product{};
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    const bool inside = at.row + i < a.rows;
    mean[i] = inside ? a.mean[at.row + i] : 0.0f;
    rstd[i] = inside ? a.rstd[at.row + i] : 0.0f;
  }

  const int thread = static_cast<int>(threadIdx.x);  // also a column of a segment
  for (int s = 0; s < a.segments; ++s) {
    float grad_gamma[kLaneElements]{}, grad_beta[kLaneElements]{};
    sum_segment<kVector>(a, at, at.column(s), mean, rstd, mean_grad, mean_product, grad_gamma, grad_beta);
    if (s > 0) __syncthreads();  // the previous segment's sums are taken
    column_parts.put(at.quad, at.lane, grad_gamma, grad_beta);
    __syncthreads();
    const int c = at.first_col + s * kSegment + thread;
    if (c >= a.cols) continue;
    float* to = a.partials + blockIdx.y * 2 * static_cast<std::int64_t>(a.cols) + c;
    to[0] = column_parts.sum(0, thread);
    to[a.cols] = column_parts.sum(1, thread);
  }

  cluster.barrier_wait();
  share_sums(cluster, grads, at, mean_grad);
  share_sums(cluster, products, at, mean_product);
  cluster.sync();
  const float count = static_cast<float>(a.cols);
  take_means(grads, blocks, at.quad, count, mean_grad);
  take_means(products, blocks, at.quad, count, mean_product);
  for (int s = 0; s < a.segments; ++s) {
    write_segment<kVector>(a, at, at.column(s), mean, rstd, mean_grad, mean_product);
  }
}

}  // namespace qe::cuda

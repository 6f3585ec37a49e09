// Kernels of LayerNorm. Owns how rows are dealt to threads and how their sums meet; the FP8 tail is operand_tile.cuh's.
//
// A cluster of up to eight blocks shares 32 rows. A block has 8 warps a group, one for each four rows; a warp holds
// kSegments segments of 256 columns, eight columns a lane. Sums of a row: a lane's own, the lanes by exchange, then the
// cluster's warps in one order, each warp leaving its sums in every block's shared memory. Mean and variance are two
// passes over values that stay in registers where they fit, else over the cache.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/operand_tile.cuh"

namespace qe::cuda {

inline constexpr int kRowsOfBlock = 32;
inline constexpr int kQuads = kRowsOfBlock / kPatchRows;
inline constexpr int kGroupThreads = kQuads * kWarp;
inline constexpr int kSegment = kWarp * kLaneElements;  // columns
inline constexpr int kMaxCluster = 8;

using RowSums = float[kPatchRows];
// One sum of each row from each group of warps in the cluster.
template <int kGroups>
struct RowParts {
  float4 parts[kMaxCluster * kGroups][kQuads];
};

__device__ __forceinline__ void sum_lanes(RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lanes);
  }
}

// Where a thread stands.
template <int kSegments, int kGroups>
struct Place {
  int lane = static_cast<int>(threadIdx.x) % kWarp;
  int quad = static_cast<int>(threadIdx.x) / kWarp % kQuads;
  int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  int first_row = static_cast<int>(blockIdx.y) * kRowsOfBlock;
  int row = first_row + quad * kPatchRows;
  int first_col = (static_cast<int>(blockIdx.x) * kGroups + group) * kSegments * kSegment;  // of the warp
  __device__ int column(int segment) const { return first_col + segment * kSegment + lane * kLaneElements; }
};

// Leaves the warp's sums of its rows in all blocks of the cluster; cluster.sync() makes them readable.
template <int kGroups>
__device__ __forceinline__ void share_sums(const cooperative_groups::cluster_group& cluster, RowParts<kGroups>& to,
                                           int group, int quad, int lane, const RowSums& sums) {
  if (lane >= static_cast<int>(cluster.num_blocks())) return;
  float4* mine = &to.parts[static_cast<int>(cluster.block_rank()) * kGroups + group][quad];
  *cluster.map_shared_rank(mine, static_cast<unsigned>(lane)) = {sums[0], sums[1], sums[2], sums[3]};
}
template <int kGroups>
__device__ __forceinline__ void add_parts(const RowParts<kGroups>& from, int blocks, int quad, RowSums& sums) {
  float4 total = from.parts[0][quad];
  for (int p = 1; p < blocks * kGroups; ++p) {
    const float4 part = from.parts[p][quad];
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }
  sums[0] = total.x, sums[1] = total.y, sums[2] = total.z, sums[3] = total.w;
}

// The rows of one matrix that a warp works on: in registers, or read again each time.
template <class T, int kSegments, bool kHeld, bool kVector>
struct WarpRows {
  MatrixView<const T> x;
  int row, rows, cols;
  Eight<T> held[kHeld ? kPatchRows : 1][kHeld ? kSegments : 1];

  __device__ __forceinline__ Eight<T> read(int i, int col) const {
    return load_eight<kVector>(x.row(row + i), col, cols, row + i < rows);
  }
  template <class Place>
  __device__ __forceinline__ void fill(const Place& at) {
    if constexpr (kHeld) {
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
#pragma unroll
        for (int i = 0; i < kPatchRows; ++i) held[i][s] = read(i, at.column(s));
      }
    }
  }
  __device__ __forceinline__ void get(int i, int s, int col, float (&v)[kLaneElements]) const {
    if constexpr (kHeld) {
      to_floats(held[i][s], v);
    } else {
      to_floats(read(i, col), v);
    }
  }
};

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
  OperandTarget out;
};

// Are the parts of kMatrices matrices' rows held in registers? Longer ones would leave too few for the work.
template <class T, int kSegments, int kMatrices>
inline constexpr bool kHold = kMatrices* kSegments* static_cast<int>(sizeof(T)) <= 4;
// Segments are unrolled where their values are held: a register has no address.
template <class T, int kSegments, int kMatrices>
inline constexpr int kUnroll = kHold<T, kSegments, kMatrices> ? kSegments : 1;

// Bytes an element, BF16 x and both FP8 layouts: 2 read, 2 written.
template <class T, int kSegments, int kGroups, bool kVector>
__global__ void __launch_bounds__(kGroups* kGroupThreads) normalize_rows(const NormForward<T> a) {
  __shared__ RowParts<kGroups> sums_of_x, sums_of_squares;
  __shared__ TransposeTile<kSegment, kRowsOfBlock> transposed[kGroups];
  __shared__ std::uint32_t warp_amaxes[kGroups * kQuads];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // waited for where another block's shared memory is first written: it must run by then
  const int blocks = static_cast<int>(cluster.num_blocks());
  const Place<kSegments, kGroups> at;
  const int rows = a.out.rows, cols = a.out.cols;
  WarpRows<T, kSegments, kHold<T, kSegments, 1>, kVector> x{a.x, at.row, rows, cols, {}};
  x.fill(at);

  RowSums mean{};
#pragma unroll kUnroll < T, kSegments, 1>
  for (int s = 0; s < kSegments; ++s) {
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float v[kLaneElements];
      x.get(i, s, at.column(s), v);
      mean[i] += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
  }
  sum_lanes(mean);
  cluster.barrier_wait();
  share_sums(cluster, sums_of_x, at.group, at.quad, at.lane, mean);
  cluster.sync();
  add_parts(sums_of_x, blocks, at.quad, mean);
  const float count = static_cast<float>(cols);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) mean[i] /= count;

  RowSums rstd{};
#pragma unroll kUnroll < T, kSegments, 1>
  for (int s = 0; s < kSegments; ++s) {
    const int col = at.column(s);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float v[kLaneElements];
      x.get(i, s, col, v);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float d = (kVector ? col : col + k) < cols ? v[k] - mean[i] : 0.0f;
        rstd[i] = __fmaf_rn(d, d, rstd[i]);
      }
    }
  }
  sum_lanes(rstd);
  share_sums(cluster, sums_of_squares, at.group, at.quad, at.lane, rstd);
  cluster.sync();
  add_parts(sums_of_squares, blocks, at.quad, rstd);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    rstd[i] = __frcp_rn(__fsqrt_rn(rstd[i] / count + a.epsilon));
    if (cluster.block_rank() != 0 || at.group != 0 || at.lane != 0 || at.row + i >= rows) continue;
    a.mean[at.row + i] = mean[i];
    a.rstd[at.row + i] = rstd[i];
  }

  const bool fp8 = a.out.type == DType::kE4M3 || a.out.type == DType::kE5M2;
  const float scale = fp8 ? *a.out.scale : 1.0f;
  float amax = 0.0f;
#pragma unroll kUnroll < T, kSegments, 1>
  for (int s = 0; s < kSegments; ++s) {
    const int col = at.column(s);
    float gamma[kLaneElements], beta[kLaneElements];
    load_vector<kVector>(a.gamma, col, cols, gamma);
    load_vector<kVector>(a.beta, col, cols, beta);
    Patch v;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      x.get(i, s, col, v[i]);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float y = __fmaf_rn((v[i][k] - mean[i]) * rstd[i], gamma[k], beta[k]);
        v[i][k] = at.row + i < rows ? y : 0.0f;
      }
    }
    if (!fp8) {
      write_wide<kVector>(a.out, at.row, col, v);
      continue;
    }
    amax = amax_of(v, amax);
    std::uint32_t columns[kLaneElements];
    write_codes<kVector>(a.out, at.row, col, v, scale, columns);
    if (a.out.columnwise == nullptr) continue;
    if (s > 0) __syncthreads();  // the previous segment has left
    transposed[at.group].put(at.lane * kLaneElements, at.quad, columns);
    __syncthreads();
    transposed[at.group].template write<kVector>(a.out, at.first_row, at.first_col + s * kSegment,
                                                 static_cast<int>(threadIdx.x) % kGroupThreads, kGroupThreads);
  }
  if (!fp8) return;
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) write_scale_inv(a.out, scale);
  if (a.out.amax == nullptr) return;
  const std::uint32_t m = warp_amax(amax);
  if (at.lane == 0) warp_amaxes[threadIdx.x / kWarp] = m;
  __syncthreads();
  if (threadIdx.x == 0) raise_amax(a.out.amax, warp_amaxes, kGroups * kQuads);
}

template <class T>
struct NormBackward {
  MatrixView<const T> grad_out, x, residual;  // residual.data null: none
  MatrixView<T> grad_x;                       // may be the residual's memory
  const float *mean, *rstd, *gamma;
  float* partials;  // [blocks of rows, 2, cols]: gamma's, then beta's
  int rows, cols;
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

// Bytes an element, BF16: 6 read (4 without residual), 2 written; the partials 1/2 written and read.
template <class T, int kSegments, int kGroups, bool kVector>
__global__ void __launch_bounds__(kGroups* kGroupThreads, kGroups == 1 ? 2 : 1)
    differentiate_rows(const NormBackward<T> a) {
  __shared__ RowParts<kGroups> sums_of_grad, sums_of_product;
  __shared__ ColumnParts column_parts[kGroups];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // waited for where another block's shared memory is first written: it must run by then
  const int blocks = static_cast<int>(cluster.num_blocks());
  const Place<kSegments, kGroups> at;
  WarpRows<T, kSegments, kHold<T, kSegments, 2>, kVector> x{a.x, at.row, a.rows, a.cols, {}};
  WarpRows<T, kSegments, kHold<T, kSegments, 2>, kVector> dy{a.grad_out, at.row, a.rows, a.cols, {}};
  x.fill(at);
  dy.fill(at);
  RowSums mean, rstd, sum_grad{}, sum_product{};
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    const bool inside = at.row + i < a.rows;
    mean[i] = inside ? a.mean[at.row + i] : 0.0f;
    rstd[i] = inside ? a.rstd[at.row + i] : 0.0f;
  }

  const int group_thread = static_cast<int>(threadIdx.x) % kGroupThreads;  // also a column of the segment
#pragma unroll kUnroll < T, kSegments, 2>
  for (int s = 0; s < kSegments; ++s) {
    const int col = at.column(s);
    float gamma[kLaneElements], grad_gamma[kLaneElements]{}, grad_beta[kLaneElements]{};
    load_vector<kVector>(a.gamma, col, a.cols, gamma);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float v[kLaneElements], g[kLaneElements];
      x.get(i, s, col, v);
      dy.get(i, s, col, g);
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
    if (s > 0) __syncthreads();  // the previous segment's sums are taken
    column_parts[at.group].put(at.quad, at.lane, grad_gamma, grad_beta);
    __syncthreads();
    const int c = at.first_col + s * kSegment + group_thread;
    if (c < a.cols) {
      float* to = a.partials + blockIdx.y * 2 * static_cast<std::int64_t>(a.cols) + c;
      to[0] = column_parts[at.group].sum(0, group_thread);
      to[a.cols] = column_parts[at.group].sum(1, group_thread);
    }
  }

  sum_lanes(sum_grad);
  sum_lanes(sum_product);
  cluster.barrier_wait();
  share_sums(cluster, sums_of_grad, at.group, at.quad, at.lane, sum_grad);
  share_sums(cluster, sums_of_product, at.group, at.quad, at.lane, sum_product);
  cluster.sync();
  add_parts(sums_of_grad, blocks, at.quad, sum_grad);
  add_parts(sums_of_product, blocks, at.quad, sum_product);
  const float count = static_cast<float>(a.cols);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    sum_grad[i] /= count;
    sum_product[i] /= count;
  }

#pragma unroll kUnroll < T, kSegments, 2>
  for (int s = 0; s < kSegments; ++s) {
    const int col = at.column(s);
    float gamma[kLaneElements];
    load_vector<kVector>(a.gamma, col, a.cols, gamma);
    Eight<T> residual[kPatchRows]{};
    if (a.residual.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) {
        residual[i] = load_eight<kVector>(a.residual.row(at.row + i), col, a.cols, at.row + i < a.rows);
      }
    }
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float v[kLaneElements], g[kLaneElements], r[kLaneElements];
      x.get(i, s, col, v);
      dy.get(i, s, col, g);
      to_floats(residual[i], r);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float normalized = (v[k] - mean[i]) * rstd[i];
        v[k] = rstd[i] * __fmaf_rn(-sum_product[i], normalized, g[k] * gamma[k] - sum_grad[i]) + r[k];
      }
      if (at.row + i < a.rows) store_eight<kVector>(a.grad_x.row(at.row + i), col, a.cols, v);
    }
  }
}

}  // namespace qe::cuda

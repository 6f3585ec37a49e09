// Kernels of LayerNorm. Owns how rows are dealt to threads and how their sums meet; the FP8 tail is operand_tile.cuh's.
//
// A cluster of up to eight blocks shares some rows; each block has the same number of segments, 256 columns each, and a
// warp takes four rows of one at a time, eight columns a lane. Sums of a row: a lane's own in a segment, the lanes by
// exchange, a block's segments in order, then the cluster's blocks pairwise, each warp leaving its sums in every
// block's shared memory. That order depends on the columns alone, however the segments are dealt (NormDeal), so a row
// has the same bits beside any other rows.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/cluster_mail.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/operand_tile.cuh"

namespace qe::cuda {

inline constexpr int kSegment = kWarp * kLaneElements;  // columns
inline constexpr int kMaxCluster = 8;
static_assert(kMaxCluster * kPatchRows == kWarp, "a lane for each row of each block");

// How a block's rows and segments are dealt to its warps.
// Held: a warp for each four rows of each segment, so a thread has one patch, reads it once and keeps it in registers;
//   16 rows, so that few rows still occupy the card.
// Otherwise: a warp for each four rows, which works through the block's segments and reads them again for each sum and
//   the result, from the cache by then; 32 rows, which fill a sector of the transpose and need half the partials.
template <class T, bool kHeld>
struct NormDeal {
  static constexpr int kRows = kHeld ? 16 : 32;
  static constexpr int kQuads = kRows / kPatchRows;
  static constexpr int kGroup = kQuads * kWarp;                                   // threads that share a segment
  static constexpr int kMaxGroups = kHeld ? 8 / static_cast<int>(sizeof(T)) : 1;  // as registers allow
  static constexpr int kMaxThreads = kMaxGroups * kGroup;
};

using RowSums = float[kPatchRows];

// Where a thread stands.
template <class Deal>
struct NormPlace {
  int lane, quad, group, first_row, row, first_col;
  __device__ explicit NormPlace(int segments)  // of a block
      : lane(static_cast<int>(threadIdx.x % kWarp)),
        quad(static_cast<int>(threadIdx.x / kWarp % Deal::kQuads)),
        group(static_cast<int>(threadIdx.x / Deal::kGroup)),
        first_row(static_cast<int>(blockIdx.y) * Deal::kRows),
        row(first_row + quad * kPatchRows),
        first_col((static_cast<int>(blockIdx.x) * segments + group) * kSegment) {}
  __device__ int of_group() const { return quad * kWarp + lane; }
  // The thread's segments count from its group's first.
  __device__ int segment_column(int segment) const { return first_col + segment * kSegment; }
  __device__ int column(int segment) const { return segment_column(segment) + lane * kLaneElements; }
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
// Row lane % 4's value to all lanes.
__device__ __forceinline__ void spread_rows(float of_lane, RowSums& of_rows) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) of_rows[i] = __shfl_sync(0xffffffffu, of_lane, i);
}

// Where the warps of a cluster leave kSums sums of each of their rows in every block, once.
template <class Deal, int kSums>
struct RowMeeting {
  float4 parts[kSums][kMaxCluster][Deal::kMaxGroups][Deal::kQuads];
  Mailbox mailbox;

  __device__ void expect(int blocks, int groups) {
    mailbox.expect(kSums * blocks * groups * Deal::kQuads * static_cast<int>(sizeof(float4)));
  }
  // The warp's n-th sum of row lane % 4 into all blocks of the cluster, a lane a block. After await_blocks.
  __device__ void leave(int n, int rank, int blocks, const NormPlace<Deal>& at, float sum) {
    RowSums rows;
    spread_rows(sum, rows);
    if (at.lane < blocks) send(at.lane, &parts[n][rank][at.group][at.quad], mailbox, rows);
  }
  // Until every warp of the cluster has left its sums here.
  __device__ void wait() const { mailbox.wait(); }
  // The cluster's n-th sum of row lane % 4: each lane adds the groups of one block, then the lanes meet.
  __device__ float sum(int n, int blocks, int groups, const NormPlace<Deal>& at) const {
    const int block = at.lane / kPatchRows;
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < Deal::kMaxGroups; ++g) {
      if (block < blocks && g < groups) {
        sum += reinterpret_cast<const float*>(&parts[n][block][g][at.quad])[at.lane % kPatchRows];
      }
    }
#pragma unroll
    for (int lanes = kPatchRows; lanes < kWarp; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    return sum;
  }
};

// A thread's patches of a matrix: its only one, held from the start, or each read where it is used.
template <class T>
struct RawPatch {
  Eight<T> rows[kPatchRows];
};
template <class T, bool kVector, bool kHeld>
struct Patches {
  MatrixView<const T> matrix;
  int row, rows, cols;
  RawPatch<T> held;

  template <class Place>
  __device__ Patches(const MatrixView<const T>& of, const Place& at, int of_rows, int of_cols)
      : matrix(of), row(at.row), rows(of_rows), cols(of_cols) {
    if constexpr (kHeld) held = load(at.column(0));
  }
  __device__ RawPatch<T> at(int col) const {
    if constexpr (kHeld) return held;
    return load(col);
  }
  __device__ RawPatch<T> load(int col) const {
    RawPatch<T> raw;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      raw.rows[i] = load_eight<kVector>(matrix.row(row + i), col, cols, row + i < rows);
    }
    return raw;
  }
};
// The same of a vector with one value a column.
template <bool kVector, bool kHeld>
struct Columns {
  const float* data;
  int cols;
  Eight<float> held;

  template <class Place>
  __device__ Columns(const float* of, const Place& at, int of_cols) : data(of), cols(of_cols) {
    if constexpr (kHeld) held = load(at.column(0));
  }
  __device__ void at(int col, float (&v)[kLaneElements]) const {
    if constexpr (kHeld) {
      to_floats(held, v);
    } else {
      to_floats(load(col), v);
    }
  }
  __device__ Eight<float> load(int col) const { return load_eight<kVector>(data, col, cols, true); }
};

template <class T>
struct NormForward {
  MatrixView<const T> x;
  const float *gamma, *beta;
  float epsilon;
  float *mean, *rstd;
  int segments;  // of a block
  OperandTarget out;
};

template <class T>
__device__ __forceinline__ void sum_rows(const RawPatch<T>& raw, RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float v[kLaneElements];
    to_floats(raw.rows[i], v);
    sums[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
}
template <bool kVector, class T>
__device__ __forceinline__ void sum_squares(const RawPatch<T>& raw, int col, int cols, const RowSums& mean,
                                            RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float v[kLaneElements];
    to_floats(raw.rows[i], v);
    sums[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float d = (kVector ? col : col + k) < cols ? v[k] - mean[i] : 0.0f;
      sums[i] = __fmaf_rn(d, d, sums[i]);
    }
  }
}
// The patch's result; rows outside the matrix are zeros.
template <class T>
__device__ __forceinline__ void normalize_patch(const RawPatch<T>& raw, int rows_inside, const RowSums& mean,
                                                const RowSums& rstd, const float (&gamma)[kLaneElements],
                                                const float (&beta)[kLaneElements], Patch& v) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    to_floats(raw.rows[i], v[i]);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float y = __fmaf_rn((v[i][k] - mean[i]) * rstd[i], gamma[k], beta[k]);
      v[i][k] = i < rows_inside ? y : 0.0f;
    }
  }
}

// Bytes an element, BF16 x and both FP8 layouts: 2 read, 2 written.
template <class T, bool kVector, bool kHeld>
__global__ void __launch_bounds__(NormDeal<T, kHeld>::kMaxThreads, kHeld ? 1 : (sizeof(T) == 2 ? 3 : 2))
    normalize_rows(const NormForward<T> a) {
  using Deal = NormDeal<T, kHeld>;
  __shared__ RowMeeting<Deal, 1> sums, squares;
  __shared__ TransposeTile<kSegment, Deal::kRows> transposed[Deal::kMaxGroups];
  __shared__ std::uint32_t warp_amaxes[Deal::kMaxThreads / kWarp];
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
  const int groups = kHeld ? a.segments : 1, segments = kHeld ? 1 : a.segments;  // of a block, of a thread
  const NormPlace<Deal> at(a.segments);
  const Patches<T, kVector, kHeld> x(a.x, at, a.out.rows, a.out.cols);
  const Columns<kVector, kHeld> gammas(a.gamma, at, a.out.cols), betas(a.beta, at, a.out.cols);
  const bool fp8 = a.out.type == DType::kE4M3 || a.out.type == DType::kE5M2;
  const float scale = fp8 ? *a.out.scale : 1.0f;
  const float count = static_cast<float>(a.out.cols);
  if (threadIdx.x == 0) {
    sums.mailbox.open();
    squares.mailbox.open();
  }
  announce_block();
  await_blocks();
  if (threadIdx.x == 0) {
    sums.expect(blocks, groups);
    squares.expect(blocks, groups);
  }

  float sum = 0.0f;  // of row lane % 4, as all of the warp's sums
#pragma unroll 2
  for (int s = 0; s < segments; ++s) {
    RowSums of_lane;
    sum_rows(x.at(at.column(s)), of_lane);
    sum += sum_lanes(of_lane, at.lane);
  }
  sums.leave(0, rank, blocks, at, sum);
  sums.wait();
  const float row_mean = sums.sum(0, blocks, groups, at) / count;
  RowSums mean, rstd;
  spread_rows(row_mean, mean);

  sum = 0.0f;
  for (int s = 0; s < segments; ++s) {
    const int col = at.column(s);
    RowSums of_lane;
    sum_squares<kVector>(x.at(col), col, a.out.cols, mean, of_lane);
    sum += sum_lanes(of_lane, at.lane);
  }
  squares.leave(0, rank, blocks, at, sum);
  squares.wait();
  const float row_rstd = __frcp_rn(__fsqrt_rn(squares.sum(0, blocks, groups, at) / count + a.epsilon));
  spread_rows(row_rstd, rstd);
  if (rank == 0 && at.group == 0 && at.lane < kPatchRows && at.row + at.lane < a.out.rows) {
    a.mean[at.row + at.lane] = row_mean;
    a.rstd[at.row + at.lane] = row_rstd;
  }

  float amax = 0.0f;
  for (int s = 0; s < segments; ++s) {
    const int col = at.column(s);
    float gamma[kLaneElements], beta[kLaneElements];
    gammas.at(col, gamma);
    betas.at(col, beta);
    Patch v;
    normalize_patch(x.at(col), a.out.rows - at.row, mean, rstd, gamma, beta, v);
    if (!fp8) {
      write_wide<kVector>(a.out, at.row, col, v);
      continue;
    }
    amax = amax_of(v, amax);
    std::uint32_t words[kLaneElements];
    write_codes<kVector>(a.out, at.row, col, v, scale, words);
    if (s > 0) __syncthreads();  // the previous segment has left
    if (a.out.columnwise != nullptr) transposed[at.group].put(at.lane * kLaneElements, at.quad, words);
    if (a.out.amax != nullptr) {
      const std::uint32_t m = warp_amax(amax);
      if (at.lane == 0) warp_amaxes[at.group * Deal::kQuads + at.quad] = m;
    }
    __syncthreads();
    if (a.out.columnwise == nullptr) continue;
    transposed[at.group].template write<kVector>(a.out, at.first_row, at.segment_column(s), at.of_group(),
                                                 Deal::kGroup);
  }
  if (!fp8 || threadIdx.x != 0) return;
  if (blockIdx.x == 0 && blockIdx.y == 0) write_scale_inv(a.out, scale);
  if (a.out.amax != nullptr) raise_amax(a.out.amax, warp_amaxes, groups * Deal::kQuads);
}

template <class T>
struct NormBackward {
  MatrixView<const T> grad_out, x, residual;  // residual.data null: none
  MatrixView<T> grad_x;                       // may be the residual's memory
  const float *mean, *rstd, *gamma;
  float* partials;  // [blocks of rows, outputs, cols]: gamma's, then beta's, then those of dx
  int outputs;      // 2, or 3 with the sums of dx
  int rows, cols;
  int segments;             // of a block
  OperandTarget quantized;  // FP8, of dx; read by the kernels with kQuantize alone
};

// A segment's column sums over a block's rows: every quad puts its own, then a thread adds those of four columns.
template <class Deal, int kSums>
struct ColumnParts {
  static constexpr int kPieces = kSegment / 4;
  float4 parts[Deal::kQuads][kSums][kPieces];

  __device__ void put(int n, int quad, int lane, const float (&sums)[kLaneElements]) {
    parts[quad][n][2 * lane] = {sums[0], sums[1], sums[2], sums[3]};
    parts[quad][n][2 * lane + 1] = {sums[4], sums[5], sums[6], sums[7]};
  }
  // Into [kSums, cols], by the group's threads after all have put.
  template <bool kVector>
  __device__ void write(float* to, int first_col, int cols, int thread) const {
    for (int p = thread; p < kSums * kPieces; p += Deal::kGroup) {
      const int which = p / kPieces, col = first_col + p % kPieces * 4;
      float4 total{};
#pragma unroll
      for (int q = 0; q < Deal::kQuads; ++q) {
        const float4 part = parts[q][which][p % kPieces];
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      float* out = to + which * static_cast<std::int64_t>(cols) + col;
      if constexpr (kVector) {
        if (col < cols) *reinterpret_cast<float4*>(out) = total;
      } else {
        const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (col + k < cols) out[k] = values[k];
        }
      }
    }
  }
};

// What the threads of a segment share: first the sums of the parameters' gradients, then what becomes of dx.
template <class Deal>
union SegmentMemory {
  ColumnParts<Deal, 2> parameters;
  struct {
    ColumnParts<Deal, 1> sums;
    TransposeTile<kSegment, Deal::kRows> transposed;
  } dx;
};

// One patch: the rows' sums of dy·gamma and dy·gamma·normalized, and the columns' sums of dy·normalized and dy.
template <class T>
__device__ __forceinline__ void sum_patch(const RawPatch<T>& x, const RawPatch<T>& dy, const RowSums& mean,
                                          const RowSums& rstd, const float (&gamma)[kLaneElements], RowSums& sum_grad,
                                          RowSums& sum_product, float (&grad_gamma)[kLaneElements],
                                          float (&grad_beta)[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float v[kLaneElements], g[kLaneElements];
    to_floats(x.rows[i], v);
    to_floats(dy.rows[i], g);
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

// One row of a patch of dx = rstd · (dy·gamma − mean_grad − normalized · mean_product) + residual.
template <class T>
__device__ __forceinline__ void differentiate_eight(const Eight<T>& x, const Eight<T>& dy, const Eight<T>& residual,
                                                    float mean, float rstd, const float (&gamma)[kLaneElements],
                                                    float mean_grad, float mean_product, float (&dx)[kLaneElements]) {
  float v[kLaneElements], g[kLaneElements], r[kLaneElements];
  to_floats(x, v);
  to_floats(dy, g);
  to_floats(residual, r);
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) {
    const float normalized = (v[k] - mean) * rstd;
    dx[k] = rstd * __fmaf_rn(-mean_product, normalized, g[k] * gamma[k] - mean_grad) + r[k];
  }
}

// Bytes an element, BF16: 6 read (4 without residual), 2 written; the partials 1/4 (held 1/2) written and read.
// kQuantize: dx leaves as an FP8 operand too, 2 more written, with its column sums, half as many partials again.
template <class T, bool kVector, bool kHeld, bool kQuantize>
__global__ void __launch_bounds__(NormDeal<T, kHeld>::kMaxThreads, !kHeld && sizeof(T) == 2 ? 2 : 1)
    differentiate_rows(const NormBackward<T> a) {
  using Deal = NormDeal<T, kHeld>;
  __shared__ RowMeeting<Deal, 2> sums;  // of dy·gamma and of dy·gamma·normalized
  __shared__ SegmentMemory<Deal> memory[Deal::kMaxGroups];
  __shared__ std::uint32_t warp_amaxes[kQuantize ? Deal::kMaxThreads / kWarp : 1];
  static_assert(sizeof(memory[0].dx) <= sizeof(memory[0].parameters), "the operand costs no shared memory");
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
  const int groups = kHeld ? a.segments : 1, segments = kHeld ? 1 : a.segments;  // of a block, of a thread
  const NormPlace<Deal> at(a.segments);
  const Patches<T, kVector, kHeld> x(a.x, at, a.rows, a.cols), grad_out(a.grad_out, at, a.rows, a.cols);
  const Patches<T, kVector, kHeld> residual(a.residual, at, a.residual.data != nullptr ? a.rows : 0, a.cols);
  const Columns<kVector, kHeld> gammas(a.gamma, at, a.cols);
  RowSums mean, rstd;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    const bool inside = at.row + i < a.rows;
    mean[i] = inside ? a.mean[at.row + i] : 0.0f;
    rstd[i] = inside ? a.rstd[at.row + i] : 0.0f;
  }
  const int outputs = kQuantize ? a.outputs : 2;
  float* partials = a.partials + blockIdx.y * outputs * static_cast<std::int64_t>(a.cols);
  if (threadIdx.x == 0) sums.mailbox.open();
  announce_block();
  await_blocks();
  if (threadIdx.x == 0) sums.expect(blocks, groups);

  float sum_grad = 0.0f, sum_product = 0.0f;  // of row lane % 4
  for (int s = 0; s < segments; ++s) {
    const int col = at.column(s);
    float gamma[kLaneElements], grad_gamma[kLaneElements]{}, grad_beta[kLaneElements]{};
    RowSums grad_of_lane{}, product_of_lane{};
    gammas.at(col, gamma);
    sum_patch(x.at(col), grad_out.at(col), mean, rstd, gamma, grad_of_lane, product_of_lane, grad_gamma, grad_beta);
    sum_grad += sum_lanes(grad_of_lane, at.lane);
    sum_product += sum_lanes(product_of_lane, at.lane);
    if (s == segments - 1) {  // the rows' sums travel while the last columns' are added
      sums.leave(0, rank, blocks, at, sum_grad);
      sums.leave(1, rank, blocks, at, sum_product);
    }
    if (s > 0) __syncthreads();  // the previous segment's sums are taken
    memory[at.group].parameters.put(0, at.quad, at.lane, grad_gamma);
    memory[at.group].parameters.put(1, at.quad, at.lane, grad_beta);
    __syncthreads();
    memory[at.group].parameters.template write<kVector>(partials, at.segment_column(s), a.cols, at.of_group());
  }

  const float scale = kQuantize ? *a.quantized.scale : 1.0f;
  sums.wait();
  const float count = static_cast<float>(a.cols);
  RowSums mean_grad, mean_product;
  spread_rows(sums.sum(0, blocks, groups, at) / count, mean_grad);
  spread_rows(sums.sum(1, blocks, groups, at) / count, mean_product);
  float amax = 0.0f;
  for (int s = 0; s < segments; ++s) {
    const int col = at.column(s);
    const RawPatch<T> raw_x = x.at(col), raw_dy = grad_out.at(col), raw_residual = residual.at(col);
    float gamma[kLaneElements];
    gammas.at(col, gamma);
    RawPatch<T> stored;  // zeros outside the matrix
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float dx[kLaneElements];
      differentiate_eight(raw_x.rows[i], raw_dy.rows[i], raw_residual.rows[i], mean[i], rstd[i], gamma, mean_grad[i],
                          mean_product[i], dx);
      const Eight<T> rounded = to_eight(T{}, dx);
      const bool inside = at.row + i < a.rows;
      if (inside) store_eight<kVector>(a.grad_x.row(at.row + i), col, a.cols, rounded);
      stored.rows[i] = inside && col < a.cols ? rounded : Eight<T>{};
    }
    if constexpr (kQuantize) {
      static_assert(kVector, "a patch's columns are all inside the matrix or all outside");
      Patch v;
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) to_floats(stored.rows[i], v[i]);
      amax = amax_of(v, amax);
      std::uint32_t words[kLaneElements];
      write_codes<kVector>(a.quantized, at.row, col, v, scale, words);
      const std::uint32_t m = warp_amax(amax);
      if (at.lane == 0) warp_amaxes[at.group * Deal::kQuads + at.quad] = m;
      auto& shared = memory[at.group].dx;
      __syncthreads();  // the parameters' sums, or the previous segment's, are taken
      if (outputs == 3) {
        float of_lane[kLaneElements];
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) of_lane[k] = (v[0][k] + v[1][k]) + (v[2][k] + v[3][k]);
        shared.sums.put(0, at.quad, at.lane, of_lane);
      }
      if (a.quantized.columnwise != nullptr) shared.transposed.put(at.lane * kLaneElements, at.quad, words);
      __syncthreads();
      if (outputs == 3) {
        shared.sums.template write<kVector>(partials + 2 * static_cast<std::int64_t>(a.cols), at.segment_column(s),
                                            a.cols, at.of_group());
      }
      if (a.quantized.columnwise != nullptr) {
        shared.transposed.template write<kVector>(a.quantized, at.first_row, at.segment_column(s), at.of_group(),
                                                  Deal::kGroup);
      }
    }
  }
  if constexpr (kQuantize) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0 && blockIdx.y == 0) write_scale_inv(a.quantized, scale);
    if (a.quantized.amax != nullptr) raise_amax(a.quantized.amax, warp_amaxes, groups * Deal::kQuads);
  }
}

}  // namespace qe::cuda

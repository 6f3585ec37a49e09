// One kernel for the operations that map elements and end in an Operand: quantize, quantize_weight, cast, GELU and its
// backward. Owns the tile, the column sums' partials and the launch; the map is the caller's Source.
//
// A Source has `Raw` (what a thread loads of one row), `load<kVector>(row, col)` (zeros outside the matrix, which must
// map to zeros) and `values(raw, v)`.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <bit>

#include "kernels/cuda/cluster_mail.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/operand_tile.cuh"

namespace qe::cuda {

inline constexpr int kTile = 64;                                           // rows and columns of a block
inline constexpr int kTileGroups = kTile / kLaneElements;                  // patches side by side
inline constexpr int kPatchesOfTile = kTileGroups * (kTile / kPatchRows);  // one patch a thread
inline constexpr int kTileWarps = kPatchesOfTile / kWarp;

// Sums of the patch's columns over the rows of the warp: lanes that differ in their quad of rows. Fixed order.
__device__ __forceinline__ void add_rows_of_warp(const Patch& v, float (&sums)[kLaneElements]) {
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) {
    sums[k] = (v[0][k] + v[1][k]) + (v[2][k] + v[3][k]);
#pragma unroll
    for (int lanes = kTileGroups; lanes < kWarp; lanes *= 2) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], lanes);
  }
}

// Where the column sums go: straight into the gradient, when one cluster has all rows, or into partials. Both null: no
// column sums.
struct ColumnTarget {
  float* gradient;  // [cols]
  float* partials;  // [tiles of rows, cols]
  __device__ bool wanted() const { return gradient != nullptr || partials != nullptr; }
};
inline constexpr int kMaxRowTiles = 8;  // of a cluster

// The column sums of a block's tile, and in a cluster's first block those of every block.
struct TileSums {
  float of_warps[kTileWarps][kTile];
  float of_blocks[kMaxRowTiles][kTile];
  Mailbox mailbox;

  __device__ void put(const Patch& v) {
    float sums[kLaneElements];
    add_rows_of_warp(v, sums);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread % kWarp >= kTileGroups) return;
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      of_warps[thread / kWarp][thread % kTileGroups * kLaneElements + k] = sums[k];
    }
  }
  // After the block's patches are put and, with a gradient, await_blocks; thread t < kTile has column t.
  __device__ void leave(const ColumnTarget& to, int rank, int first_col, int cols) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kTile) return;
    float sum = 0.0f;
    for (int w = 0; w < kTileWarps; ++w) sum += of_warps[w][thread];
    if (to.gradient != nullptr) {
      send(0, &of_blocks[rank][thread], mailbox, sum);
    } else if (first_col + thread < cols) {
      to.partials[blockIdx.y * static_cast<std::int64_t>(cols) + first_col + thread] = sum;
    }
  }
  // By the cluster's first block.
  __device__ void add(float* gradient, int blocks, int first_col, int cols) const {
    mailbox.wait();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kTile || first_col + thread >= cols) return;
    float sum = 0.0f;
    for (int b = 0; b < blocks; ++b) sum += of_blocks[b][thread];
    gradient[first_col + thread] += sum;
  }
};

template <class Source, bool kVector>
__global__ void __launch_bounds__(kPatchesOfTile)
    write_tile(const Source source, const OperandTarget out, const ColumnTarget columns) {
  __shared__ TransposeTile<kTile, kTile> transposed;
  __shared__ TileSums sums;
  __shared__ std::uint32_t warp_amaxes[kTileWarps];
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
  const bool clustered = columns.gradient != nullptr;
  if (clustered) {
    if (threadIdx.x == 0) sums.mailbox.open();
    announce_block();
  }
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int first_row = static_cast<int>(blockIdx.y) * kTile, first_col = static_cast<int>(blockIdx.x) * kTile;
  const int group = thread % kTileGroups, quad = thread / kTileGroups;
  const int row = first_row + quad * kPatchRows, col = first_col + group * kLaneElements;
  const bool fp8 = out.type == DType::kE4M3 || out.type == DType::kE5M2;
  const float scale = fp8 && out.scale != nullptr ? *out.scale : 1.0f;

  typename Source::Raw raw[kPatchRows];
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) raw[i] = source.template load<kVector>(row + i, col);
  Patch v;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) source.values(raw[i], v[i]);

  if (fp8) {
    std::uint32_t words[kLaneElements];
    write_codes<kVector>(out, row, col, v, scale, words);
    if (out.columnwise != nullptr) transposed.put(group * kLaneElements, quad, words);
    if (out.amax != nullptr) {
      const std::uint32_t m = warp_amax(amax_of(v, 0.0f));
      if (thread % kWarp == 0) warp_amaxes[warp] = m;
    }
    if (thread == 0 && blockIdx.x == 0 && blockIdx.y == 0) write_scale_inv(out, scale);
  } else if (out.rowwise != nullptr) {
    write_wide<kVector>(out, row, col, v);
  }
  if (columns.wanted()) sums.put(v);
  __syncthreads();
  if (clustered) {
    await_blocks();
    if (thread == 0 && rank == 0) sums.mailbox.expect(blocks * kTile * static_cast<int>(sizeof(float)));
  }
  if (columns.wanted()) sums.leave(columns, rank, first_col, out.cols);
  if (out.columnwise != nullptr) transposed.template write<kVector>(out, first_row, first_col, thread, kPatchesOfTile);
  if (out.amax != nullptr && thread == 0) raise_amax(out.amax, warp_amaxes, kTileWarps);
  if (clustered && rank == 0) sums.add(columns.gradient, blocks, first_col, out.cols);
}

// Writes the operand; gradient [1, cols] FP32 gains the column sums of the values, empty: none.
template <class Source>
void write_elementwise(const Launch& launch, const Source& source, bool vectors, const OperandTarget& out,
                       const Tensor& gradient) {
  const int row_tiles = tiles(out.rows, kTile);
  QE_EXPECTS(gradient.empty() || (gradient.dtype == DType::kF32 && gradient.shape == (Shape{1, out.cols})),
             "column sums go into one FP32 row");
  LaunchShape shape{dim3(static_cast<unsigned>(tiles(out.cols, kTile)), static_cast<unsigned>(row_tiles)),
                    kPatchesOfTile, 1, launch.stream};
  ColumnTarget columns{};
  if (!gradient.empty() && row_tiles <= kMaxRowTiles) {
    columns.gradient = gradient.as<float>();
    shape.grid.y = std::max(2u, std::bit_ceil(shape.grid.y));  // tiles beyond the rows are zeros
    shape.cluster = dim3(1, shape.grid.y);
  } else if (!gradient.empty()) {
    columns.partials = partials_in(launch, row_tiles, 1, out.cols);
  }
  launch_kernel(shape, vectors ? &write_tile<Source, true> : &write_tile<Source, false>, source, out, columns);
  if (columns.partials != nullptr) {
    add_partials(launch, {columns.partials, row_tiles, out.cols, {gradient.as<float>(), nullptr}});
  }
}

}  // namespace qe::cuda

// Tiles of the attention kernels: a [rows, head_dim] BF16 matrix of one head in shared memory, its loads and stores,
// and the two products that attention is made of. Owns no loop over tiles and no softmax.
//
// A row is head_dim / 8 chunks of 16 bytes; chunk c of row r lies at place c ^ (r % 8). A row is a multiple of the 128
// bytes that all banks hold, so eight rows' equal chunks, which one matrix load takes, lie in different banks.
//
// A block has kWarps warps; a warp owns 16 · kRowTiles rows of the tile that stays and streams kTileRows rows of the
// other at a time. Only a warp itself reads its rows of the tile that stays.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"
#include "kernels/cuda/attention_arguments.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/mma_sync.cuh"

namespace qe::cuda {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kTileRows = 16 * kWarps;

template <int kHeadDim>
inline constexpr int kRowBytes = kHeadDim* static_cast<int>(sizeof(Bf16));

// Sums of a warp: kRowTiles times 16 rows, kColumns columns.
template <int kRowTiles, int kColumns>
using Sums = float[kRowTiles][kColumns / 8][4];
// The same as BF16 fragments of a left operand.
template <int kRowTiles, int kColumns>
using Weights = std::uint32_t[kRowTiles][kColumns / 16][4];

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

template <int kHeadDim>
__device__ std::uint32_t chunk_address(std::uint32_t tile, int row, int chunk) {
  return tile + static_cast<std::uint32_t>(row * kRowBytes<kHeadDim> + ((chunk ^ (row % 8)) << 4));
}
// The chunk `rows` further down and `chunks` further right; rows a multiple of 8, chunks and the place that the
// address has in its row without common bits: exclusive-or then adds, and compile-time offsets stay immediates.
template <int kHeadDim>
__device__ std::uint32_t advance(std::uint32_t address, int rows, int chunks) {
  return (address ^ static_cast<std::uint32_t>((chunks % 8) << 4)) +
         static_cast<std::uint32_t>(rows * kRowBytes<kHeadDim> + chunks / 8 * 128);
}
// This lane's row address for fragments of a left operand, and of a right operand stored [k, columns].
template <int kHeadDim>
__device__ std::uint32_t row_fragments(std::uint32_t tile, int first_row) {
  return chunk_address<kHeadDim>(tile, first_row + lane_id() % 16, lane_id() / 16);
}
// The same for a right operand stored [columns, k].
template <int kHeadDim>
__device__ std::uint32_t column_fragments(std::uint32_t tile) {
  return chunk_address<kHeadDim>(tile, lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
}

// Starts copying rows [first, first + kRows) of one head of a sequence into a tile; rows from `length` on are zeros.
template <int kHeadDim, int kRows>
__device__ void load_tile(std::uint32_t tile, const HeadRows<const Bf16>& from, int first, int length) {
  constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kThreads / kChunks;
  static_assert(kRowsAtOnce % 8 == 0 && kRows % kRowsAtOnce == 0);
  const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
  const std::uint32_t to = chunk_address<kHeadDim>(tile, row, chunk);
  const Bf16* source = from.data + (first + row) * from.pitch + chunk * 8;
#pragma unroll
  for (int r = 0; r < kRows; r += kRowsAtOnce) {
    const bool inside = first + row + r < length;
    copy_async_16(to + r * kRowBytes<kHeadDim>, inside ? source : from.data, inside);
    source += kRowsAtOnce * from.pitch;
  }
}

// The head's rows from a token on.
template <int kHeadDim, class T>
__device__ HeadRows<T> slice(const HeadRows<T>& rows, std::int64_t token, int head) {
  return {rows.data + token * rows.pitch + head * kHeadDim, rows.pitch};
}

// Left operands of multiply_transposed: fragments read from a tile each time, or kept in registers.
template <int kHeadDim>
struct TileFragments {
  std::uint32_t address;  // row_fragments()
  template <int kRowTiles>
  __device__ void load(int step, std::uint32_t (&a)[kRowTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) load_matrices(a[m], advance<kHeadDim>(address, 16 * m, 2 * step));
  }
};
template <int kHeadDim>
struct HeldFragments {
  __device__ explicit HeldFragments(std::uint32_t address) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      load_matrices(fragments[step], advance<kHeadDim>(address, 0, 2 * step));
    }
  }
  __device__ void load(int step, std::uint32_t (&a)[1][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = fragments[step][i];
  }
  std::uint32_t fragments[kHeadDim / 16][4];
};

template <int kRowTiles, int kTiles>
__device__ void clear(float (&sums)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.0f;
    }
  }
}

// product = left · tileᵀ over the head dimension; `tile` is column_fragments().
template <int kHeadDim, int kRowTiles, class Left>
__device__ void multiply_transposed(const Left& left, std::uint32_t tile, Sums<kRowTiles, kTileRows>& product) {
  clear(product);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    std::uint32_t a[kRowTiles][4], b[4];
    left.load(step, a);
#pragma unroll
    for (int pair = 0; pair < kTileRows / 16; ++pair) {
      load_matrices(b, advance<kHeadDim>(tile, 16 * pair, 2 * step));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_add(product[m][2 * pair], a[m], b[0], b[1]);
        multiply_add(product[m][2 * pair + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sums += weights · tile over the tile's rows; `tile` is row_fragments() of its first row.
template <int kHeadDim, int kRowTiles>
__device__ void add_product(const Weights<kRowTiles, kTileRows>& weights, std::uint32_t tile,
                            Sums<kRowTiles, kHeadDim>& sums) {
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < kHeadDim / 16; ++pair) {
      std::uint32_t b[4];
      load_matrices_transposed(b, advance<kHeadDim>(tile, 16 * step, 2 * pair));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_add(sums[m][2 * pair], weights[m][step], b[0], b[1]);
        multiply_add(sums[m][2 * pair + 1], weights[m][step], b[2], b[3]);
      }
    }
  }
}

// Sums lie in registers as the fragments of a left operand do: two neighbouring tiles of 8 columns are one step of 16.
template <int kRowTiles>
__device__ void round_to_weights(const Sums<kRowTiles, kTileRows>& sums, Weights<kRowTiles, kTileRows>& weights) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int step = 0; step < kTileRows / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&s)[4] = sums[m][2 * step + half];
        weights[m][step][2 * half] = pack_bf16(s[0], s[1]);
        weights[m][step][2 * half + 1] = pack_bf16(s[2], s[3]);
      }
    }
  }
}

// Writes the warp's sums times a factor a row half ([m][0] for lane rows g, [m][1] for g + 8) to rows first +
// first_row ... of one head, those below `length`. Goes through the warp's own rows [first_row, ...) of a tile that it
// no longer needs, so that global stores have 16 bytes.
template <int kHeadDim, int kRowTiles>
__device__ void store_rows(const Sums<kRowTiles, kHeadDim>& sums, const float (&factor)[kRowTiles][2],
                           unsigned char* tile, int first_row, const HeadRows<Bf16>& to, int first, int length) {
  constexpr int kChunks = kHeadDim / 8;
  const int lane = lane_id();
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        const float(&s)[4] = sums[m][n];
        const float f = factor[m][half];
        *reinterpret_cast<std::uint32_t*>(tile + chunk_address<kHeadDim>(0, row, n) + lane % 4 * 4) =
            pack_bf16(s[2 * half] * f, s[2 * half + 1] * f);
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * kRowTiles * kChunks; i += 32) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    if (first + row >= length) continue;
    *reinterpret_cast<uint4*>(to.data + (first + row) * to.pitch + chunk * 8) =
        *reinterpret_cast<const uint4*>(tile + chunk_address<kHeadDim>(0, row, chunk));
  }
}

// Launches a kernel of kThreads threads with more shared memory than a kernel may use unasked.
template <class Arguments>
void launch_tiles(void (*kernel)(Arguments), dim3 grid, int shared_bytes, cudaStream_t stream, const Arguments& args) {
  QE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     shared_bytes));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  QE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace qe::cuda

// Parameters of a launch over all of them, cut into 2-D tiles, one block a tile, and four neighbouring elements of a
// row in and out of registers. Owns geometry and memory access; what is computed is optimizer.cu's.
//
// The cut depends on a parameter's shape alone: not on pitch, type, alignment or what else is in the launch. So does
// every sum that follows it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/tensor.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.cuh"

namespace qe::cuda {

inline constexpr int kQuad = 4;  // elements of one access: 16 bytes of FP32, 8 of BF16
inline constexpr int kTileLog2 = 13;
inline constexpr int kTileElements = 1 << kTileLog2;  // of a tile, where the parameter is at least as high and wide
inline constexpr int kMaxTileWidth = 1024;            // a block's threads hold at least a row of a tile

// 64 rows of 128 columns; fewer rows make it wider, fewer columns higher. Sides are powers of two.
struct TileGrid {
  std::int32_t rows = 0, cols = 0;  // of the parameter
  std::int32_t across = 0;          // tiles side by side
  std::int32_t quads_log2 = 0;      // of a tile's row
};

inline TileGrid tile_grid(const Shape& shape) {
  QE_EXPECTS(shape.rows <= (1 << 30) && shape.cols <= (1 << 30), "a parameter has at most 2^30 rows and columns");
  const auto power_of_two = [](std::int64_t n) {
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
  };
  const std::int64_t height = std::min<std::int64_t>(64, power_of_two(shape.rows));
  const std::int64_t most = std::min<std::int64_t>(kMaxTileWidth, kTileElements / height);
  const std::int64_t width = std::min(most, power_of_two(std::max<std::int64_t>(shape.cols, 2 * kQuad)));
  return {static_cast<std::int32_t>(shape.rows), static_cast<std::int32_t>(shape.cols),
          static_cast<std::int32_t>((shape.cols + width - 1) / width),
          std::countr_zero(static_cast<std::uint64_t>(width / kQuad))};
}
inline std::int64_t tiles_of(const TileGrid& g) {
  const std::int64_t height = kTileElements >> (g.quads_log2 + 2);
  return g.across * ((g.rows + height - 1) / height);
}

// A tile's place in its parameter, and which elements a thread of a block of kThreads works on: quads 0 … kQuads − 1,
// in the same columns, `stride` rows from each other: kConsecutive: one, else as many as the block holds at once.
template <int kThreads, bool kConsecutive>
struct Tile {
  static_assert(kThreads * kQuad >= kMaxTileWidth);
  static constexpr int kQuads = kTileElements / (kQuad * kThreads);

  __device__ Tile(const TileGrid& grid, int tile)
      : rows(grid.rows),
        cols(grid.cols),
        quads_log2(grid.quads_log2),
        stride(kConsecutive ? 1 : kThreads >> grid.quads_log2) {
    const int down = tile / grid.across, over = tile - down * grid.across;
    const int thread = static_cast<int>(threadIdx.x), log2 = grid.quads_log2;
    row_in_tile = (thread >> log2) * (kConsecutive ? kQuads : 1);
    row = down * (kTileElements >> (log2 + 2)) + row_in_tile;
    col = ((over << log2) + (thread & ((1 << log2) - 1))) * kQuad;
    width = min(kQuad, grid.cols - col);
  }
  // Elements of quad k inside the parameter: at most 0, or 1 to 4.
  [[nodiscard]] __device__ __forceinline__ int inside(int k) const { return row + k * stride < rows ? width : 0; }
  // Where quad k lies in a matrix of the parameter's shape.
  template <class T>
  [[nodiscard]] __device__ __forceinline__ T* at(T* data, std::int64_t pitch, int k = 0) const {
    return data + (row + k * stride) * pitch + col;
  }

  int rows, cols, quads_log2, stride;
  int row_in_tile, row, col, width;  // of quad 0
};
template <int kThreads>
using ConsecutiveTile = Tile<kThreads, true>;

// Bit k: quad k's row has a gradient; `touched` counts gradients by row, null: every row has one.
template <class Tile>
[[nodiscard]] __device__ __forceinline__ std::uint32_t touched_rows(const Tile& tile, const float* touched) {
  static_assert(Tile::kQuads <= 32);
  if (touched == nullptr) return ~0u;
  std::uint32_t rows = 0;
#pragma unroll
  for (int k = 0; k < Tile::kQuads; ++k) {
    const int row = tile.row + k * tile.stride;
    rows |= (row < tile.rows && touched[row] != 0.0f ? 1u : 0u) << k;
  }
  return rows;
}

// Elements 0 … 3 from `from`, zero where not inside. kVector: all four are inside or none, on an aligned address.
template <bool kVector>
__device__ __forceinline__ void load_quad(const float* from, int inside, float (&v)[kQuad]) {
  if constexpr (kVector) {
    const float4 words = inside > 0 ? *reinterpret_cast<const float4*>(from) : float4{};
    v[0] = words.x, v[1] = words.y, v[2] = words.z, v[3] = words.w;
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) v[e] = e < inside ? from[e] : 0.0f;
  }
}
template <bool kVector>
__device__ __forceinline__ void load_quad(const Bf16* from, int inside, float (&v)[kQuad]) {
  if constexpr (kVector) {
    const uint2 words = inside > 0 ? *reinterpret_cast<const uint2*>(from) : uint2{};
    v[0] = __uint_as_float(words.x << 16), v[1] = __uint_as_float(words.x & 0xffff0000u);
    v[2] = __uint_as_float(words.y << 16), v[3] = __uint_as_float(words.y & 0xffff0000u);
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) v[e] = e < inside ? to_float(from[e]) : 0.0f;
  }
}
template <bool kVector>
__device__ __forceinline__ void store_quad(float* to, int inside, const float (&v)[kQuad]) {
  if constexpr (kVector) {
    if (inside > 0) *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      if (e < inside) to[e] = v[e];
    }
  }
}
template <bool kVector>
__device__ __forceinline__ void store_quad(Bf16* to, int inside, const Bf16 (&v)[kQuad]) {
  if constexpr (kVector) {
    if (inside > 0) {
      *reinterpret_cast<uint2*>(to) = {v[0].bits | std::uint32_t{v[1].bits} << 16,
                                       v[2].bits | std::uint32_t{v[3].bits} << 16};
    }
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      if (e < inside) to[e] = v[e];
    }
  }
}

// Can quads of this matrix be read and written in one access each?
inline bool allows_quads(const Tensor& t) {
  const auto quad_bytes = kQuad * size_of(t.dtype);
  return reinterpret_cast<std::uintptr_t>(t.data) % quad_bytes == 0 && t.shape.cols % kQuad == 0 &&
         (t.shape.rows <= 1 || t.row_pitch % kQuad == 0);
}

// The items of a launch as device memory: items[i] owns tiles first_tile[i] … first_tile[i + 1] − 1.
template <class Item>
struct ItemTable {
  const std::int32_t* first_tile;
  const Item* items;
  std::int32_t count;
  std::int32_t tiles;
};

template <class T>
const T* upload(const Launch& launch, const std::vector<T>& values) {
  static_assert(std::has_unique_object_representations_v<T>, "tables are found by their bytes");
  if (values.empty()) return nullptr;
  return static_cast<const T*>(launch.tables.find_or_upload(values.data(), values.size() * sizeof(T)));
}

// Item has a TileGrid `grid`.
template <class Item>
ItemTable<Item> upload_items(const Launch& launch, const std::vector<Item>& items) {
  std::vector<std::int32_t> first_tile;
  std::int64_t tiles = 0;
  for (const Item& item : items) {
    first_tile.push_back(static_cast<std::int32_t>(tiles));
    tiles += tiles_of(item.grid);
    QE_EXPECTS(tiles <= std::numeric_limits<std::int32_t>::max(), "the tiles of a launch fit its grid");
  }
  return {upload(launch, first_tile), upload(launch, items), static_cast<std::int32_t>(items.size()),
          static_cast<std::int32_t>(tiles)};
}

// The item that owns a tile; called by all threads of a block, all get it. The search is one look at all the items
// at once: a block is too short for a chain of dependent reads.
template <class Item>
__device__ __forceinline__ int item_of_tile(const ItemTable<Item>& table, int tile) {
  int not_after = 0;
  for (int first = 0; first < table.count; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    not_after += __syncthreads_count(i < table.count && table.first_tile[i] <= tile);
  }
  return not_after - 1;
}

inline LaunchShape blocks(const Launch& launch, int count, int threads) {
  return {.grid = dim3(static_cast<unsigned>(count)), .threads = threads, .stream = launch.stream};
}

}  // namespace qe::cuda

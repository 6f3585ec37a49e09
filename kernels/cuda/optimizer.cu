// The optimizer's first two launches: sums of squares and finiteness of every gradient, and the clip factor from them.
//
// Tree of a parameter's Σ g²: the tiles of parameter_tiles.cuh; in a tile each thread adds its quads' squares by fma,
// one running sum for every element of a quad, and the block adds the threads' sums in a binary tree. Tile sums are
// added in double: thread j of a block takes tiles j, j + kThreads, …, then the same tree.
//
// Bound by memory: an FP32 gradient's element is 4 bytes, a BF16 one's 2; with M microbatch views 2 M are read and 4
// written.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/parameter_tiles.cuh"

namespace qe::cuda {
namespace {

constexpr int kThreads = 256;
using GradientTile = Tile<kThreads, false>;

struct GradientView {
  const Bf16* data;
  std::int64_t pitch;
};
struct NormItem {
  TileGrid grid;
  void* gradient;
  std::int64_t pitch;
  std::int64_t global_index;
  std::int32_t bf16;        // the main gradient's type
  std::int32_t first_view;  // in the table of views
  std::int64_t views;
  const float* touched;  // by row; null: every row has a gradient
};
struct TileSum {
  float squares;
  float bad;
};

using ThreadGradients = float[GradientTile::kQuads][kQuad];

template <bool kVector, class T>
__device__ __forceinline__ void load_gradients(const GradientTile& tile, const T* data, std::int64_t pitch,
                                               ThreadGradients& g, std::uint32_t touched = ~0u) {
#pragma unroll
  for (int k = 0; k < GradientTile::kQuads; ++k) {
    load_quad<kVector>(tile.at(data, pitch, k), (touched >> k & 1u) != 0 ? tile.inside(k) : 0, g[k]);
  }
}

// The views' sum in index order, stored in the main gradient.
template <bool kVector>
__device__ __forceinline__ void sum_views(const GradientTile& tile, const NormItem& item, const GradientView* views,
                                          ThreadGradients& g) {
  load_gradients<kVector>(tile, views[0].data, views[0].pitch, g);
  for (int view = 1; view < item.views; ++view) {
    ThreadGradients next;
    load_gradients<kVector>(tile, views[view].data, views[view].pitch, next);
#pragma unroll
    for (int k = 0; k < GradientTile::kQuads; ++k) {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) g[k][e] += next[k][e];
    }
  }
#pragma unroll
  for (int k = 0; k < GradientTile::kQuads; ++k) {
    store_quad<kVector>(tile.at(static_cast<float*>(item.gradient), item.pitch, k), tile.inside(k), g[k]);
  }
}

template <bool kVector>
__device__ __forceinline__ void gather(const GradientTile& tile, const NormItem& item, const GradientView* views,
                                       ThreadGradients& g) {
  if (item.views > 0) {
    sum_views<kVector>(tile, item, views + item.first_view, g);
  } else if (item.bf16 != 0) {
    load_gradients<kVector>(tile, static_cast<const Bf16*>(item.gradient), item.pitch, g);
  } else {
    load_gradients<kVector>(tile, static_cast<const float*>(item.gradient), item.pitch, g,
                            touched_rows(tile, item.touched));
  }
}

__device__ __forceinline__ bool is_finite(float value) { return (__float_as_uint(value) & 0x7fffffffu) < 0x7f800000u; }
// A sum of squares is finite only if every gradient is, but may overflow by itself.
__device__ __forceinline__ bool has_bad(const ThreadGradients& g) {
  bool bad = false;
#pragma unroll
  for (int k = 0; k < GradientTile::kQuads; ++k) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) bad = bad || !is_finite(g[k][e]);
  }
  return bad;
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads, 4)
    sum_tiles(ItemTable<NormItem> table, const GradientView* views, TileSum* sums) {
  const int block = static_cast<int>(blockIdx.x);
  const int i = item_of_tile(table, block);
  const NormItem& item = table.items[i];
  const GradientTile tile(item.grid, block - table.first_tile[i]);
  ThreadGradients g;
  gather<kVector>(tile, item, views, g);
  float sum[kQuad] = {};
#pragma unroll
  for (int k = 0; k < GradientTile::kQuads; ++k) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) sum[e] = fmaf(g[k][e], g[k][e], sum[e]);
  }
  const float mine = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  const float squares = reduce_block<Add>(mine, 0.0f);
  const bool any_bad = __syncthreads_or(!is_finite(mine) && has_bad(g)) != 0;
  if (threadIdx.x == 0) sums[block] = {squares, any_bad ? 1.0f : 0.0f};
}

// One block an item.
__global__ void __launch_bounds__(kThreads)
    combine_tiles(ItemTable<NormItem> table, const TileSum* sums, float* partial_squares, float* partial_bad) {
  const int i = static_cast<int>(blockIdx.x);
  const int end = i + 1 < table.count ? table.first_tile[i + 1] : table.tiles;
  double squares = 0.0;
  bool bad = false;
  for (int t = table.first_tile[i] + static_cast<int>(threadIdx.x); t < end; t += kThreads) {
    squares += static_cast<double>(sums[t].squares);
    bad = bad || sums[t].bad != 0.0f;
  }
  squares = reduce_block<Add>(squares, 0.0);
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x != 0) return;
  partial_squares[table.items[i].global_index] = static_cast<float>(squares);
  partial_bad[table.items[i].global_index] = any_bad ? 1.0f : 0.0f;
}

void require_norm_types(const GradientItem& item) {
  const Tensor& gradient = item.gradient;
  QE_EXPECTS(gradient.dtype == DType::kF32 || (gradient.dtype == DType::kBF16 && item.microbatch.empty()),
             "gradient_norm takes an FP32 or BF16 main gradient, FP32 where microbatch views are summed into it");
  for (const Tensor& view : item.microbatch) {
    QE_EXPECTS(view.dtype == DType::kBF16 && view.shape == gradient.shape,
               "gradient_norm sums BF16 microbatch views of the main gradient's shape");
  }
}

template <bool kVector>
void norms_of(const Launch& launch, const GradientNormArgs& a, const std::vector<const GradientItem*>& of) {
  if (of.empty()) return;
  std::vector<NormItem> items;
  std::vector<GradientView> views;
  for (const GradientItem* item : of) {
    items.push_back({.grid = tile_grid(item->gradient.shape),
                     .gradient = item->gradient.data,
                     .pitch = item->gradient.row_pitch,
                     .global_index = item->global_index,
                     .bf16 = item->gradient.dtype == DType::kBF16,
                     .first_view = static_cast<std::int32_t>(views.size()),
                     .views = static_cast<std::int64_t>(item->microbatch.size()),
                     .touched = item->touched.as<const float>()});
    for (const Tensor& view : item->microbatch) views.push_back({view.as<const Bf16>(), view.row_pitch});
  }
  const ItemTable<NormItem> table = upload_items(launch, items);
  auto* sums = launch.scratch.as<TileSum>();
  QE_EXPECTS(static_cast<std::size_t>(table.tiles) * sizeof(TileSum) <= launch.scratch.bytes,
             "the tiles' sums fit the scratch memory");
  if (table.tiles > 0) {
    launch_kernel(blocks(launch, table.tiles, kThreads), sum_tiles<kVector>, table, upload(launch, views), sums);
  }
  launch_kernel(blocks(launch, table.count, kThreads), combine_tiles, table, sums, a.partial_squares, a.partial_bad);
}

constexpr int kClipThreads = 256;

// The sum is taken by one thread in index order: a few hundred additions, and every rank needs the same bits.
__global__ void __launch_bounds__(kClipThreads) clip(const float* partial_squares, const float* partial_bad,
                                                     std::int64_t count, float max_norm, OptimizerScalars* scalars) {
  __shared__ float staged[kClipThreads];
  __shared__ int first_bad;
  if (threadIdx.x == 0) first_bad = std::numeric_limits<int>::max();
  double sum = 0.0;
  for (std::int64_t first = 0; first < count; first += kClipThreads) {
    const std::int64_t i = first + threadIdx.x;
    __syncthreads();
    if (i < count) {
      staged[threadIdx.x] = partial_squares[i];
      if (partial_bad[i] != 0.0f || !isfinite(partial_squares[i])) atomicMin(&first_bad, static_cast<int>(i));
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    const int here = static_cast<int>(count - first < kClipThreads ? count - first : kClipThreads);
    for (int k = 0; k < here; ++k) sum += static_cast<double>(staged[k]);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  OptimizerScalars& s = *scalars;
  const bool skip = first_bad != std::numeric_limits<int>::max();
  s.first_bad = skip ? first_bad : -1;
  s.norm = static_cast<float>(sqrt(sum));
  s.skip = skip ? 1 : 0;
  const float limit = max_norm / (s.norm + 1e-6f);
  s.clip = max_norm > 0.0f && limit < 1.0f ? limit : 1.0f;
  if (skip) s.clip = 0.0f;
}

}  // namespace

// Items whose quads need one access each, then the others, if any: both give the same bits.
void gradient_norm(const Launch& launch, const GradientNormArgs& a) {
  std::vector<const GradientItem*> whole, split;
  for (const GradientItem& item : a.items) {
    require_norm_types(item);
    const bool vector = allows_quads(item.gradient) && std::ranges::all_of(item.microbatch, allows_quads);
    (vector ? whole : split).push_back(&item);
  }
  norms_of<true>(launch, a, whole);
  norms_of<false>(launch, a, split);
}

void clip_factor(const Launch& launch, const ClipArgs& a) {
  launch_kernel(blocks(launch, 1, kClipThreads), clip, a.partial_squares, a.partial_bad, a.count, a.max_norm,
                a.scalars);
}

}  // namespace qe::cuda

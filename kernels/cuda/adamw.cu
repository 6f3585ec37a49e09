// AdamW of every parameter in one launch. Owns no arithmetic of the update itself: that is core/adamw_rule.h, shared
// with the other backends.
//
// Bound by memory: an element's bytes read and written are 28 with FP32 moments and gradient, 20 with BF16 moments, 2
// less where the gradient is BF16, as many more as the gradient has where it is cleared.
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/adamw_rule.h"
#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/parameter_tiles.cuh"

namespace qe::cuda {
namespace {

constexpr int kThreads = 256;
using UpdateTile = Tile<kThreads>;

struct UpdateItem {
  TileGrid grid;
  float* master;
  void* gradient;
  void* moment1;
  void* moment2;
  std::int64_t master_pitch, gradient_pitch, moment1_pitch, moment2_pitch;
  std::int64_t parameter;
  std::int32_t bf16_gradient;
  std::int32_t bf16_moments;
  std::int32_t decay;
  std::int32_t zero_gradient;
};
struct UpdateStep {
  const OptimizerScalars* scalars;
  float beta1, beta2, epsilon, weight_decay;
  std::uint64_t seed;
};

__device__ __forceinline__ AdamWFactors factors_of(const UpdateStep& step, bool decay) {
  const OptimizerScalars& s = *step.scalars;
  return {.clip = s.clip,
          .beta1 = step.beta1,
          .one_minus_beta1 = 1.0f - step.beta1,
          .beta2 = step.beta2,
          .one_minus_beta2 = 1.0f - step.beta2,
          .bias_correction1 = s.bias_correction1,
          .bias_correction2 = s.bias_correction2,
          .learning_rate = s.learning_rate,
          .decay_step = decay ? s.learning_rate * step.weight_decay : 0.0f,
          .epsilon = step.epsilon};
}

// The random words of elements first … first + 3. kVector: they are one group.
template <bool kVector>
__device__ __forceinline__ RandomWords rounding_words(std::uint64_t seed, std::uint32_t step, std::uint32_t parameter,
                                                      std::uint64_t first) {
  if constexpr (kVector) {
    return moment_rounding_words(seed, step, parameter, first / 4);
  } else {
    const auto skip = static_cast<unsigned>(first % 4);
    const RandomWords a = moment_rounding_words(seed, step, parameter, first / 4);
    const RandomWords b = moment_rounding_words(seed, step, parameter, first / 4 + 1);
    if (skip == 0) return a;
    if (skip == 1) return {{a.w[1], a.w[2], a.w[3], b.w[0]}};
    if (skip == 2) return {{a.w[2], a.w[3], b.w[0], b.w[1]}};
    return {{a.w[3], b.w[0], b.w[1], b.w[2]}};
  }
}

// The moments of four elements into their storage.
template <bool kVector>
__device__ __forceinline__ void store_moments(float* to, int inside, const float (&v)[kQuad], const RandomWords&, int) {
  store_quad<kVector>(to, inside, v);
}
template <bool kVector>
__device__ __forceinline__ void store_moments(Bf16* to, int inside, const float (&v)[kQuad], const RandomWords& words,
                                              int shift) {
  Bf16 rounded[kQuad];
#pragma unroll
  for (int e = 0; e < kQuad; ++e) rounded[e] = stochastic_round_bf16(v[e], words.w[e] >> shift);
  store_quad<kVector>(to, inside, rounded);
}
template <bool kVector>
__device__ __forceinline__ void store_zeros(float* to, int inside) {
  const float zeros[kQuad] = {};
  store_quad<kVector>(to, inside, zeros);
}
template <bool kVector>
__device__ __forceinline__ void store_zeros(Bf16* to, int inside) {
  const Bf16 zeros[kQuad] = {};
  store_quad<kVector>(to, inside, zeros);
}

template <bool kVector, class Gradient>
__device__ __forceinline__ void clear_gradient(const UpdateTile& tile, const UpdateItem& item) {
  for (int k = 0; k < UpdateTile::kQuads; ++k) {
    const UpdateTile::Quad q = tile.quad(k);
    store_zeros<kVector>(static_cast<Gradient*>(item.gradient) + q.row * item.gradient_pitch + q.col, q.inside);
  }
}

// Four elements of a parameter in registers.
template <bool kVector, class Gradient, class Moment>
struct QuadUpdate {
  UpdateTile::Quad at;
  float weight[kQuad], gradient[kQuad], moment1[kQuad], moment2[kQuad];

  __device__ __forceinline__ void load(const UpdateItem& item, const UpdateTile::Quad& q) {
    at = q;
    load_quad<kVector>(item.master + q.row * item.master_pitch + q.col, q.inside, weight);
    load_quad<kVector>(static_cast<const Gradient*>(item.gradient) + q.row * item.gradient_pitch + q.col, q.inside,
                       gradient);
    load_quad<kVector>(static_cast<const Moment*>(item.moment1) + q.row * item.moment1_pitch + q.col, q.inside,
                       moment1);
    load_quad<kVector>(static_cast<const Moment*>(item.moment2) + q.row * item.moment2_pitch + q.col, q.inside,
                       moment2);
  }
  __device__ __forceinline__ void update(const AdamWFactors& factors) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const AdamWElement next = adamw_element({weight[e], moment1[e], moment2[e]}, gradient[e], factors);
      weight[e] = next.weight;
      moment1[e] = next.moment1;
      moment2[e] = next.moment2;
    }
  }
  __device__ __forceinline__ void store(const UpdateItem& item, std::uint64_t seed, std::uint32_t step) const {
    RandomWords words{};
    if constexpr (sizeof(Moment) == 2) {
      const std::int64_t first = std::int64_t{at.row} * item.grid.cols + at.col;
      words = rounding_words<kVector>(seed, step, static_cast<std::uint32_t>(item.parameter),
                                      static_cast<std::uint64_t>(first));
    }
    store_quad<kVector>(item.master + at.row * item.master_pitch + at.col, at.inside, weight);
    store_moments<kVector>(static_cast<Moment*>(item.moment1) + at.row * item.moment1_pitch + at.col, at.inside,
                           moment1, words, 0);
    store_moments<kVector>(static_cast<Moment*>(item.moment2) + at.row * item.moment2_pitch + at.col, at.inside,
                           moment2, words, 16);
    if (item.zero_gradient != 0) {
      store_zeros<kVector>(static_cast<Gradient*>(item.gradient) + at.row * item.gradient_pitch + at.col, at.inside);
    }
  }
};

template <bool kVector, class Gradient, class Moment>
__device__ __forceinline__ void update_tile(const UpdateTile& tile, const UpdateItem& item, const UpdateStep& step) {
  const AdamWFactors factors = factors_of(step, item.decay != 0);
  const std::uint32_t count = step.scalars->step;
#pragma unroll 1
  for (int k = 0; k < UpdateTile::kQuads; ++k) {
    QuadUpdate<kVector, Gradient, Moment> quad;
    quad.load(item, tile.quad(k));
    quad.update(factors);
    quad.store(item, step.seed, count);
  }
}

template <bool kVector, class Gradient>
__device__ __forceinline__ void step_tile(const UpdateTile& tile, const UpdateItem& item, const UpdateStep& step) {
  if (step.scalars->skip != 0) {
    clear_gradient<kVector, Gradient>(tile, item);
  } else if (item.bf16_moments != 0) {
    update_tile<kVector, Gradient, Bf16>(tile, item, step);
  } else {
    update_tile<kVector, Gradient, float>(tile, item, step);
  }
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads, 3) update_tiles(ItemTable<UpdateItem> table, UpdateStep step) {
  const int block = static_cast<int>(blockIdx.x);
  const int i = item_of_tile(table, block);
  const UpdateItem& item = table.items[i];
  if (step.scalars->skip != 0 && item.zero_gradient == 0) return;
  const UpdateTile tile(item.grid, block - table.first_tile[i]);
  item.bf16_gradient != 0 ? step_tile<kVector, Bf16>(tile, item, step) : step_tile<kVector, float>(tile, item, step);
}

void require_update_types(const AdamWItem& item) {
  QE_EXPECTS(
      item.master.dtype == DType::kF32 && item.moment1.dtype == item.moment2.dtype && is_wide(item.moment1.dtype),
      "adamw takes an FP32 master and two moments of one type, FP32 or BF16");
  QE_EXPECTS(is_wide(item.gradient.dtype), "adamw takes an FP32 or BF16 main gradient");
  QE_EXPECTS(item.gradient.shape == item.master.shape && item.moment1.shape == item.master.shape &&
                 item.moment2.shape == item.master.shape,
             "a parameter's master, gradient and moments have one shape");
}

UpdateItem update_item(const AdamWItem& item) {
  return {.grid = tile_grid(item.master.shape),
          .master = item.master.as<float>(),
          .gradient = item.gradient.data,
          .moment1 = item.moment1.data,
          .moment2 = item.moment2.data,
          .master_pitch = item.master.row_pitch,
          .gradient_pitch = item.gradient.row_pitch,
          .moment1_pitch = item.moment1.row_pitch,
          .moment2_pitch = item.moment2.row_pitch,
          .parameter = item.global_index,
          .bf16_gradient = item.gradient.dtype == DType::kBF16,
          .bf16_moments = item.moment1.dtype == DType::kBF16,
          .decay = item.decay,
          .zero_gradient = item.zero_gradient};
}

template <bool kVector>
void update_items(const Launch& launch, const std::vector<UpdateItem>& items, const UpdateStep& step) {
  const ItemTable<UpdateItem> table = upload_items(launch, items);
  if (table.tiles == 0) return;
  launch_kernel(blocks(launch, table.tiles, kThreads), update_tiles<kVector>, table, step);
}

}  // namespace

void adamw(const Launch& launch, const AdamWArgs& a) {
  std::vector<UpdateItem> whole, split;
  for (const AdamWItem& item : a.items) {
    require_update_types(item);
    const bool vector = allows_quads(item.master) && allows_quads(item.gradient) && allows_quads(item.moment1) &&
                        allows_quads(item.moment2);
    (vector ? whole : split).push_back(update_item(item));
  }
  const UpdateStep step = {a.scalars, a.beta1, a.beta2, a.epsilon, a.weight_decay, a.seed};
  update_items<true>(launch, whole, step);
  update_items<false>(launch, split, step);
}

}  // namespace qe::cuda

// AdamW of every parameter in one launch. Owns no rule: that is core/adamw_rule.h, shared with the other backends. The
// quotient that moves a weight has a second form here, with the same bits, for the numbers that training meets.
//
// Bound by memory: an element's bytes read and written are 28 with FP32 moments and gradient, 20 with BF16 moments, 2
// less where the gradient is BF16, as many more as the gradient has where it is cleared.
#include <cmath>
#include <cstdint>
#include <limits>
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

// Factors of a step and what the quick form of the quotient needs of them.
struct TileFactors {
  AdamWFactors rule;
  float inverse1, inverse2;  // of the bias corrections
  bool quick;                // the factors allow the quick form
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

// The quick form does what the compiler's division and square root do, less their care for numbers near the ends of the
// exponent range and with a divisor's inverse computed once. With 2^-90 <= |m| <= 2^20 and 2^-100 <= v <= 2^20 and the
// factors as tile_factors_of wants them, every quotient lies within 2^-111 and 2^90 and every remainder is exact.
__device__ __forceinline__ bool within(float value, float low, float high) {
  const std::uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
  return magnitude - __float_as_uint(low) <= __float_as_uint(high) - __float_as_uint(low);
}
__device__ __forceinline__ float inverse_of(float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return fmaf(y, fmaf(-b, y, 1.0f), y);
}
__device__ __forceinline__ float divide_quickly(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(inverse, fmaf(-b, q, a), q);
}
__device__ __forceinline__ float root_quickly(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  const float root = x * y;
  return fmaf(fmaf(-root, root, x), 0.5f * y, root);
}
__device__ __forceinline__ float direction_quickly(float moment1, float moment2, const TileFactors& f) {
  const float root = root_quickly(divide_quickly(moment2, f.rule.bias_correction2, f.inverse2)) + f.rule.epsilon;
  return divide_quickly(divide_quickly(moment1, f.rule.bias_correction1, f.inverse1), root, inverse_of(root));
}

__device__ __forceinline__ TileFactors tile_factors_of(const UpdateStep& step, bool decay) {
  const AdamWFactors f = factors_of(step, decay);
  const bool quick = f.bias_correction1 >= 0x1p-20f && f.bias_correction1 <= 1.0f && f.bias_correction2 >= 0x1p-20f &&
                     f.bias_correction2 <= 1.0f && f.epsilon >= 0.0f && f.epsilon <= 0x1p10f;
  return {f, inverse_of(f.bias_correction1), inverse_of(f.bias_correction2), quick};
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
    store_zeros<kVector>(tile.at(static_cast<Gradient*>(item.gradient), item.gradient_pitch, k), tile.inside(k));
  }
}

// Four elements of a parameter in registers.
struct QuadUpdate {
  float weight[kQuad], gradient[kQuad], moment1[kQuad], moment2[kQuad];

  __device__ __forceinline__ void update(const TileFactors& f) {
    bool quick = f.quick;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const AdamWElement next = adamw_moments({weight[e], moment1[e], moment2[e]}, gradient[e], f.rule);
      weight[e] = next.weight;
      moment1[e] = next.moment1;
      moment2[e] = next.moment2;
      quick = quick && within(next.moment1, 0x1p-90f, 0x1p20f) && within(next.moment2, 0x1p-100f, 0x1p20f);
    }
    float direction[kQuad];
    if (quick) {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) direction[e] = direction_quickly(moment1[e], moment2[e], f);
    } else {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) direction[e] = adamw_direction(moment1[e], moment2[e], f.rule);
    }
#pragma unroll
    for (int e = 0; e < kQuad; ++e) weight[e] = fmaf(-f.rule.learning_rate, direction[e], weight[e]);
  }
};

template <bool kVector, class Gradient, class Moment>
__device__ __forceinline__ void update_tile(const UpdateTile& tile, const UpdateItem& item, const UpdateStep& step) {
  const TileFactors factors = tile_factors_of(step, item.decay != 0);
  const std::uint32_t count = step.scalars->step;
  const auto parameter = static_cast<std::uint32_t>(item.parameter);
  const bool zero_gradient = item.zero_gradient != 0;
  float* master = tile.at(item.master, item.master_pitch);
  auto* gradient = tile.at(static_cast<Gradient*>(item.gradient), item.gradient_pitch);
  auto* moment1 = tile.at(static_cast<Moment*>(item.moment1), item.moment1_pitch);
  auto* moment2 = tile.at(static_cast<Moment*>(item.moment2), item.moment2_pitch);
  // From quad to quad; update_item sees that they fit 32 bits.
  const auto master_step = static_cast<int>(tile.stride * item.master_pitch);
  const auto gradient_step = static_cast<int>(tile.stride * item.gradient_pitch);
  const auto step1 = static_cast<int>(tile.stride * item.moment1_pitch);
  const auto step2 = static_cast<int>(tile.stride * item.moment2_pitch);
  auto element = static_cast<std::uint64_t>(std::int64_t{tile.row} * item.grid.cols + tile.col);
  const auto element_step = static_cast<std::uint32_t>(tile.stride * item.grid.cols);
#pragma unroll 1
  for (int k = 0; k < UpdateTile::kQuads; ++k) {
    const int inside = tile.inside(k);
    QuadUpdate quad;
    load_quad<kVector>(master, inside, quad.weight);
    load_quad<kVector>(gradient, inside, quad.gradient);
    load_quad<kVector>(moment1, inside, quad.moment1);
    load_quad<kVector>(moment2, inside, quad.moment2);
    quad.update(factors);
    RandomWords words{};
    if constexpr (sizeof(Moment) == 2) words = rounding_words<kVector>(step.seed, count, parameter, element);
    store_quad<kVector>(master, inside, quad.weight);
    store_moments<kVector>(moment1, inside, quad.moment1, words, 0);
    store_moments<kVector>(moment2, inside, quad.moment2, words, 16);
    if (zero_gradient) store_zeros<kVector>(gradient, inside);
    master += master_step;
    gradient += gradient_step;
    moment1 += step1;
    moment2 += step2;
    element += element_step;
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
  const TileGrid grid = tile_grid(item.master.shape);
  for (const Tensor& t : {item.master, item.gradient, item.moment1, item.moment2}) {
    QE_EXPECTS((kThreads >> grid.quads_log2) * t.row_pitch <= std::numeric_limits<std::int32_t>::max(),
               "the rows of a parameter lie close enough to step through them in 32 bits");
  }
  return {.grid = grid,
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

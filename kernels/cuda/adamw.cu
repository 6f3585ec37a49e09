// AdamW of every parameter in one launch. Owns no rule: that is core/adamw_rule.h, shared with the other backends. The
// quotient that moves a weight has a second form here, with the same bits, for the numbers that training meets.
//
// Bound by memory: an element's bytes read and written are 28 with FP32 moments and gradient, 20 with BF16 moments, 2
// less where the gradient is BF16, as many more as the gradient has where it is cleared; a copy adds its own. Where
// rows are counted, an element of an untouched one costs nothing for its gradient.
#include <cuda_pipeline.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/adamw_rule.h"
#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/parameter_tiles.cuh"
#include "kernels/cuda/weight_copy.cuh"

namespace qe::cuda {
namespace {

constexpr int kThreads = 256;
using UpdateTile = ConsecutiveTile<kThreads>;

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
  const float* touched;  // by row; null: every row has a gradient
  CopyTarget copy;
};
struct UpdateStep {
  const OptimizerScalars* scalars;
  float beta1, beta2, epsilon, weight_decay;
  std::uint64_t seed;
};

// Factors of a step and whether they allow the quick form.
struct TileFactors {
  AdamWFactors rule;
  bool quick;
};

__device__ __forceinline__ TileFactors tile_factors_of(const UpdateStep& step, bool decay) {
  const OptimizerScalars& s = *step.scalars;
  return {.rule = {.clip = s.clip,
                   .beta1 = step.beta1,
                   .one_minus_beta1 = 1.0f - step.beta1,
                   .beta2 = step.beta2,
                   .one_minus_beta2 = 1.0f - step.beta2,
                   .step_size = s.step_size,
                   .root_scale = s.root_scale,
                   .decay_step = decay ? s.learning_rate * step.weight_decay : 0.0f,
                   .epsilon = step.epsilon},
          .quick = s.root_scale >= 1.0f && s.root_scale <= 0x1p10f && step.epsilon >= 0.0f && step.epsilon <= 0x1p10f};
}

// The quick form does what the compiler's division and square root do, less their care for numbers near the ends of the
// exponent range. With 2^-90 <= |m| <= 2^20 and 2^-100 <= v <= 2^20 and the factors as above, every quotient lies
// within 2^-111 and 2^70 and every remainder is exact. Comparisons that a NaN fails.
__device__ __forceinline__ bool allows_quick(float moment1, float moment2) {
  return fabsf(moment1) >= 0x1p-90f && fabsf(moment1) <= 0x1p20f && moment2 >= 0x1p-100f && moment2 <= 0x1p20f;
}
__device__ __forceinline__ float inverse_of(float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return fmaf(y, fmaf(-b, y, 1.0f), y);
}
__device__ __forceinline__ float divide_quickly(float a, float b) {
  const float inverse = inverse_of(b);
  const float q = a * inverse;
  return fmaf(inverse, fmaf(-b, q, a), q);
}
__device__ __forceinline__ float root_quickly(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  const float root = x * y;
  return fmaf(fmaf(-root, root, x), 0.5f * y, root);
}

// Four elements of a parameter in registers.
struct QuadUpdate {
  float weight[kQuad], gradient[kQuad], moment1[kQuad], moment2[kQuad];

  // True: the moments are finite.
  __device__ __forceinline__ bool update(const TileFactors& f) {
    bool quick = f.quick;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const AdamWElement next = adamw_moments({weight[e], moment1[e], moment2[e]}, gradient[e], f.rule);
      weight[e] = next.weight;
      moment1[e] = next.moment1;
      moment2[e] = next.moment2;
      quick = quick && allows_quick(next.moment1, next.moment2);
    }
    if (quick) {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        const float root = fmaf(root_quickly(moment2[e]), f.rule.root_scale, f.rule.epsilon);
        weight[e] = fmaf(-f.rule.step_size, divide_quickly(moment1[e], root), weight[e]);
      }
    } else if (!at_rest(f.rule.epsilon)) {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        weight[e] = fmaf(-f.rule.step_size, adamw_direction(moment1[e], moment2[e], f.rule), weight[e]);
      }
    }
    return quick;
  }

  // Rows that no token ever named: 0 / ε moves nothing.
  [[nodiscard]] __device__ __forceinline__ bool at_rest(float epsilon) const {
    std::uint32_t any = 0;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) any |= __float_as_uint(moment1[e]) | __float_as_uint(moment2[e]);
    return any == 0 && epsilon > 0.0f;
  }
};

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

// The moments of four elements into their storage. finite: as stochastic_round_bf16 does, without its question.
template <bool kVector>
__device__ __forceinline__ void store_moments(float* to, int inside, const float (&v)[kQuad], const RandomWords&, int,
                                              bool) {
  store_quad<kVector>(to, inside, v);
}
template <bool kVector>
__device__ __forceinline__ void store_moments(Bf16* to, int inside, const float (&v)[kQuad], const RandomWords& words,
                                              int shift, bool finite) {
  Bf16 rounded[kQuad];
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const std::uint32_t bits = (words.w[e] >> shift) & 0xffffu;
    rounded[e] = finite ? Bf16{static_cast<std::uint16_t>((__float_as_uint(v[e]) + bits) >> 16)}
                        : stochastic_round_bf16(v[e], bits);
  }
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
  const std::uint32_t touched = touched_rows(tile, item.touched);
  for (int k = 0; k < UpdateTile::kQuads; ++k) {
    if ((touched >> k & 1u) == 0) continue;
    store_zeros<kVector>(tile.at(static_cast<Gradient*>(item.gradient), item.gradient_pitch, k), tile.inside(k));
  }
}

// Where the arrays of a parameter are. kVector: without gaps between their rows, so that one index serves them all.
template <bool kVector, class Gradient, class Moment>
struct Arrays {
  float* master;
  Gradient* gradient;
  Moment *moment1, *moment2;
  const UpdateItem& item;
  const UpdateTile& tile;

  __device__ __forceinline__ Arrays(const UpdateItem& i, const UpdateTile& t)
      : master(i.master),
        gradient(static_cast<Gradient*>(i.gradient)),
        moment1(static_cast<Moment*>(i.moment1)),
        moment2(static_cast<Moment*>(i.moment2)),
        item(i),
        tile(t) {}

  // Quad k, whose first element is number `element` of the parameter.
  template <class T>
  [[nodiscard]] __device__ __forceinline__ T* at(T* data, std::int64_t pitch, int k, std::uint64_t element) const {
    if constexpr (kVector) return data + static_cast<std::uint32_t>(element);
    return tile.at(data, pitch, k);
  }
  [[nodiscard]] __device__ __forceinline__ float* master_at(int k, std::uint64_t element) const {
    return at(master, item.master_pitch, k, element);
  }
  [[nodiscard]] __device__ __forceinline__ Gradient* gradient_at(int k, std::uint64_t element) const {
    return at(gradient, item.gradient_pitch, k, element);
  }
  [[nodiscard]] __device__ __forceinline__ Moment* moment1_at(int k, std::uint64_t element) const {
    return at(moment1, item.moment1_pitch, k, element);
  }
  [[nodiscard]] __device__ __forceinline__ Moment* moment2_at(int k, std::uint64_t element) const {
    return at(moment2, item.moment2_pitch, k, element);
  }
};

// A thread's quads on their way from memory into its own places in shared memory, kAhead of them before they are
// needed. Nobody else reads those places, so no barrier: more bytes are in flight than registers could hold.
constexpr int kAhead = 3;
struct IncomingMemory {
  float4 values[4][kAhead][kThreads];  // master, gradient, both moments
};

template <class Gradient, class Moment>
class Incoming {
 public:
  using From = Arrays<true, Gradient, Moment>;

  __device__ __forceinline__ Incoming(const From& from, std::uint64_t element, std::uint32_t touched,
                                      IncomingMemory& memory)
      : from_(from), touched_(touched), memory_(memory) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) start(k, element + static_cast<std::uint32_t>(k * from.tile.cols));
  }

  // Quads in order, each once.
  __device__ __forceinline__ void take(int k, std::uint64_t element, QuadUpdate& quad) const {
    __pipeline_wait_prior(kAhead - 1);
    const int stage = k % kAhead;
    load_quad<true>(place<float>(0, stage), kQuad, quad.weight);
    load_quad<true>(place<Gradient>(1, stage), kQuad, quad.gradient);
    load_quad<true>(place<Moment>(2, stage), kQuad, quad.moment1);
    load_quad<true>(place<Moment>(3, stage), kQuad, quad.moment2);
    start(k + kAhead, element + static_cast<std::uint32_t>(kAhead * from_.tile.cols));
  }

 private:
  template <class T>
  [[nodiscard]] __device__ __forceinline__ T* place(int what, int stage) const {
    return reinterpret_cast<T*>(memory_.values[what][stage]) + threadIdx.x * kQuad;
  }
  template <class T>
  __device__ __forceinline__ void copy(int what, int stage, const T* from, bool wanted) const {
    constexpr std::size_t kBytes = kQuad * sizeof(T);
    __pipeline_memcpy_async(place<T>(what, stage), from, kBytes, wanted ? 0 : kBytes);
  }
  __device__ __forceinline__ void start(int k, std::uint64_t element) const {
    if (k < UpdateTile::kQuads) {
      const int stage = k % kAhead;
      const bool inside = from_.tile.inside(k) > 0;
      copy(0, stage, from_.master_at(k, element), inside);
      copy(1, stage, from_.gradient_at(k, element), inside && (touched_ >> k & 1u) != 0);
      copy(2, stage, from_.moment1_at(k, element), inside);
      copy(3, stage, from_.moment2_at(k, element), inside);
    }
    __pipeline_commit();
  }

  const From& from_;
  std::uint32_t touched_;
  IncomingMemory& memory_;
};

// The same where quads cannot be read in one access each.
template <class Gradient, class Moment>
class IncomingSplit {
 public:
  using From = Arrays<false, Gradient, Moment>;

  __device__ __forceinline__ IncomingSplit(const From& from, std::uint64_t, std::uint32_t touched, IncomingMemory&)
      : from_(from), touched_(touched) {}

  __device__ __forceinline__ void take(int k, std::uint64_t element, QuadUpdate& quad) const {
    const int inside = from_.tile.inside(k);
    load_quad<false>(from_.master_at(k, element), inside, quad.weight);
    load_quad<false>(from_.gradient_at(k, element), (touched_ >> k & 1u) != 0 ? inside : 0, quad.gradient);
    load_quad<false>(from_.moment1_at(k, element), inside, quad.moment1);
    load_quad<false>(from_.moment2_at(k, element), inside, quad.moment2);
  }

 private:
  const From& from_;
  std::uint32_t touched_;
};

template <bool kVector, class Gradient, class Moment, class Copy>
__device__ __forceinline__ void update_tile(const UpdateTile& tile, const UpdateItem& item, const UpdateStep& step,
                                            IncomingMemory& memory, Copy copy) {
  const TileFactors factors = tile_factors_of(step, item.decay != 0);
  const std::uint32_t count = step.scalars->step;
  const auto parameter = static_cast<std::uint32_t>(item.parameter);
  const bool zero_gradient = item.zero_gradient != 0;
  const Arrays<kVector, Gradient, Moment> arrays(item, tile);
  auto element = static_cast<std::uint64_t>(std::int64_t{tile.row} * tile.cols + tile.col);
  const std::uint32_t touched = touched_rows(tile, item.touched);
  const std::conditional_t<kVector, Incoming<Gradient, Moment>, IncomingSplit<Gradient, Moment>> incoming(
      arrays, element, touched, memory);
#pragma unroll 1
  for (int k = 0; k < UpdateTile::kQuads; ++k) {
    const int inside = tile.inside(k);
    QuadUpdate quad;
    incoming.take(k, element, quad);
    const bool finite = quad.update(factors);
    RandomWords words{};
    if constexpr (sizeof(Moment) == 2) words = rounding_words<kVector>(step.seed, count, parameter, element);
    store_quad<kVector>(arrays.master_at(k, element), inside, quad.weight);
    store_moments<kVector>(arrays.moment1_at(k, element), inside, quad.moment1, words, 0, finite);
    store_moments<kVector>(arrays.moment2_at(k, element), inside, quad.moment2, words, 16, finite);
    copy.put(k, quad.weight);
    if (zero_gradient && (touched >> k & 1u) != 0) store_zeros<kVector>(arrays.gradient_at(k, element), inside);
    element += static_cast<std::uint32_t>(tile.cols);
  }
  copy.finish();
}

struct BlockMemory {
  IncomingMemory incoming;
  CopyMemory<kThreads> copy;
};

template <bool kVector, class Gradient, class Moment>
__device__ __forceinline__ void update_and_copy(const UpdateTile& tile, const UpdateItem& item, const UpdateStep& step,
                                                BlockMemory& memory, bool first) {
  switch (item.copy.kind) {
    case CopyKind::kNone:
      return update_tile<kVector, Gradient, Moment>(tile, item, step, memory.incoming, NoCopy{});
    case CopyKind::kF32:
    case CopyKind::kBF16:
      return update_tile<kVector, Gradient, Moment>(tile, item, step, memory.incoming,
                                                    WideCopy<kThreads, kVector>(item.copy, tile));
    case CopyKind::kE4M3:
    case CopyKind::kE5M2:
      return update_tile<kVector, Gradient, Moment>(tile, item, step, memory.incoming,
                                                    CodesCopy<kThreads, kVector>(item.copy, tile, memory.copy, first));
  }
}

template <bool kVector, class Gradient>
__device__ __forceinline__ void step_tile(const UpdateTile& tile, const UpdateItem& item, const UpdateStep& step,
                                          BlockMemory& memory, bool first) {
  if (step.scalars->skip != 0) {
    clear_gradient<kVector, Gradient>(tile, item);
  } else if (item.bf16_moments != 0) {
    update_and_copy<kVector, Gradient, Bf16>(tile, item, step, memory, first);
  } else {
    update_and_copy<kVector, Gradient, float>(tile, item, step, memory, first);
  }
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads, 2) update_tiles(ItemTable<UpdateItem> table, UpdateStep step) {
  const int block = static_cast<int>(blockIdx.x);
  const int i = item_of_tile(table, block);
  const UpdateItem& item = table.items[i];
  if (step.scalars->skip != 0 && item.zero_gradient == 0) return;
  __shared__ BlockMemory memory;
  const int number = block - table.first_tile[i];
  const UpdateTile tile(item.grid, number);
  if (item.bf16_gradient != 0) {
    step_tile<kVector, Bf16>(tile, item, step, memory, number == 0);
  } else {
    step_tile<kVector, float>(tile, item, step, memory, number == 0);
  }
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
          .zero_gradient = item.zero_gradient,
          .touched = item.touched.as<const float>(),
          .copy = copy_target(item.copy, item.quantizer, item.master.shape)};
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
    bool vector = allows_quads(item.copy) && item.master.shape.elements() <= std::numeric_limits<std::uint32_t>::max();
    for (const Tensor& t : {item.master, item.gradient, item.moment1, item.moment2}) {
      vector = vector && allows_quads(t) && t.contiguous();
    }
    (vector ? whole : split).push_back(update_item(item));
  }
  const UpdateStep step = {a.scalars, a.beta1, a.beta2, a.epsilon, a.weight_decay, a.seed};
  update_items<true>(launch, whole, step);
  update_items<false>(launch, split, step);
  // After all tiles have looked: a row's count is read by the tiles beside each other.
  for (const AdamWItem& item : a.items) {
    if (item.zero_gradient && !item.touched.empty()) {
      QE_CUDA_CHECK(cudaMemsetAsync(item.touched.data, 0, item.touched.bytes(), launch.stream));
    }
  }
}

}  // namespace qe::cuda

// The optimizer's launches on the CPU: sums of squares and finiteness, the clip factor, AdamW.
// Owns no arithmetic of the update itself: that is core/adamw_rule.h, shared with the other backends.
//
// Tree of a parameter's Σ g²: each row is cut into chunks of kChunk columns; within a chunk, lane j of kLanes adds
// columns j, j + kLanes, … with fma, then sum_lanes; chunk sums are added pairwise in row-major order (PairwiseSum). It
// depends on the parameter's shape alone, never on its pitch, its stage or its microbatch views.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/adamw_rule.h"
#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"

namespace qe::cpu {
namespace {

constexpr std::int64_t kChunk = 1024;
constexpr std::int64_t kBlock = 256;  // elements that AdamW holds in FP32 at a time; a multiple of 4

QE_CPU_CLONES void load_bf16(const Bf16* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
QE_CPU_CLONES void add_bf16(const Bf16* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += to_float(from[i]);
}
QE_CPU_CLONES void add_f32(const float* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// sum = view's n elements from `at`, or sum += them.
void add_view(const Tensor& view, std::int64_t at, bool first, float* sum, std::int64_t n) {
  if (view.dtype == DType::kF32) {
    const float* from = view.as<float>() + at;
    first ? static_cast<void>(std::copy_n(from, n, sum)) : add_f32(from, sum, n);
  } else {
    const Bf16* from = view.as<Bf16>() + at;
    first ? load_bf16(from, sum, n) : add_bf16(from, sum, n);
  }
}

// Adds in a fixed binary tree whose shape is the count's binary digits: two sums of equal size become one.
class PairwiseSum {
 public:
  void add(float value) {
    for (std::uint64_t n = count_++; n & 1u; n >>= 1) value = level_[--depth_] + value;
    level_[depth_++] = value;
  }
  [[nodiscard]] float total() const {
    float sum = 0.0f;
    for (int i = depth_; i-- > 0;) sum += level_[i];
    return sum;
  }

 private:
  std::array<float, 64> level_{};
  int depth_ = 0;
  std::uint64_t count_ = 0;
};

struct ChunkResult {
  float squares;
  bool bad;
};
QE_CPU_CLONES ChunkResult chunk_squares(const float* g, std::int64_t n) {
  float lane[kLanes] = {};
  std::uint32_t bad[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(g[i + j]) & 0x7fffffffu;
      lane[j] = std::fma(g[i + j], g[i + j], lane[j]);
      bad[j] |= static_cast<std::uint32_t>(magnitude >= 0x7f800000u);
    }
  }
  for (int j = 0; i + j < n; ++j) {
    lane[j] = std::fma(g[i + j], g[i + j], lane[j]);
    bad[j] |= static_cast<std::uint32_t>(!std::isfinite(g[i + j]));
  }
  std::uint32_t any = 0;
  for (const std::uint32_t b : bad) any |= b;
  return {sum_lanes(lane), any != 0};
}

bool has_gradient(const Tensor& touched, std::int64_t row) {
  return touched.empty() || touched.as<float>()[row] != 0.0f;
}

// The chunk's gradient in FP32. With microbatch views their sum, in index order, is stored in the main gradient first.
const float* gather_chunk(const GradientItem& item, std::int64_t row, std::int64_t col, std::int64_t n,
                          float* scratch) {
  const std::int64_t at = row * item.gradient.row_pitch + col;
  if (item.microbatch.empty()) {
    if (item.gradient.dtype == DType::kF32) return item.gradient.as<float>() + at;
    load_bf16(item.gradient.as<Bf16>() + at, scratch, n);
    return scratch;
  }
  float* sum = item.gradient.as<float>() + at;
  bool first = true;
  for (const Tensor& view : item.microbatch) {
    add_view(view, row * view.row_pitch + col, first, sum, n);
    first = false;
  }
  return sum;
}

void require_norm_types(const GradientItem& item) {
  const DType type = item.gradient.dtype;
  QE_EXPECTS(type == DType::kF32 || (type == DType::kBF16 && item.microbatch.empty()),
             "gradient_norm takes an FP32 or BF16 main gradient, FP32 where microbatch views are summed into it");
  for (const Tensor& view : item.microbatch) {
    QE_EXPECTS((view.dtype == DType::kBF16 || view.dtype == DType::kF32) && view.shape == item.gradient.shape,
               "gradient_norm sums BF16 or FP32 microbatch views of the main gradient's shape");
  }
}

// One row's worth of moments and gradient as FP32: the tensor's own memory where it is FP32, else a copy in `scratch`.
float* block_of(const Tensor& t, std::int64_t at, std::int64_t n, float* scratch) {
  if (t.dtype == DType::kF32) return t.as<float>() + at;
  load_bf16(t.as<Bf16>() + at, scratch, n);
  return scratch;
}

QE_CPU_CLONES void adamw_block(float* weight, float* moment1, float* moment2, const float* gradient, std::int64_t n,
                               const AdamWFactors& factors) {
  const AdamWFactors f = factors;
  for (std::int64_t i = 0; i < n; ++i) {
    const AdamWElement e = adamw_element({weight[i], moment1[i], moment2[i]}, gradient[i], f);
    weight[i] = e.weight;
    moment1[i] = e.moment1;
    moment2[i] = e.moment2;
  }
}

// words[i] = the rounding word of element first + i.
QE_CPU_CLONES void fill_rounding_words(std::uint64_t seed, std::uint32_t step, std::uint32_t parameter,
                                       std::uint64_t first, std::int64_t n, std::uint32_t* words) {
  const std::uint64_t skip = first % 4;
  std::uint32_t all[kBlock + 8];
  const std::int64_t groups = (static_cast<std::int64_t>(skip) + n + 3) / 4;
  for (std::int64_t g = 0; g < groups; ++g) {
    const RandomWords r = moment_rounding_words(seed, step, parameter, first / 4 + static_cast<std::uint64_t>(g));
    for (int j = 0; j < 4; ++j) all[4 * g + j] = r.w[j];
  }
  std::memcpy(words, all + skip, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
}
QE_CPU_CLONES void store_rounded(const float* from, const std::uint32_t* words, int shift, Bf16* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = stochastic_round_bf16(from[i], words[i] >> shift);
}

AdamWFactors factors_of(const AdamWArgs& a, bool decay) {
  const OptimizerScalars& s = *a.scalars;
  return {.clip = s.clip,
          .beta1 = a.beta1,
          .one_minus_beta1 = 1.0f - a.beta1,
          .beta2 = a.beta2,
          .one_minus_beta2 = 1.0f - a.beta2,
          .step_size = s.step_size,
          .root_scale = s.root_scale,
          .decay_step = decay ? s.learning_rate * a.weight_decay : 0.0f,
          .epsilon = a.epsilon};
}

void update_item(const AdamWArgs& a, const AdamWItem& item) {
  QE_EXPECTS(item.master.dtype == DType::kF32 && item.moment1.dtype == item.moment2.dtype,
             "adamw takes an FP32 master and two moments of one type");
  const AdamWFactors factors = factors_of(a, item.decay);
  const bool rounded = item.moment1.dtype == DType::kBF16;
  float g[kBlock], m[kBlock], v[kBlock];
  std::uint32_t words[kBlock];
  const Shape shape = item.master.shape;
  const float zeros[kBlock] = {};
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    const bool touched = has_gradient(item.touched, row);
    for (std::int64_t col = 0; col < shape.cols; col += kBlock) {
      const std::int64_t n = std::min(kBlock, shape.cols - col);
      const std::int64_t at1 = row * item.moment1.row_pitch + col;
      const std::int64_t at2 = row * item.moment2.row_pitch + col;
      const float* gradient = touched ? block_of(item.gradient, row * item.gradient.row_pitch + col, n, g) : zeros;
      float* moment1 = block_of(item.moment1, at1, n, m);
      float* moment2 = block_of(item.moment2, at2, n, v);
      adamw_block(item.master.as<float>() + row * item.master.row_pitch + col, moment1, moment2, gradient, n, factors);
      if (!rounded) continue;
      fill_rounding_words(a.seed, a.scalars->step, static_cast<std::uint32_t>(item.global_index),
                          static_cast<std::uint64_t>(row * shape.cols + col), n, words);
      store_rounded(m, words, 0, item.moment1.as<Bf16>() + at1, n);
      store_rounded(v, words, 16, item.moment2.as<Bf16>() + at2, n);
    }
  }
}

void clear(const Tensor& t, const Tensor& touched) {
  const std::size_t row_bytes = static_cast<std::size_t>(t.shape.cols) * size_of(t.dtype);
  for (std::int64_t row = 0; row < t.shape.rows; ++row) {
    if (has_gradient(touched, row)) std::memset(t.rows(row, 1).data, 0, row_bytes);
  }
  if (!touched.empty()) std::memset(touched.data, 0, touched.bytes());
}

}  // namespace

void gradient_norm(const GradientNormArgs& a) {
  for (const GradientItem& item : a.items) {
    require_norm_types(item);
    PairwiseSum squares;
    bool bad = false;
    float scratch[kChunk];
    const Shape shape = item.gradient.shape;
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const bool touched = has_gradient(item.touched, row);
      for (std::int64_t col = 0; col < shape.cols; col += kChunk) {
        if (!touched) {  // the same tree, with nothing in it
          squares.add(0.0f);
          continue;
        }
        const std::int64_t n = std::min(kChunk, shape.cols - col);
        const ChunkResult chunk = chunk_squares(gather_chunk(item, row, col, n, scratch), n);
        squares.add(chunk.squares);
        bad = bad || chunk.bad;
      }
    }
    a.partial_squares[item.global_index] = squares.total();
    a.partial_bad[item.global_index] = bad ? 1.0f : 0.0f;
  }
}

// clip = min(1, max_norm / (norm + 1e-6)), the rule of PyTorch's clip_grad_norm_; max_norm 0 leaves 1. A parameter is
// bad when an element is not finite or when its Σ g² overflowed; then clip is 0, so that nothing that ignores `skip`
// moves.
void clip_factor(const ClipArgs& a) {
  OptimizerScalars& s = *a.scalars;
  double sum = 0.0;
  s.first_bad = -1;
  for (std::int64_t i = 0; i < a.count; ++i) {
    sum += static_cast<double>(a.partial_squares[i]);
    const bool bad = a.partial_bad[i] != 0.0f || !std::isfinite(a.partial_squares[i]);
    if (bad && s.first_bad < 0) s.first_bad = static_cast<std::int32_t>(i);
  }
  s.norm = static_cast<float>(std::sqrt(sum));
  s.skip = s.first_bad >= 0 ? 1 : 0;
  s.clip = a.max_norm > 0.0f ? std::min(1.0f, a.max_norm / (s.norm + 1e-6f)) : 1.0f;
  if (s.skip) s.clip = 0.0f;
}

void adamw(const AdamWArgs& a) {
  for (const AdamWItem& item : a.items) {
    if (!a.scalars->skip) {
      update_item(a, item);
      if (!item.copy.rowwise.empty()) quantize_weight({item.master, item.copy, item.quantizer});
    }
    if (item.zero_gradient) clear(item.gradient, item.touched);
  }
}

}  // namespace qe::cpu

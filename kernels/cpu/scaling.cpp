// Scales of FP8 tensors: the delayed update of a chain's slots and the dynamic scale of one tensor.
// The rule of a slot is core/fp8/scale_rule.h, shared with the other backends.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/fp8/scale_rule.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/operand_writer.h"

namespace qe::cpu {
namespace {

QE_CPU_CLONES float amax_of(const Tensor& x, bool round, float* values) {
  float amax = 0.0f;
  for (std::int64_t row = 0; row < x.shape.rows; ++row) {
    load_row(x, row, values);
    if (round) {
      for (std::int64_t c = 0; c < x.shape.cols; ++c) values[c] = round_bf16(values[c]);
    }
    amax = amax_of_row(values, x.shape.cols, amax);
  }
  return amax;
}

}  // namespace

void update_scales(const UpdateScalesArgs& a) {
  for (int slot = 0; slot < a.slots; ++slot) {
    float* history = a.history + static_cast<std::ptrdiff_t>(slot) * a.history_length;
    a.scale[slot] = update_slot(history, a.history_length, a.scale[slot], a.format, a.margin, a.algorithm);
  }
  if (a.token != nullptr) ++*a.token;
}

// A tensor of zeros gets qmax / 1e-12; one with an Inf gets 0, whose scale_inv of Inf carries it into the loss.
void dynamic_scale(const DynamicScaleArgs& a) {
  QE_EXPECTS(is_fp8(a.format) && (a.x.dtype == DType::kF32 || a.x.dtype == DType::kBF16),
             "dynamic_scale takes an FP32 or BF16 matrix and an FP8 format");
  std::vector<float> values(static_cast<std::size_t>(a.x.shape.cols));
  const float amax = amax_of(a.x, a.round_to_bf16, values.data());
  *a.scale = fp8_max(a.format) / std::max(amax, 1e-12f);
}

}  // namespace qe::cpu

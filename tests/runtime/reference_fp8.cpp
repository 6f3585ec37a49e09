#include "tests/runtime/reference_fp8.h"

#include <algorithm>
#include <cfloat>

namespace qe::testing {

ReferenceFormat::ReferenceFormat(int exponent_bits, int mantissa_bits, double max) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int steps = 1 << mantissa_bits;
  for (int code = 0; code < 128; ++code) {
    const int exponent = code / steps;
    const double fraction = static_cast<double>(code % steps) / steps;
    const double value = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
    if (value <= max) magnitudes_.push_back(value);
  }
}

const ReferenceFormat& ReferenceFormat::e4m3() {
  static const ReferenceFormat format(4, 3, 448.0);
  return format;
}
const ReferenceFormat& ReferenceFormat::e5m2() {
  static const ReferenceFormat format(5, 2, 57344.0);
  return format;
}

double ReferenceFormat::nearest(float v) const {
  const double magnitude = std::fabs(static_cast<double>(v));
  const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
  if (above == magnitudes_.end()) return std::copysign(max(), v);
  if (above == magnitudes_.begin()) return std::copysign(*above, v);
  const auto below = above - 1;
  const double up = *above - magnitude, down = magnitude - *below;
  const bool below_is_even = (below - magnitudes_.begin()) % 2 == 0;
  return std::copysign(down < up || (down == up && below_is_even) ? *below : *above, v);
}

ReferenceOperand reference_quantize(const Matrix& x, float scale, const ReferenceFormat& format) {
  ReferenceOperand out{x, static_cast<double>(1.0f / scale)};
  for (double& v : out.values.values()) v = format.nearest(static_cast<float>(v) * scale);
  return out;
}

float reference_amax(const Matrix& x) {
  float amax = 0.0f;
  for (const double v : x.values()) amax = std::max(amax, std::fabs(static_cast<float>(v)));
  return amax;
}

float reference_dynamic_scale(const Matrix& x, const ReferenceFormat& format) {
  return static_cast<float>(format.max()) / std::max(reference_amax(x), 1e-12f);
}

void reference_update(ReferenceSlot& slot, const ReferenceFormat& format, const Fp8Recipe& recipe) {
  std::vector<float>& h = slot.history;
  const float newest = h[0];
  if (newest == 0.0f) return;
  float m = newest;
  if (recipe.amax_compute_algo == AmaxAlgorithm::kMax) m = *std::max_element(h.begin(), h.end());
  if (h.size() > 1) {
    h.erase(h.begin() + 1);
    h.push_back(newest);
  }
  h[0] = 0.0f;
  if (!std::isfinite(m) || m <= 0.0f) return;
  const float numerator = static_cast<float>(std::ldexp(format.max(), -recipe.margin));
  slot.scale = std::min(numerator / m, FLT_MAX);
}

}  // namespace qe::testing

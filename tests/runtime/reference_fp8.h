// FP8 formats and delayed scaling as plain definitions (semantics.md section 1), for the reference step. Written
// without the product's codec and scale rule, so that the two can be held against each other.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/stage/layer_config.h"
#include "tests/runtime/reference_matrix.h"

namespace qe::testing {

// The finite values of a format, from its exponent and mantissa widths.
class ReferenceFormat {
 public:
  static const ReferenceFormat& e4m3();
  static const ReferenceFormat& e5m2();
  [[nodiscard]] double max() const { return magnitudes_.back(); }
  // The finite value nearest to v; of two equally near the one whose code is even. Saturates.
  [[nodiscard]] double nearest(float v) const;

 private:
  ReferenceFormat(int exponent_bits, int mantissa_bits, double max);
  std::vector<double> magnitudes_;  // by code 0, 1, …: ascending
};

// Values that FP8 holds, and the factor that brings them back. A plain operand has factor 1.
struct ReferenceOperand {
  Matrix values;
  double scale_inv = 1.0;
};

// Values · scale in FP32, rounded into the format.
ReferenceOperand reference_quantize(const Matrix&, float scale, const ReferenceFormat&);
float reference_amax(const Matrix&);  // of the FP32 values
float reference_dynamic_scale(const Matrix&, const ReferenceFormat&);

struct ReferenceSlot {
  std::vector<float> history;  // element 0: the amax since the last update; the last is the newest
  float scale = 1.0f;
};
using ReferenceSlots = std::map<std::string, ReferenceSlot>;  // "layers.0.qkv.in"

void reference_update(ReferenceSlot&, const ReferenceFormat&, const Fp8Recipe&);

}  // namespace qe::testing

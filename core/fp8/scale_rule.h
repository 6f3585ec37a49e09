// Delayed scaling's update of one slot, shared by every backend: exact by definition (semantics.md 1.1).
//
// `current` is the amax gathered since the last update (history[0]), m the one the scale is made from:
//   current 0          → nothing changes, history included: idle chunks and cached weights keep their state
//   NaN current        → rolls in; m ignores NaN entries
//   m finite and > 0   → scale = qmax · 2^-margin / m, FLT_MAX where that overflows
//   m 0, Inf or NaN    → scale unchanged
// History rolls by one towards index 1, the newest entry is the last; history[0] is set to zero.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/dtype.h"
#include "core/fp8/codec.h"
#include "core/ops_args.h"

namespace qe {

QE_HD inline float scale_from_amax(float amax, float scale, DType format, int margin) noexcept {
  if (!(amax > 0.0f) || std::isinf(amax)) return scale;
  const float s = std::ldexp(fp8_max(format), -margin) / amax;
  return std::isinf(s) ? FLT_MAX : s;
}

// history [length] of one slot. Returns the new scale.
QE_HD inline float update_slot(float* history, int length, float scale, DType format, int margin,
                               AmaxAlgorithm algorithm) noexcept {
  const float current = history[0];
  if (current == 0.0f) return scale;
  float m = current;
  if (algorithm == AmaxAlgorithm::kMax) {
    m = current > 0.0f ? current : 0.0f;  // amaxes are never negative, so a NaN can count as 0
    for (int i = 1; i < length; ++i) m = history[i] > m ? history[i] : m;
  }
  for (int i = 1; i + 1 < length; ++i) history[i] = history[i + 1];
  if (length > 1) history[length - 1] = current;
  history[0] = 0.0f;
  return scale_from_amax(m, scale, format, margin);
}

}  // namespace qe

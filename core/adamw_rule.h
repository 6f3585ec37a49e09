// AdamW of one element and the stochastic rounding of BF16 moments, shared by every backend: exact by definition.
//
// With c the clip factor, η = lr / (1 − β₁^t) and r = 1 / √(1 − β₂^t), both rounded once from double by the host, every
// line at most one FP32 operation or one fma at a time, nothing reordered:
//   g' = g · c
//   m  = fma(β₁, m, (1 − β₁) · g')
//   v  = fma(β₂, v, ((1 − β₂) · g') · g')
//   w  = fma(−(lr · decay), w, w)                         matrices only
//   w  = fma(−η, m / fma(√v, r, ε), w)                    IEEE division and square root
// The weight uses m and v before they are rounded to their storage type. No product feeds a plain addition, so a
// compiler that contracts gives the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/random.h"

namespace qe {

// The factors of one optimizer step; decay_step is lr · decay, 0 for a parameter without decay.
struct AdamWFactors {
  float clip;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float step_size;   // η
  float root_scale;  // r
  float decay_step;
  float epsilon;
};

struct AdamWElement {
  float weight, moment1, moment2;
};

// The new moments, and the weight decayed but not yet moved.
QE_HD inline AdamWElement adamw_moments(AdamWElement e, float gradient, const AdamWFactors& f) noexcept {
  const float g = gradient * f.clip;
  e.moment1 = std::fma(f.beta1, e.moment1, f.one_minus_beta1 * g);
  e.moment2 = std::fma(f.beta2, e.moment2, (f.one_minus_beta2 * g) * g);
  e.weight = std::fma(-f.decay_step, e.weight, e.weight);
  return e;
}
// m / fma(√v, r, ε)
QE_HD inline float adamw_direction(float moment1, float moment2, const AdamWFactors& f) noexcept {
  return moment1 / std::fma(std::sqrt(moment2), f.root_scale, f.epsilon);
}
QE_HD inline AdamWElement adamw_element(AdamWElement e, float gradient, const AdamWFactors& f) noexcept {
  e = adamw_moments(e, gradient, f);
  e.weight = std::fma(-f.step_size, adamw_direction(e.moment1, e.moment2, f), e.weight);
  return e;
}

// Rounds down or up with the probability that keeps the mean; only the low 16 of `bits` count. A value that BF16 holds,
// Inf among them, comes back unchanged; NaN stays NaN; a finite value above the largest BF16 may become Inf.
QE_HD constexpr Bf16 stochastic_round_bf16(float v, std::uint32_t bits) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(v);
  if ((u & 0x7f800000u) == 0x7f800000u) return to_bf16(v);
  return {static_cast<std::uint16_t>((u + (bits & 0xffffu)) >> 16)};
}

// The random words of the four elements 4 · group … 4 · group + 3 of a parameter: element e takes word e mod 4, its
// first moment the low half, its second the high half. Elements count row · cols + col in the whole parameter,
// `parameter` is its global index and `step` counts skipped steps too, so the bits depend on neither the cut into
// stages nor the thread. Seven rounds are Philox's own proposal where ten cost too much.
QE_HD constexpr RandomWords moment_rounding_words(std::uint64_t seed, std::uint32_t step, std::uint32_t parameter,
                                                  std::uint64_t group) noexcept {
  return philox<7>(seed, (std::uint64_t{step} << 32) | parameter, group);
}
QE_HD constexpr std::uint32_t moment1_bits(std::uint32_t word) noexcept { return word & 0xffffu; }
QE_HD constexpr std::uint32_t moment2_bits(std::uint32_t word) noexcept { return word >> 16; }

}  // namespace qe

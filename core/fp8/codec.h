// FP8 encode and decode with integers only: exact by definition, the same on every backend.
//
// encode, by case (round to nearest even, saturating; CUDA's SATFINITE):
//   NaN             → 0x7F whatever its sign
//   |v| >= max, Inf → ±max (E4M3 448, E5M2 57344)
//   normal          → RNE of the mantissa; a carry moves into the exponent, past max it stays max
//   subnormal       → RNE on the grid of 2^-9 (E4M3), 2^-16 (E5M2); below half of it ±0
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace qe {

// 448 for E4M3, 57344 for E5M2.
QE_HD constexpr float fp8_max(DType t) noexcept { return t == DType::kE4M3 ? 448.0f : 57344.0f; }

namespace detail {
template <int kMantissa, int kBias, std::uint32_t kMaxBits, std::uint32_t kMaxCode>
QE_HD constexpr std::uint8_t encode(float v) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t sign = (bits >> 31) << 7;
  const std::uint32_t u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7f;
  if (u >= kMaxBits) return static_cast<std::uint8_t>(sign | kMaxCode);
  constexpr std::uint32_t kShift = 23 - kMantissa;
  constexpr std::uint32_t kMinNormalExponent = 127 - kBias + 1;
  const std::uint32_t exponent = u >> 23;
  if (exponent >= kMinNormalExponent) {
    const std::uint32_t rounded = u + ((1u << (kShift - 1)) - 1u) + ((u >> kShift) & 1u);
    const std::uint32_t code = (rounded >> kShift) - (static_cast<std::uint32_t>(127 - kBias) << kMantissa);
    return static_cast<std::uint8_t>(sign | (code < kMaxCode ? code : kMaxCode));
  }
  const std::uint32_t shift = kShift + kMinNormalExponent - exponent;
  if (shift > 24) return static_cast<std::uint8_t>(sign);
  const std::uint32_t full = (u & 0x7fffffu) | 0x800000u;
  return static_cast<std::uint8_t>(sign | ((full + ((1u << (shift - 1)) - 1u) + ((full >> shift) & 1u)) >> shift));
}

template <int kMantissa, int kBias>
QE_HD constexpr float decode(std::uint8_t code) noexcept {
  const std::uint32_t sign = std::uint32_t{static_cast<std::uint32_t>(code >> 7)} << 31;
  const std::uint32_t exponent = (code & 0x7fu) >> kMantissa;
  const std::uint32_t mantissa = code & ((1u << kMantissa) - 1u);
  if (exponent == 0) {  // mantissa · 2^(1 − bias − kMantissa), exact in FP32
    const float unit = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissa) << 23);
    const float v = static_cast<float>(mantissa) * unit;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(v) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 127 - kBias) << 23) | (mantissa << (23 - kMantissa)));
}
}  // namespace detail

QE_HD constexpr std::uint8_t encode_e4m3(float v) noexcept { return detail::encode<3, 7, 0x43e00000u, 0x7eu>(v); }
QE_HD constexpr std::uint8_t encode_e5m2(float v) noexcept { return detail::encode<2, 15, 0x47600000u, 0x7bu>(v); }
QE_HD constexpr std::uint8_t encode_fp8(DType t, float v) noexcept {
  return t == DType::kE4M3 ? encode_e4m3(v) : encode_e5m2(v);
}

QE_HD constexpr float decode_e4m3(std::uint8_t code) noexcept {
  if ((code & 0x7fu) == 0x7fu) return std::bit_cast<float>(0x7fc00000u | (std::uint32_t{code} >> 7) << 31);
  return detail::decode<3, 7>(code);
}
QE_HD constexpr float decode_e5m2(std::uint8_t code) noexcept {
  if ((code & 0x7fu) == 0x7cu) return std::bit_cast<float>(0x7f800000u | (std::uint32_t{code} >> 7) << 31);
  if ((code & 0x7fu) > 0x7cu) return std::bit_cast<float>(0x7fc00000u | (std::uint32_t{code} >> 7) << 31);
  return detail::decode<2, 15>(code);
}
QE_HD constexpr float decode_fp8(DType t, std::uint8_t code) noexcept {
  return t == DType::kE4M3 ? decode_e4m3(code) : decode_e5m2(code);
}

}  // namespace qe

// Element types and the storage conversions that every backend must agree on to the bit.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define QE_HD __host__ __device__
#else
#define QE_HD
#endif

namespace qe {

enum class DType : std::uint8_t { kF32, kBF16, kE4M3, kE5M2, kI32, kU64 };

constexpr std::size_t size_of(DType t) noexcept {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kE4M3:
    case DType::kE5M2:
      return 1;
    case DType::kU64:
      return 8;
  }
  return 0;
}
constexpr const char* name_of(DType t) noexcept {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kE4M3:
      return "e4m3";
    case DType::kE5M2:
      return "e5m2";
    case DType::kI32:
      return "i32";
    case DType::kU64:
      return "u64";
  }
  return "?";
}
constexpr bool is_fp8(DType t) noexcept { return t == DType::kE4M3 || t == DType::kE5M2; }

// BF16 as its bits. Round to nearest even; every NaN becomes a quiet NaN of the same sign.
struct Bf16 {
  std::uint16_t bits;
};
QE_HD constexpr Bf16 to_bf16(float v) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x0040u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
QE_HD constexpr float to_float(Bf16 v) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16);
}
// The value after one BF16 rounding, still in FP32.
QE_HD constexpr float round_bf16(float v) noexcept { return to_float(to_bf16(v)); }

}  // namespace qe

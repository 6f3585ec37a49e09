// Elementary functions of the CPU backend and the macros that let loops over them vectorise.
//
// Everything here is integer bit work, single IEEE operations and explicit std::fma, without branches and tables: any
// machine, compiler and instruction set gives the same bits. sqrt and division are exact by IEEE 754, so sqrt and rsqrt
// need no polynomial of ours. Not here: FP8 (core/fp8/codec.h), BF16 (core/dtype.h).
//
// Bounds are the largest error against the exact result in units of the last place, over all floats
// (tests/ops/math_test.cpp).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// On a function with a hot loop: compiled once per instruction set, chosen at load. Without an FMA target std::fma is a
// library call (same bits, many times slower). Needs ifunc, which sanitizers cannot start with. Clang does not compile
// the helpers inside its clones; a build with it wants -march=x86-64-v3.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define QE_CPU_HAS_CLONES 1
#define QE_CPU_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define QE_CPU_HAS_CLONES 0
#define QE_CPU_CLONES
#endif
// On a helper of such a function: it must be compiled inside each clone.
#if defined(__GNUC__)
#define QE_CPU_INLINE inline __attribute__((always_inline))
#else
#define QE_CPU_INLINE inline
#endif

// On a loop of a multiplication's every step, whose operands instrumented code has filled to their ends: a sanitizer's
// check at each element would take most of a test's time.
#if defined(__SANITIZE_ADDRESS__)
#define QE_CPU_UNCHECKED __attribute__((no_sanitize("address", "undefined")))
#else
#define QE_CPU_UNCHECKED
#endif

namespace qe::cpu {

// True where the clones run with 32 vector registers of 16 floats: a choice of tile sizes, never of bits.
inline bool has_wide_registers() noexcept {
#if QE_CPU_HAS_CLONES
  return __builtin_cpu_supports("avx512vl") != 0;
#else
  return false;
#endif
}

// Sums over an index use this many interleaved accumulators (element i goes to lane i mod kLanes, ascending), combined
// by sum_lanes. The order is part of the result, so it is fixed for every instruction set.
inline constexpr int kLanes = 32;

QE_CPU_INLINE float sum_lanes(const float* lanes) noexcept {
  float s[16];
  for (int i = 0; i < 16; ++i) s[i] = lanes[i] + lanes[i + 16];
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  }
  return s[0];
}

// Σ term(i) for i < n; term is inlined.
template <class Term>
QE_CPU_INLINE float sum_over(std::int64_t n, Term term) noexcept {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  }
  for (int l = 0; i + l < n; ++l) lanes[l] += term(i + l);
  return sum_lanes(lanes);
}

// Σ a[i] · b[i], each product added by fma.
QE_CPU_INLINE float dot(const float* a, const float* b, std::int64_t n) noexcept {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = std::fma(a[i + l], b[i + l], lanes[l]);
  }
  for (int l = 0; i + l < n; ++l) lanes[l] = std::fma(a[i + l], b[i + l], lanes[l]);
  return sum_lanes(lanes);
}

namespace detail {
// condition ? a : b with both computed. The conditional operator lets GCC move a's or b's arithmetic into a branch,
// which without masked instructions keeps a loop from vectorising.
QE_CPU_INLINE std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) noexcept {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}
QE_CPU_INLINE float select(bool condition, float a, float b) noexcept {
  return std::bit_cast<float>(select(condition, std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b)));
}

inline constexpr float kRoundToInteger =
    12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest integer in the low bits

// 2^n for n in [-126, 127].
QE_CPU_INLINE float power_of_two(std::int32_t n) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
}

struct Reduced {
  float expm1;     // e^r − 1, |r| <= ln2 / 2
  std::int32_t n;  // the argument is n·ln2 + r
};
QE_CPU_INLINE Reduced reduce_exp(float x) noexcept {
  const float t = std::fma(x, 1.44269504f, kRoundToInteger);
  const float n = t - kRoundToInteger;
  float r = std::fma(n, -0.693359375f, x);  // ln2 in two parts, the first with few bits: exact
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  return {std::fma(p * r, r, r), std::bit_cast<std::int32_t>(t) - std::bit_cast<std::int32_t>(kRoundToInteger)};
}
}  // namespace detail

// e^x within 1 ulp, subnormal results too; exp(−Inf) = 0, exp(Inf) = Inf, NaN stays NaN.
QE_CPU_INLINE float exp(float x) noexcept {
  float c = x < 89.0f ? x : 89.0f;  // beyond these the result is Inf or 0 anyway
  c = c > -104.0f ? c : -104.0f;
  const detail::Reduced e = detail::reduce_exp(c);
  const std::int32_t half = e.n >> 1;  // 2^n in two factors: one would leave the exponent range
  const float y = (e.expm1 + 1.0f) * detail::power_of_two(half) * detail::power_of_two(e.n - half);
  return detail::select(x != x, x, y);
}

// Within 2 ulp; tanh(±0) = ±0, subnormals exact, ±1 from |x| = 9.02 on.
QE_CPU_INLINE float tanh(float x) noexcept {
  const float a = std::fabs(x);
  const float c = detail::select(a < 10.0f, a, 10.0f);
  const detail::Reduced e = detail::reduce_exp(2.0f * c);
  const float s = detail::power_of_two(e.n);
  const float m = std::fma(s, e.expm1, s - 1.0f);  // e^2|x| − 1: small |x| keeps its relative precision
  const float y = std::copysign(m / (m + 2.0f), x);
  return detail::select(x != x, x, y);
}

// Natural logarithm within 1 ulp, subnormal arguments too; log(±0) = −Inf, log(Inf) = Inf, negative or NaN gives NaN.
QE_CPU_INLINE float log(float x) noexcept {
  const bool tiny = x < std::numeric_limits<float>::min();
  const auto bits = std::bit_cast<std::uint32_t>(detail::select(tiny, x * 8388608.0f, x));
  // Mantissa in [sqrt(1/2), sqrt(2)): 0x3f3504f3 is sqrt(1/2).
  const std::int32_t n = static_cast<std::int32_t>(bits - 0x3f3504f3u) >> 23;
  const float f = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(n) << 23)) - 1.0f;
  float p = 7.0376836292e-2f;
  p = std::fma(p, f, -1.1514610310e-1f);
  p = std::fma(p, f, 1.1676998740e-1f);
  p = std::fma(p, f, -1.2420140846e-1f);
  p = std::fma(p, f, 1.4249322787e-1f);
  p = std::fma(p, f, -1.6668057665e-1f);
  p = std::fma(p, f, 2.0000714765e-1f);
  p = std::fma(p, f, -2.4999993993e-1f);
  p = std::fma(p, f, 3.3333331174e-1f);
  const float e = static_cast<float>(n - 23 * static_cast<std::int32_t>(tiny));
  const float f2 = f * f;
  float y = std::fma(p * f, f2, e * -2.12194440e-4f);
  y = std::fma(f2, -0.5f, y);
  y = std::fma(e, 0.693359375f, f + y);
  y = detail::select(x == std::numeric_limits<float>::infinity(), x, y);
  y = detail::select(x == 0.0f, -std::numeric_limits<float>::infinity(), y);
  return detail::select(x >= 0.0f, y, std::numeric_limits<float>::quiet_NaN());
}

QE_CPU_INLINE float sqrt(float x) noexcept { return std::sqrt(x); }
QE_CPU_INLINE float rsqrt(float x) noexcept { return 1.0f / std::sqrt(x); }

}  // namespace qe::cpu

// FP8 and BF16 codes against their definitions: every code, every boundary between codes and, [slow], every float.
#include "core/fp8/codec.h"

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>

#include "tests/catch.h"

using qe::DType;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits_of(float v) { return std::bit_cast<std::uint32_t>(v); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

struct Format {
  DType type;
  int mantissa, bias;
  int finite_codes;  // of one sign: 0 … finite_codes − 1
  float smallest;    // subnormal
  float max;
};
constexpr Format kE4M3{DType::kE4M3, 3, 7, 127, 0x1p-9f, 448.0f};
constexpr Format kE5M2{DType::kE5M2, 2, 15, 124, 0x1p-16f, 57344.0f};
constexpr std::array<Format, 2> kFormats{kE4M3, kE5M2};

// From the formats' definition ("FP8 Formats for Deep Learning", table 1), in double, without the codec's bit work.
double value_of(const Format& f, int code) {
  const int magnitude = code & 0x7f;
  const int exponent = magnitude / (1 << f.mantissa);
  const double fraction = static_cast<double>(magnitude % (1 << f.mantissa)) / (1 << f.mantissa);
  const double v = exponent == 0 ? std::ldexp(fraction, 1 - f.bias) : std::ldexp(1.0 + fraction, exponent - f.bias);
  return code < 128 ? v : -v;
}

// The floats that must become `code` (positive, finite): from `first` to `last` inclusive, as bits. A midpoint belongs
// to the even code; from the largest code on everything up to Inf saturates.
struct Range {
  std::uint32_t first, last;
};
Range floats_of(const Format& f, int code) {
  const auto midpoint = [&](int lower) {
    return bits_of(static_cast<float>((value_of(f, lower) + value_of(f, lower + 1)) / 2));
  };
  const bool even = code % 2 == 0;
  const std::uint32_t first = code == 0 ? 0u : midpoint(code - 1) + (even ? 0u : 1u);
  const std::uint32_t last = code == f.finite_codes - 1 ? bits_of(kInf) : midpoint(code) - (even ? 0u : 1u);
  return {first, last};
}

}  // namespace

TEST_CASE("every FP8 code decodes to the value that the format defines") {
  for (const Format& f : kFormats) {
    for (int code = 0; code < 256; ++code) {
      INFO(qe::name_of(f.type) << " code " << code);
      const float v = qe::decode_fp8(f.type, static_cast<std::uint8_t>(code));
      CHECK(std::signbit(v) == (code >= 128));
      if ((code & 0x7f) < f.finite_codes) {
        CHECK(static_cast<double>(v) == value_of(f, code));
      } else if (f.type == DType::kE5M2 && (code & 0x7f) == 0x7c) {
        CHECK(std::isinf(v));
      } else {
        CHECK(std::isnan(v));
      }
    }
  }
}

TEST_CASE("the formats have the published extremes") {
  CHECK(qe::fp8_max(DType::kE4M3) == 448.0f);
  CHECK(qe::fp8_max(DType::kE5M2) == 57344.0f);
  CHECK(qe::decode_e4m3(0x7e) == 448.0f);
  CHECK(qe::decode_e4m3(0x08) == 0x1p-6f);
  CHECK(qe::decode_e4m3(0x01) == 0x1p-9f);
  CHECK(qe::decode_e5m2(0x7b) == 57344.0f);
  CHECK(qe::decode_e5m2(0x04) == 0x1p-14f);
  CHECK(qe::decode_e5m2(0x01) == 0x1p-16f);
}

TEST_CASE("encode inverts decode for every finite code, and every NaN code becomes 0x7F") {
  for (const Format& f : kFormats) {
    for (int code = 0; code < 256; ++code) {
      INFO(qe::name_of(f.type) << " code " << code);
      const float v = qe::decode_fp8(f.type, static_cast<std::uint8_t>(code));
      const int again = qe::encode_fp8(f.type, v);
      if (std::isnan(v)) {
        CHECK(again == 0x7f);
      } else if (std::isinf(v)) {
        CHECK(again == (code & 0x80) + f.finite_codes - 1);
      } else {
        CHECK(again == code);
      }
    }
  }
}

TEST_CASE("finite codes ascend with their values") {
  for (const Format& f : kFormats) {
    for (int code = 1; code < f.finite_codes; ++code) {
      CHECK(qe::decode_fp8(f.type, static_cast<std::uint8_t>(code)) >
            qe::decode_fp8(f.type, static_cast<std::uint8_t>(code - 1)));
    }
  }
}

TEST_CASE("a midpoint between two codes goes to the even one and its neighbours to the nearer one") {
  for (const Format& f : kFormats) {
    for (int code = 0; code + 1 < f.finite_codes; ++code) {
      INFO(qe::name_of(f.type) << " between codes " << code << " and " << code + 1);
      const auto middle = static_cast<float>((value_of(f, code) + value_of(f, code + 1)) / 2);
      const int even = code % 2 == 0 ? code : code + 1;
      for (const float sign : {1.0f, -1.0f}) {
        const int flag = sign < 0 ? 0x80 : 0;
        CHECK(qe::encode_fp8(f.type, sign * middle) == (even | flag));
        CHECK(qe::encode_fp8(f.type, sign * std::nextafter(middle, 0.0f)) == (code | flag));
        CHECK(qe::encode_fp8(f.type, sign * std::nextafter(middle, kInf)) == ((code + 1) | flag));
      }
    }
  }
}

TEST_CASE("values past the largest saturate, Inf too, and NaN of either sign is 0x7F") {
  for (const Format& f : kFormats) {
    const int top = f.finite_codes - 1;
    for (const float v : {f.max, std::nextafter(f.max, kInf), f.max * 1.0625f, f.max * 2, 3e38f, kInf}) {
      CHECK(qe::encode_fp8(f.type, v) == top);
      CHECK(qe::encode_fp8(f.type, -v) == (top | 0x80));
    }
    for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc00000u, 0xffffffffu}) {
      CHECK(qe::encode_fp8(f.type, float_of(bits)) == 0x7f);
    }
  }
}

TEST_CASE("half of the smallest subnormal and everything below it is a zero that keeps its sign") {
  for (const Format& f : kFormats) {
    for (const float v : {0.0f, 1e-45f, 1e-38f, f.smallest / 4, f.smallest / 2}) {
      CHECK(qe::encode_fp8(f.type, v) == 0x00);
      CHECK(qe::encode_fp8(f.type, -v) == 0x80);
    }
    CHECK(qe::encode_fp8(f.type, std::nextafter(f.smallest / 2, 1.0f)) == 0x01);
    CHECK(qe::encode_fp8(f.type, f.smallest * 1.5f) == 0x02);
  }
}

TEST_CASE("every float becomes the code of its range", "[slow]") {
  for (const Format& f : kFormats) {
    std::atomic<std::uint64_t> wrong = 0, seen = 0;
    const auto check_sign = [&](std::uint32_t sign, int flag) {
      std::uint64_t bad = 0, count = 0;
      for (int code = 0; code < f.finite_codes; ++code) {
        const Range range = floats_of(f, code);
        for (std::uint32_t u = range.first; u <= range.last; ++u) {
          bad += static_cast<std::uint64_t>(qe::encode_fp8(f.type, float_of(u | sign)) != (code | flag));
        }
        count += range.last - range.first + 1ull;
      }
      for (std::uint32_t u = bits_of(kInf) + 1; u <= 0x7fffffffu; ++u) {
        bad += static_cast<std::uint64_t>(qe::encode_fp8(f.type, float_of(u | sign)) != 0x7f);
      }
      wrong += bad;
      seen += count + (0x7fffffffu - bits_of(kInf));
    };
    std::thread negative(check_sign, 0x80000000u, 0x80);
    check_sign(0, 0);
    negative.join();
    INFO(qe::name_of(f.type));
    CHECK(wrong == 0);
    CHECK(seen == 1ull << 32);
  }
}

TEST_CASE("BF16 holds its own values and rounds midpoints to even") {
  for (std::uint32_t u = 0; u < 0x10000u; ++u) {
    const float v = qe::to_float({static_cast<std::uint16_t>(u)});
    if (std::isnan(v)) {
      REQUIRE((qe::to_bf16(v).bits | 0x40u) == (u | 0x40u));
      REQUIRE(std::isnan(qe::round_bf16(v)));
      continue;
    }
    REQUIRE(qe::to_bf16(v).bits == u);
    if (std::isinf(v)) continue;
    const std::uint32_t even = u % 2 == 0 ? u : u + 1;  // above the largest value the even neighbour is Inf
    REQUIRE(qe::to_bf16(float_of((u << 16) | 0x8000u)).bits == even);
    REQUIRE(qe::to_bf16(float_of((u << 16) | 0x7fffu)).bits == u);
    REQUIRE(qe::to_bf16(float_of((u << 16) | 0x8001u)).bits == u + 1);
  }
}

TEST_CASE("a NaN whose payload sits below BF16's mantissa stays a NaN of its sign") {
  CHECK(std::isnan(qe::round_bf16(float_of(0x7f800001u))));
  CHECK(qe::to_bf16(float_of(0xff800001u)).bits == 0xffc0u);
  CHECK(std::isnan(qe::round_bf16(kNaN)));
}

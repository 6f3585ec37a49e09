// Inputs and comparisons that the tests of the arithmetic share. Device memory is device_arrays.h; expected values are
// computed in each test, in double precision, without code of the backend.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "core/random.h"
#include "tests/ops/device_arrays.h"

namespace qe::test {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The values as the type stores them.
inline std::vector<float> stored_as(DType type, std::vector<float> values) {
  for (float& v : values) {
    if (type == DType::kBF16) v = round_bf16(v);
    if (is_fp8(type)) v = decode_fp8(type, encode_fp8(type, v));
  }
  return values;
}

// Uniform in [low, high).
inline std::vector<float> uniform(std::int64_t n, std::uint64_t seed, float low = -1.0f, float high = 1.0f) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = low + (high - low) * static_cast<float>(philox(seed, 0, i).w[0] >> 8) * 0x1p-24f;
  }
  return values;
}

// Integers in [-limit, limit]: sums of their products are exact in FP32.
inline std::vector<float> integers(std::int64_t n, std::uint64_t seed, int limit) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(
        static_cast<int>(philox(seed, 1, i).w[0] % (2u * static_cast<unsigned>(limit) + 1u)) - limit);
  }
  return values;
}

inline std::vector<float> filled(std::int64_t n, float value) {
  return std::vector<float>(static_cast<std::size_t>(n), value);
}

// |got − want| <= absolute + relative · |want| for every element.
inline void require_close(const std::vector<float>& got, const std::vector<double>& want, double absolute,
                          double relative) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::abs(got[i] - want[i]) <= absolute + relative * std::abs(want[i])) continue;
    INFO("element " << i << " is " << got[i] << ", not " << want[i]);
    FAIL();
  }
}

// Relative size of one rounding into the type.
inline double rounding_of(DType type) {
  if (type == DType::kE4M3) return 0x1p-4;
  if (type == DType::kE5M2) return 0x1p-3;
  return type == DType::kBF16 ? 0x1p-8 : 0.0;
}

// An Operand with its slot, poisoned: every output byte has to be written.
struct OperandUnderTest {
  OperandUnderTest(DeviceArrays& d, DType type, std::int64_t rows, std::int64_t cols, float scale_value,
                   float amax_value, std::int64_t pad = 0)
      : scale(scale_value), amax_before(amax_value) {
    const auto pitch = [pad](std::int64_t n) { return pad == 0 ? 0 : n + pad; };
    operand.rowwise = d.matrix(type, rows, cols, filled(rows * cols, kNaN), pitch(cols));
    if (!is_fp8(type)) return;
    operand.columnwise = d.matrix(type, cols, rows, filled(rows * cols, kNaN), pitch(rows));
    operand.scale_inv = d.matrix(DType::kF32, 1, 1, filled(1, kNaN));
    amax = d.array<float>({amax_value});
    quantizer = {d.array<float>({scale_value}), amax};
  }

  // Values of want within `absolute`, `relative` and one rounding of the type; FP8 parts agree with each other.
  void require(DeviceArrays& d, const std::vector<double>& want, double absolute, double relative) const {
    const DType type = operand.rowwise.dtype;
    std::vector<float> got = d.get(operand.rowwise);
    if (is_fp8(type)) {
      for (float& v : got) v /= scale;
      absolute += (type == DType::kE4M3 ? 0x1p-10 : 0x1p-17) / scale;  // half a subnormal step
    }
    require_close(got, want, absolute, relative + rounding_of(type));
    if (!is_fp8(type)) return;
    const std::vector<std::uint8_t> rowwise = d.codes(operand.rowwise), columnwise = d.codes(operand.columnwise);
    const Shape shape = operand.rowwise.shape;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t c = 0; c < shape.cols; ++c) {
        REQUIRE(columnwise[static_cast<std::size_t>(c * shape.rows + r)] ==
                rowwise[static_cast<std::size_t>(r * shape.cols + c)]);
      }
    }
    REQUIRE(d.get(operand.scale_inv) == std::vector<float>{1.0f / scale});
    double largest = amax_before;
    for (const double v : want) largest = std::max(largest, std::abs(v));
    require_close(d.read(amax, 1), {largest}, absolute, relative + 1e-6);
  }

  Operand operand;
  Quantizer quantizer;
  float scale;
  float amax_before;  // kept when it is larger than every new value
  float* amax = nullptr;
};

}  // namespace qe::test

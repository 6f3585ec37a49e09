// Rows in and out of matrices: FP32 working values from and to FP32, BF16 and FP8 storage.
// Owns the CPU backend's fused quantize tail (codes, transposed codes, amax, scale_inv); what is computed is the
// caller's. The bits are those of core/fp8/codec.h and core/dtype.h; the encoders here are the same functions without
// branches, so that loops vectorise. Call these from functions marked QE_CPU_CLONES.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/fp8/codec.h"
#include "core/ops_args.h"
#include "core/tensor.h"
#include "kernels/cpu/math.h"

namespace qe::cpu {

static_assert(std::endian::native == std::endian::little, "the byte transpose reads eight codes as one integer");

// values[0, cols) = row of an FP32 or BF16 matrix.
QE_CPU_INLINE void load_row(const Tensor& from, std::int64_t row, float* __restrict values) {
  const std::int64_t cols = from.shape.cols;
  if (from.dtype == DType::kF32) {
    std::memcpy(values, from.as<float>() + row * from.row_pitch, static_cast<std::size_t>(cols) * sizeof(float));
    return;
  }
  const Bf16* source = from.as<Bf16>() + row * from.row_pitch;
  for (std::int64_t c = 0; c < cols; ++c) values[c] = to_float(source[c]);
}

// Row of an FP32 or BF16 matrix = values[0, cols), rounded once.
QE_CPU_INLINE void store_row(const Tensor& to, std::int64_t row, const float* __restrict values) {
  const std::int64_t cols = to.shape.cols;
  if (to.dtype == DType::kF32) {
    std::memcpy(to.as<float>() + row * to.row_pitch, values, static_cast<std::size_t>(cols) * sizeof(float));
    return;
  }
  Bf16* target = to.as<Bf16>() + row * to.row_pitch;
  for (std::int64_t c = 0; c < cols; ++c) target[c] = to_bf16(values[c]);
}

namespace detail {
// encode_fp8 of |v| clamped to the format's maximum; kSubnormal's last place is the format's subnormal unit.
template <int kMantissa, int kBias, std::uint32_t kMaxBits>
QE_CPU_INLINE std::uint8_t encode_without_branch(float v) noexcept {
  constexpr std::uint32_t kShift = 23 - kMantissa;
  constexpr std::uint32_t kMinNormal = static_cast<std::uint32_t>(128 - kBias) << 23;
  constexpr float kSubnormal = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 24 - kBias - kMantissa) << 23);
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t u = magnitude < kMaxBits ? magnitude : kMaxBits;
  const std::uint32_t normal = ((u + ((1u << (kShift - 1)) - 1u) + ((u >> kShift) & 1u)) >> kShift) -
                               (static_cast<std::uint32_t>(127 - kBias) << kMantissa);
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(u) + kSubnormal) - std::bit_cast<std::uint32_t>(kSubnormal);
  const std::uint32_t code = select(u < kMinNormal, subnormal, normal) | ((bits >> 31) << 7);
  return static_cast<std::uint8_t>(select(magnitude > 0x7f800000u, 0x7fu, code));
}
QE_CPU_INLINE std::uint8_t encode_e4m3_row(float v) noexcept { return encode_without_branch<3, 7, 0x43e00000u>(v); }
QE_CPU_INLINE std::uint8_t encode_e5m2_row(float v) noexcept { return encode_without_branch<2, 15, 0x47600000u>(v); }

// codes[0, n) = encode_fp8(values · scale).
QE_CPU_INLINE void encode_row(DType type, const float* __restrict values, float scale, std::int64_t n,
                              std::uint8_t* __restrict codes) {
  if (type == DType::kE4M3) {
    for (std::int64_t c = 0; c < n; ++c) codes[c] = encode_e4m3_row(values[c] * scale);
  } else {
    for (std::int64_t c = 0; c < n; ++c) codes[c] = encode_e5m2_row(values[c] * scale);
  }
}

// x[i] byte j ↔ x[j] byte i.
QE_CPU_INLINE void transpose_8x8(std::uint64_t* x) noexcept {
  const auto exchange = [x](int i, int j, int shift, std::uint64_t mask) {
    const std::uint64_t t = ((x[i] >> shift) ^ x[j]) & mask;
    x[i] ^= t << shift;
    x[j] ^= t;
  };
  for (int i = 0; i < 4; ++i) exchange(i, i + 4, 32, 0x00000000ffffffffull);
  for (int i : {0, 1, 4, 5}) exchange(i, i + 2, 16, 0x0000ffff0000ffffull);
  for (int i : {0, 2, 4, 6}) exchange(i, i + 1, 8, 0x00ff00ff00ff00ffull);
}
}  // namespace detail

// max(amax, |values|), NaN ignored (the order of the comparisons does not matter).
QE_CPU_INLINE float amax_of_row(const float* __restrict values, std::int64_t n, float amax) noexcept {
  std::int32_t m = 0;  // the bits of non-negative floats order like integers
  for (std::int64_t c = 0; c < n; ++c) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(values[c]) & 0x7fffffff;
    const std::int32_t number = bits > 0x7f800000 ? 0 : bits;
    m = number > m ? number : m;
  }
  return std::fmax(amax, std::bit_cast<float>(m));
}

// Writes one Operand row by row, rows ascending from 0, each once, then finish().
// FP8: codes of value · *scale into rowwise and columnwise (either may be empty), scale_inv = 1 / *scale, *amax raised
// to the largest |value|. BF16 and FP32: one rounding into rowwise; the quantizer is not used.
class OperandWriter {
 public:
  OperandWriter(const Operand& out, const Quantizer& quantizer)
      : rowwise_(out.rowwise), columnwise_(out.columnwise), scale_inv_(out.scale_inv), quantizer_(quantizer) {
    const bool transposed_only = rowwise_.empty();
    type_ = transposed_only ? columnwise_.dtype : rowwise_.dtype;
    rows_ = transposed_only ? columnwise_.shape.cols : rowwise_.shape.rows;
    cols_ = transposed_only ? columnwise_.shape.rows : rowwise_.shape.cols;
    if (!is_fp8(type_)) return;
    QE_EXPECTS(quantizer_.scale != nullptr, "an FP8 operand needs its slot's scale");
    scale_ = *quantizer_.scale;
    pitch_ = (cols_ + 7) / 8 * 8;
    codes_.resize(static_cast<std::size_t>(8 * pitch_));
  }

  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::int64_t cols() const noexcept { return cols_; }

  QE_CPU_INLINE void write_row(std::int64_t row, const float* values) {
    if (!is_fp8(type_)) {
      store_row(rowwise_, row, values);
      return;
    }
    std::uint8_t* codes = codes_.data() + (row % 8) * pitch_;
    detail::encode_row(type_, values, scale_, cols_, codes);
    if (quantizer_.amax != nullptr) amax_ = amax_of_row(values, cols_, amax_);
    if (!rowwise_.empty()) {
      std::memcpy(rowwise_.as<std::uint8_t>() + row * rowwise_.row_pitch, codes, static_cast<std::size_t>(cols_));
    }
    if (!columnwise_.empty() && (row % 8 == 7 || row + 1 == rows_)) write_columns(row / 8 * 8, row % 8 + 1);
  }

  // Call once after the last row.
  void finish() {
    if (!is_fp8(type_)) return;
    if (quantizer_.amax != nullptr) *quantizer_.amax = std::fmax(*quantizer_.amax, amax_);
    if (!scale_inv_.empty()) *scale_inv_.as<float>() = 1.0f / scale_;
  }

 private:
  // The buffered codes of `count` rows from `first` on, as columns of the transpose.
  QE_CPU_INLINE void write_columns(std::int64_t first, std::int64_t count) {
    for (std::int64_t c = 0; c < cols_; c += 8) {
      std::uint64_t block[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&block[i], codes_.data() + i * pitch_ + c, 8);
      detail::transpose_8x8(block);
      std::uint8_t* to = columnwise_.as<std::uint8_t>() + c * columnwise_.row_pitch + first;
      const std::int64_t lines = std::min<std::int64_t>(8, cols_ - c);
      if (count == 8) {
        for (std::int64_t i = 0; i < lines; ++i) std::memcpy(to + i * columnwise_.row_pitch, &block[i], 8);
      } else {
        for (std::int64_t i = 0; i < lines; ++i) {
          std::memcpy(to + i * columnwise_.row_pitch, &block[i], static_cast<std::size_t>(count));
        }
      }
    }
  }

  Tensor rowwise_, columnwise_, scale_inv_;
  Quantizer quantizer_;
  DType type_ = DType::kF32;
  std::int64_t rows_ = 0, cols_ = 0, pitch_ = 0;
  float scale_ = 1.0f;
  float amax_ = 0.0f;
  std::vector<std::uint8_t> codes_;  // eight rows, waiting for the transpose
};

}  // namespace qe::cpu

// Tensor: a view of device memory. Memory is owned by Buffer (core/device.h); a view never frees.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace qe {

// Everything the trainer computes on is a matrix; a vector is [1, n].
struct Shape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  [[nodiscard]] constexpr std::int64_t elements() const noexcept { return rows * cols; }
  constexpr bool operator==(const Shape&) const noexcept = default;
};

// Row-major. row_pitch in elements, >= cols: a column range of a wider buffer is a Tensor too.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  std::int64_t row_pitch = 0;

  [[nodiscard]] bool empty() const noexcept { return data == nullptr; }
  [[nodiscard]] bool contiguous() const noexcept { return shape.rows <= 1 || row_pitch == shape.cols; }
  [[nodiscard]] std::size_t bytes() const noexcept {  // of the elements, without padding between rows
    return static_cast<std::size_t>(shape.elements()) * size_of(dtype);
  }
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data);
  }
  // Rows [first, first + count) as a view of the same memory.
  [[nodiscard]] Tensor rows(std::int64_t first, std::int64_t count) const noexcept {
    auto* base = static_cast<unsigned char*>(data) + static_cast<std::size_t>(first * row_pitch) * size_of(dtype);
    return {base, dtype, {count, shape.cols}, row_pitch};
  }
  // Columns [first, first + count) as a view of the same memory.
  [[nodiscard]] Tensor cols(std::int64_t first, std::int64_t count) const noexcept {
    auto* base = static_cast<unsigned char*>(data) + static_cast<std::size_t>(first) * size_of(dtype);
    return {base, dtype, {shape.rows, count}, row_pitch};
  }
};

inline Tensor make_tensor(void* data, DType dtype, Shape shape) noexcept { return {data, dtype, shape, shape.cols}; }

// A GEMM operand as a fused op writes it.
// FP8: rowwise [rows, cols], its physical transpose columnwise [cols, rows] (Hopper's FP8 GEMM is TN only) and
// scale_inv. BF16 and FP32: rowwise only; columnwise and scale_inv are empty. scale_inv lives with the quantized
// tensor, not with its slot: a deferred W dequantizes with its own microbatch's scale (semantics.md 1.2). It is [G, 1]
// FP32, one row per microbatch of a W group, row pitch kScalePitch (cuBLASLt wants each scale on its own 16 bytes).
inline constexpr std::int64_t kScalePitch = 4;
struct Operand {
  Tensor rowwise;
  Tensor columnwise;
  Tensor scale_inv;
  [[nodiscard]] bool empty() const noexcept { return rowwise.empty() && columnwise.empty(); }
};

}  // namespace qe

// Scales of a product whose K is several microbatches, each with a scale of its own (a W group), in the forms that
// cuBLASLt's block-scaled FP8 products read. Owns the forms and the launch that fills them; which operand takes which
// form is gemm_plan.cpp's.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/launch.h"

namespace qe::cuda {

inline constexpr std::int64_t kScaleBlock = 128;  // elements of K, and of rows in the square form

// kVector: a scale for each row and block of K, [K / 128, rows]. kSquare: a scale for each 128 rows and block of K,
// [rows / 128, K / 128], the pitch rounded up to 4.
enum class ScaleForm : std::uint8_t { kVector, kSquare };

// One operand's array, to be filled from its G scale_inv values.
struct BlockScales {
  // `scale_inv` is [G, 1]; G · 128 divides k, rows are a multiple of 4, in the square form of 128.
  BlockScales(ScaleForm, const Tensor& scale_inv, std::int64_t rows, std::int64_t k, float* to);
  [[nodiscard]] QE_HD std::int64_t elements() const noexcept { return outer * inner; }

  ScaleForm form;
  const float* scale_inv;
  std::int64_t pitch;                // from one microbatch's value to the next
  std::int64_t blocks, blocks_each;  // of K: in all, of a microbatch
  std::int64_t outer, inner;         // sizes of the array
  float* to;
};

void fill_block_scales(const Launch&, const BlockScales& a, const BlockScales& b);

}  // namespace qe::cuda

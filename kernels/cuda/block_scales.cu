#include "kernels/cuda/block_scales.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/check.h"

namespace qe::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kFour = 4;  // neighbours in both forms, one thread's

__device__ float scale_of(const BlockScales& s, unsigned block) {
  const auto microbatch = block / static_cast<unsigned>(s.blocks_each);
  return block < s.blocks ? s.scale_inv[microbatch * s.pitch] : 0.0f;
}

// Bytes an element: 4 written.
__global__ void __launch_bounds__(kThreads)
    fill(const __grid_constant__ BlockScales a, const __grid_constant__ BlockScales b) {
  const BlockScales& s = blockIdx.y == 0 ? a : b;
  const unsigned i = (blockIdx.x * kThreads + threadIdx.x) * kFour;
  if (i >= s.elements()) return;
  const auto inner = static_cast<unsigned>(s.inner);
  float4 scales;
  if (s.form == ScaleForm::kVector) {
    const float scale = scale_of(s, i / inner);
    scales = {scale, scale, scale, scale};
  } else {
    const unsigned block = i % inner;
    scales = {scale_of(s, block), scale_of(s, block + 1), scale_of(s, block + 2), scale_of(s, block + 3)};
  }
  *reinterpret_cast<float4*>(s.to + i) = scales;
}

}  // namespace

BlockScales::BlockScales(ScaleForm f, const Tensor& t, std::int64_t rows, std::int64_t k, float* destination)
    : form(f),
      scale_inv(t.as<float>()),
      pitch(t.row_pitch),
      blocks(k / kScaleBlock),
      blocks_each(blocks / t.shape.rows),
      outer(f == ScaleForm::kVector ? blocks : rows / kScaleBlock),
      inner(f == ScaleForm::kVector ? rows : (blocks + 3) / 4 * 4),
      to(destination) {
  QE_EXPECTS(k % (kScaleBlock * t.shape.rows) == 0, "a microbatch is whole blocks of K");
  QE_EXPECTS(rows % (f == ScaleForm::kVector ? kFour : kScaleBlock) == 0, "the form fits the rows");
  QE_EXPECTS(elements() < std::int64_t{1} << 31, "scales are counted in 32 bits");
}

void fill_block_scales(const Launch& launch, const BlockScales& a, const BlockScales& b) {
  const std::int64_t most = std::max(a.elements(), b.elements());
  const auto blocks = static_cast<unsigned>((most / kFour + kThreads - 1) / kThreads);
  fill<<<dim3(blocks, 2), kThreads, 0, launch.stream>>>(a, b);
  QE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace qe::cuda

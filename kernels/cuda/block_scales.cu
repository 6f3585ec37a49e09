#include "kernels/cuda/block_scales.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/check.h"

namespace qe::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 128;

__global__ void fill(BlockScales a, BlockScales b) {
  const BlockScales& s = blockIdx.y == 0 ? a : b;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < s.elements(); i += step) {
    const std::int64_t block = s.form == ScaleForm::kVector ? i / s.inner : i % s.inner;
    s.to[i] = block < s.blocks ? s.scale_inv[block / s.blocks_each * s.pitch] : 0.0f;
  }
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
  QE_EXPECTS(rows % (f == ScaleForm::kVector ? 4 : kScaleBlock) == 0, "the form fits the rows");
}

void fill_block_scales(const Launch& launch, const BlockScales& a, const BlockScales& b) {
  const std::int64_t most = std::max(a.elements(), b.elements());
  const auto blocks = static_cast<unsigned>(std::min((most + kThreads - 1) / kThreads, kMostBlocks));
  fill<<<dim3(blocks, 2), kThreads, 0, launch.stream>>>(a, b);
  QE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace qe::cuda

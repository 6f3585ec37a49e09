#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/reduce.h"

namespace qe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;

struct Parts {
  const float* part[kMaxParts];
  int count;
};

template <Combine kCombine>
__global__ void __launch_bounds__(kThreads) combine_kernel(float* out, const Parts parts, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    float total = parts.part[0][i];
    for (int r = 1; r < parts.count; ++r) {
      const float x = parts.part[r][i];
      if (kCombine == Combine::kSum) {
        total += x;
      } else if (x > total || x != x) {
        total = x;
      }
    }
    out[i] = total;
  }
}

}  // namespace

void combine_parts(cudaStream_t stream, Combine combine, float* out, std::span<const float* const> parts,
                   std::int64_t count) {
  QE_EXPECTS(!parts.empty() && parts.size() <= kMaxParts, "a reduction has 1 to 64 ranks");
  if (count == 0) return;
  Parts all{};
  std::copy(parts.begin(), parts.end(), all.part);
  all.count = static_cast<int>(parts.size());
  const auto blocks = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
  if (combine == Combine::kSum) {
    combine_kernel<Combine::kSum><<<blocks, kThreads, 0, stream>>>(out, all, count);
  } else {
    combine_kernel<Combine::kMax><<<blocks, kThreads, 0, stream>>>(out, all, count);
  }
  QE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace qe::cuda

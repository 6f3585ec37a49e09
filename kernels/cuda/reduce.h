// Combines the same array of several ranks, in rank order: equal bits on every rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/wire/peer_memory.h"

namespace qe::cuda {

inline constexpr int kMaxParts = 64;  // ranks of one reduction

// out[i] = parts[0][i] + parts[1][i] + … from the left, or their maximum, where a NaN of any rank wins. FP32; parts may
// be on other cards; out may be one of the parts and overlap no other.
void combine_parts(cudaStream_t, Combine, float* out, std::span<const float* const> parts, std::int64_t count);

}  // namespace qe::cuda

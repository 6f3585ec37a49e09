// One value from all threads of a block, in a tree that depends on the number of threads alone. Every thread gets it.
#pragma once

#include <cuda_runtime.h>

namespace qe::cuda {

struct Add {
  template <class T>
  __device__ static T join(T a, T b) {
    return a + b;
  }
};
// A NaN is passed over.
struct Larger {
  __device__ static float join(float a, float b) { return fmaxf(a, b); }
};

template <class Op, class T>
__device__ __forceinline__ T reduce_warp(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Op::join(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// All threads of a block of whole warps, at most 1024; `identity` joined to a value leaves it.
template <class Op, class T>
__device__ __forceinline__ T reduce_block(T value, T identity) {
  __shared__ T of_warp[32];
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = reduce_warp<Op>(value);
  __syncthreads();  // an earlier call's readers are done
  if (lane == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_warp<Op>(lane < warps ? of_warp[lane] : identity);
}

}  // namespace qe::cuda

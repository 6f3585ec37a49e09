// How kernels follow each other. Owns the launch; which blocks and how many threads is the kernel's file's.
//
// A kernel's blocks may come onto the card while those of the kernel before it in the stream still run, so that the
// next one's start costs no time (programmatic dependent launch): each kernel first waits until the one before it has
// ended and its writes are seen, and only then lets the next one come. Kernels of libraries, copies and everything in
// other streams see the order that they always see.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "kernels/cuda/check.h"

namespace qe::cuda {

// The first statement of every kernel that launch_kernel starts.
__device__ __forceinline__ void follow_predecessor() {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

struct LaunchShape {
  dim3 grid;
  int threads;
  dim3 cluster = 1;  // neighbouring blocks that reach into each other's shared memory
  cudaStream_t stream;
  std::size_t shared_bytes = 0;  // beyond what the kernel declares
};

template <class... Parameters, class... Arguments>
void launch_kernel(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  if (shape.shared_bytes > 0) {
    QE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shape.shared_bytes)));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1 ? 2 : 1;
  QE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace qe::cuda

#include "kernels/cuda/architecture.h"

#include "kernels/cuda/check.h"

namespace qe::cuda {

namespace {
__global__ void any_kernel() {}
}  // namespace

bool has_code_for_current_device() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();  // answered: not an error of a later call
    return false;
  }
  QE_CUDA_CHECK(status);
  return true;
}

}  // namespace qe::cuda

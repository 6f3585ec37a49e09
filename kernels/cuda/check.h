// Turns a failed call of a CUDA library into a DeviceError that names the call, its message and its place.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"

namespace qe::cuda {

[[noreturn]] inline void fail(const char* call, const std::string& what, const char* file, int line) {
  throw DeviceError(std::string(call) + " failed at " + file + ":" + std::to_string(line) + ": " + what);
}

}  // namespace qe::cuda

#define QE_CUDA_CHECK(call)                                                                                   \
  do {                                                                                                        \
    const cudaError_t qe_status = (call);                                                                     \
    if (qe_status != cudaSuccess) ::qe::cuda::fail(#call, cudaGetErrorString(qe_status), __FILE__, __LINE__); \
  } while (false)

#define QE_CUBLAS_CHECK(call)                                                          \
  do {                                                                                 \
    const cublasStatus_t qe_status = (call);                                           \
    if (qe_status != CUBLAS_STATUS_SUCCESS) {                                          \
      ::qe::cuda::fail(#call, cublasLtGetStatusString(qe_status), __FILE__, __LINE__); \
    }                                                                                  \
  } while (false)

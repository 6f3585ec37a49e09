// What a kernel's host function needs besides its arguments: the stream, scratch memory, tables in device memory.
// Owned by CudaOps, one Launch a stream; kernels/cuda/kernels.h takes it by reference.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace qe::cuda {

// Room for the partial sums of one launch; the next call on the same stream may overwrite it. Its address never
// changes, so graphs may hold it, and two streams never share it.
struct Scratch {
  void* data = nullptr;
  std::size_t bytes = 0;
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data);
  }
};
inline constexpr std::size_t kScratchBytes = std::size_t{64} << 20;

// Arrays that a kernel reads through a pointer (the items of an optimizer launch), kept in device memory for the life
// of the backend and found again by their bytes: the same list costs one upload.
class DeviceTables {
 public:
  virtual ~DeviceTables() = default;
  // 256-byte aligned device memory with these bytes. Not inside a capture unless the bytes were seen before.
  virtual const void* find_or_upload(const void* host, std::size_t bytes) = 0;
};

struct Launch {
  cudaStream_t stream;
  Scratch scratch;
  DeviceTables& tables;
  int multiprocessors;
};

}  // namespace qe::cuda

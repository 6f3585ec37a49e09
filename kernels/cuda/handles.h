// Owning handles of the CUDA runtime: each is destroyed with its owner. Making one is the owner's business.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

namespace qe::cuda {

struct Destroy {
  void operator()(cudaStream_t s) const noexcept { (void)cudaStreamDestroy(s); }
  void operator()(cudaEvent_t e) const noexcept { (void)cudaEventDestroy(e); }
  void operator()(cudaGraph_t g) const noexcept { (void)cudaGraphDestroy(g); }
  void operator()(cudaGraphExec_t g) const noexcept { (void)cudaGraphExecDestroy(g); }
};
using StreamHandle = std::unique_ptr<CUstream_st, Destroy>;
using EventHandle = std::unique_ptr<CUevent_st, Destroy>;
using GraphHandle = std::unique_ptr<CUgraph_st, Destroy>;
using GraphExecHandle = std::unique_ptr<CUgraphExec_st, Destroy>;

// Page-locked host memory.
struct FreeHost {
  void operator()(void* p) const noexcept { (void)cudaFreeHost(p); }
};
using PinnedMemory = std::unique_ptr<void, FreeHost>;

}  // namespace qe::cuda

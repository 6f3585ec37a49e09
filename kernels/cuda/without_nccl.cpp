// The NCCL transport of a build that found no NCCL.
#include "core/error.h"
#include "kernels/cuda/nccl_transport.h"

namespace qe {

bool nccl_was_built() noexcept { return false; }

std::unique_ptr<Transport> make_nccl_transport(CudaDevice&, std::shared_ptr<Wire>, RankLayout, const WaitRule&) {
  throw ConfigError(
      "execution.transport is nccl, but this build has no NCCL; build where NCCL is installed (NCCL_ROOT)");
}

}  // namespace qe

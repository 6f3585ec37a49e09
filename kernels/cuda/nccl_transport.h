// Messages through NCCL, for ranks with a GPU of their own, on one host or several. Owns one communicator a directed
// edge between neighbours of the pipeline and one a group; the streams are the caller's.
//
// A build without NCCL has these functions too (without_nccl.cpp) and says so.
#pragma once

#include <memory>

#include "core/transport.h"
#include "kernels/cuda/device.h"
#include "kernels/wire/host_wait.h"
#include "kernels/wire/wire.h"

namespace qe {

[[nodiscard]] bool nccl_was_built() noexcept;

// Collective over the wire's world; every communicator is made and has carried a message when it returns. ConfigError
// in a build without NCCL, DeviceError when NCCL fails or a rank is late. Destroyed before the device; destroyed by an
// exception it aborts its communicators.
//
// A send may wait, on its stream, for its receive: NCCL buffers what its channels hold and no more. Ranks pass messages
// to the pipeline rank before and after them only, in a ring.
std::unique_ptr<Transport> make_nccl_transport(CudaDevice&, std::shared_ptr<Wire>, RankLayout, const WaitRule&);

}  // namespace qe

// Messages between ranks of one host through CUDA IPC: two ranks on one card, or each on its own. Owns no protocol
// (kernels/wire/staged_transport.h); gives it memory and events that the other process can open.
//
// Streams wait for interprocess events and nothing spins on a card, so two ranks can share one.
#pragma once

#include <memory>

#include "core/transport.h"
#include "kernels/cuda/device.h"
#include "kernels/wire/host_wait.h"
#include "kernels/wire/wire.h"

namespace qe {

// Collective over the wire's world. ConfigError when ranks are on several hosts. Destroyed before the device, and
// collectively unless an exception destroys it.
std::unique_ptr<Transport> make_ipc_transport(CudaDevice&, std::shared_ptr<Wire>, RankLayout, const WaitRule&);

}  // namespace qe

// Makes the backend that a config names. The only room that knows which backends were built.
#pragma once

#include <memory>
#include <string>

#include "core/device.h"
#include "core/ops.h"
#include "core/transport.h"

namespace qe {

struct Backend {
  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;  // destroyed before its device
};

// "cpu", "cuda" or "auto". Throws ConfigError when the backend was not built in, DeviceError when it has no device.
Backend make_backend(const std::string& name);

// Messages between the processes of an MPI job, as the device can carry them. Collective, between MPI_Init and
// MPI_Finalize. Throws ConfigError when the job has not pipeline · data ranks.
std::unique_ptr<Transport> make_transport(Device&, int pipeline, int data, double timeout_s);

}  // namespace qe

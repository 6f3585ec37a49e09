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

// "cpu", "cuda" or "auto": cuda where it was built and the process sees a GPU, else cpu. `ordinal`: which of those
// GPUs. Throws ConfigError when the backend was not built in, DeviceError when it has no usable device.
Backend make_backend(const std::string& name, int ordinal = 0);

// Messages between the processes of an MPI job, as the device can carry them. Collective, between MPI_Init and
// MPI_Finalize; one rank on a GPU needs no MPI. `kind`: "mpi" for the CPU, "ipc" for the GPUs of one host, or "auto".
// Throws ConfigError when the job has not pipeline · data ranks or the device has no transport of that kind.
std::unique_ptr<Transport> make_transport(Device&, int pipeline, int data, double timeout_s,
                                          const std::string& kind = "auto");

}  // namespace qe

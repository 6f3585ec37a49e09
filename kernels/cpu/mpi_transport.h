// Messages between processes over MPI, on host buffers. The connection is kernels/wire/mpi_wire.h's; MPI_Init and
// MPI_Finalize are the caller's.
#pragma once

#include <memory>

#include "core/transport.h"
#include "kernels/cpu/device.h"

namespace qe {

// Collective. ConfigError when the job has not pipeline · data ranks. The transport must be destroyed before
// MPI_Finalize; it is used by the thread of its device, so MPI_THREAD_FUNNELED is enough.
std::unique_ptr<Transport> make_mpi_transport(CpuDevice&, int pipeline, int data, const WaitRule&);

}  // namespace qe

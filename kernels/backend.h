// Makes the backend that a config names. The only room that knows which backends were built.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "core/device.h"
#include "core/ops.h"
#include "core/transport.h"
#include "kernels/gemm_chooser.h"
#include "kernels/wire/host_wait.h"

namespace qe {

struct Backend {
  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;  // destroyed before its device
};

// "cpu", "cuda" or "auto": cuda where it was built and the process sees a GPU, else cpu. `ordinal`: which of those
// GPUs. Throws ConfigError when the backend was not built in, DeviceError when it has no usable device.
Backend make_backend(const std::string& name, int ordinal = 0);

// Null on the CPU, which computes every product in one way. Lives as long as the backend.
GemmChooser* gemm_chooser(Backend&);

// Of the libraries that this build's backends use, by name; empty for the CPU's.
std::map<std::string, std::string> library_versions();

// Throws ConfigError when this build has no backend that `backend` and `transport` ask for by name. Needs no device, so
// that a job is refused before it starts.
void expect_built(const std::string& backend, const std::string& transport);

// What a rank of a job uses: the arguments of make_backend and make_transport.
struct RankBinding {
  std::string backend;    // "cpu" or "cuda"
  std::string transport;  // "mpi", "ipc", "nccl"; "none" for one rank on a GPU
  int ordinal = 0;
  std::string table;  // for the log, a line a rank: host, GPU, PCI id, with whom it is shared; empty without GPUs
};

// Decides alike on every rank, before anything else is made. Collective over an MPI job of pipeline · data ranks; one
// rank needs no MPI. `backend` is "cpu", "cuda" or "auto", `transport` "auto", "mpi" (CPU), "ipc" (the GPUs of one
// host, which ranks may share) or "nccl" (a GPU a rank). Throws ConfigError when the job has another size, AgreedError
// when the transport cannot serve these ranks or one of them has no GPU.
RankBinding bind_rank(const std::string& backend, const std::string& transport, int pipeline, int data,
                      const WaitRule&);

// Messages between the processes of an MPI job. Collective, between MPI_Init and MPI_Finalize; one rank on a GPU needs
// no MPI. `kind` as in RankBinding. Throws ConfigError when the job has not pipeline · data ranks.
std::unique_ptr<Transport> make_transport(Device&, int pipeline, int data, const WaitRule&, const std::string& kind);

}  // namespace qe

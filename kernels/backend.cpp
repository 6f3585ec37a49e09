#include "kernels/backend.h"

#include <optional>

#include "core/error.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/mpi_transport.h"
#ifdef QE_WITH_CUDA
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ipc_transport.h"
#include "kernels/cuda/library_versions.h"
#include "kernels/cuda/nccl_transport.h"
#include "kernels/cuda/rank_binding.h"
#include "kernels/wire/mpi_wire.h"
#include "kernels/wire/solo_transport.h"
#endif

namespace qe {

namespace {

[[noreturn]] void refuse_cuda() {
  throw ConfigError(
      "execution.backend is cuda, but this build has no CUDA backend; build with the CUDA toolkit or use cpu");
}

#ifdef QE_WITH_CUDA
constexpr bool kHasCuda = true;
bool sees_cuda_device() { return CudaDevice::count() > 0; }

Backend make_cuda(int ordinal) {
  auto device = std::make_unique<CudaDevice>(ordinal);
  auto ops = std::make_unique<CudaOps>(*device);
  return {std::move(device), std::move(ops)};
}

std::map<std::string, std::string> cuda_versions() { return cuda::library_versions(); }

std::unique_ptr<Transport> make_cuda_transport(Device& device, int pipeline, int data, const WaitRule& rule,
                                               const std::string& kind) {
  auto* cuda = dynamic_cast<CudaDevice*>(&device);
  QE_EXPECTS(cuda != nullptr, "every device of make_backend has a transport");
  if (pipeline * data == 1) {
    expect_no_other_ranks();
    return std::make_unique<SoloTransport>(device);
  }
  MpiWorld world = join_mpi_world(pipeline, data);
  if (kind == "nccl") return make_nccl_transport(*cuda, std::move(world.wire), world.layout, rule);
  QE_EXPECTS(kind == "ipc", "bind_rank chose the transport");
  return make_ipc_transport(*cuda, std::move(world.wire), world.layout, rule);
}

// Nothing: no rank sees a GPU, and none is required.
std::optional<RankBinding> bind_to_gpu(const std::string& transport, int pipeline, int data, const WaitRule& rule,
                                       bool required) {
  auto card = bind_to_card(transport, pipeline, data, rule, required);
  if (!card) return std::nullopt;
  return RankBinding{"cuda", card->transport, card->ordinal, card->table};
}
#else
constexpr bool kHasCuda = false;
bool sees_cuda_device() { return false; }
Backend make_cuda(int) { refuse_cuda(); }
std::map<std::string, std::string> cuda_versions() { return {}; }
std::unique_ptr<Transport> make_cuda_transport(Device&, int, int, const WaitRule&, const std::string&) {
  refuse_cuda();
}
std::optional<RankBinding> bind_to_gpu(const std::string&, int, int, const WaitRule&, bool required) {
  if (required) refuse_cuda();
  return std::nullopt;
}
#endif

}  // namespace

void expect_built(const std::string& backend, const std::string& transport) {
  if (kHasCuda) return;
  if (backend == "cuda") refuse_cuda();
  if (transport == "ipc" || transport == "nccl") {
    throw ConfigError("execution.transport is " + transport +
                      ", but this build has no CUDA backend; build with the CUDA toolkit or use mpi or auto");
  }
}

Backend make_backend(const std::string& name, int ordinal) {
  if (name == "cuda" || (name == "auto" && sees_cuda_device())) return make_cuda(ordinal);
  if (name == "cpu" || name == "auto") {
    auto device = std::make_unique<CpuDevice>();
    auto ops = std::make_unique<CpuOps>(*device);
    return {std::move(device), std::move(ops)};
  }
  throw ConfigError("execution.backend is '" + name + "', which is not a backend; use cpu, cuda or auto");
}

std::map<std::string, std::string> library_versions() { return cuda_versions(); }

GemmChooser* gemm_chooser(Backend& backend) { return dynamic_cast<GemmChooser*>(backend.ops.get()); }

RankBinding bind_rank(const std::string& backend, const std::string& transport, int pipeline, int data,
                      const WaitRule& rule) {
  // Without a backend named, mpi asks for the CPU as ipc and nccl ask for GPUs.
  const bool cpu = backend == "cpu" || (backend == "auto" && transport == "mpi");
  if (!cpu) {
    const bool required = backend == "cuda" || transport != "auto";
    if (const auto gpu = bind_to_gpu(transport, pipeline, data, rule, required)) return *gpu;
  }
  if (transport != "auto" && transport != "mpi") {
    throw AgreedError(ExitCode::kConfig, "execution.transport is " + transport +
                                             ", but the CPU backend sends through mpi; use mpi or auto");
  }
  return {"cpu", "mpi", 0, ""};
}

std::unique_ptr<Transport> make_transport(Device& device, int pipeline, int data, const WaitRule& rule,
                                          const std::string& kind) {
  auto* cpu = dynamic_cast<CpuDevice*>(&device);
  if (cpu == nullptr) return make_cuda_transport(device, pipeline, data, rule, kind);
  return make_mpi_transport(*cpu, pipeline, data, rule);
}

}  // namespace qe

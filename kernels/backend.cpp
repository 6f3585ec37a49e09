#include "kernels/backend.h"

#include "core/error.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/mpi_transport.h"
#ifdef QE_WITH_CUDA
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ipc_transport.h"
#include "kernels/wire/mpi_wire.h"
#include "kernels/wire/solo_transport.h"
#endif

namespace qe {

namespace {

#ifdef QE_WITH_CUDA
bool sees_cuda_device() { return CudaDevice::count() > 0; }
Backend make_cuda(int ordinal) {
  auto device = std::make_unique<CudaDevice>(ordinal);
  auto ops = std::make_unique<CudaOps>(*device);
  return {std::move(device), std::move(ops)};
}
std::unique_ptr<Transport> make_cuda_transport(Device& device, int pipeline, int data, double timeout_s,
                                               const std::string& kind) {
  auto* cuda = dynamic_cast<CudaDevice*>(&device);
  QE_EXPECTS(cuda != nullptr, "every device of make_backend has a transport");
  if (kind != "auto" && kind != "ipc") {
    throw ConfigError("execution.transport is " + kind + ", which the CUDA backend does not have; use ipc or auto");
  }
  if (pipeline * data == 1) {
    expect_no_other_ranks();
    return std::make_unique<SoloTransport>(device);
  }
  MpiWorld world = join_mpi_world(pipeline, data);
  return make_ipc_transport(*cuda, std::move(world.wire), world.layout, timeout_s);
}
#else
bool sees_cuda_device() { return false; }
Backend make_cuda(int) {
  throw ConfigError(
      "execution.backend is cuda, but this build has no CUDA backend; build with the CUDA toolkit or use cpu");
}
std::unique_ptr<Transport> make_cuda_transport(Device&, int, int, double, const std::string&) {
  QE_EXPECTS(false, "every device of make_backend has a transport");
}
#endif

}  // namespace

Backend make_backend(const std::string& name, int ordinal) {
  if (name == "cuda" || (name == "auto" && sees_cuda_device())) return make_cuda(ordinal);
  if (name == "cpu" || name == "auto") {
    auto device = std::make_unique<CpuDevice>();
    auto ops = std::make_unique<CpuOps>(*device);
    return {std::move(device), std::move(ops)};
  }
  throw ConfigError("execution.backend is '" + name + "', which is not a backend; use cpu, cuda or auto");
}

std::unique_ptr<Transport> make_transport(Device& device, int pipeline, int data, double timeout_s,
                                          const std::string& kind) {
  if (auto* cpu = dynamic_cast<CpuDevice*>(&device); cpu != nullptr) {
    if (kind != "auto" && kind != "mpi") {
      throw ConfigError("execution.transport is " + kind + ", but the CPU backend sends through mpi; use mpi or auto");
    }
    return make_mpi_transport(*cpu, pipeline, data, timeout_s);
  }
  return make_cuda_transport(device, pipeline, data, timeout_s, kind);
}

}  // namespace qe

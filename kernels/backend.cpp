#include "kernels/backend.h"

#include "core/error.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/mpi_transport.h"

namespace qe {

Backend make_backend(const std::string& name) {
  if (name == "cpu" || name == "auto") {
    auto device = std::make_unique<CpuDevice>();
    auto ops = std::make_unique<CpuOps>(*device);
    return {std::move(device), std::move(ops)};
  }
  if (name == "cuda") {
    throw ConfigError(
        "execution.backend is cuda, but this build has no CUDA backend; build with the CUDA toolkit or use "
        "cpu");
  }
  throw ConfigError("execution.backend is '" + name + "', which is not a backend; use cpu, cuda or auto");
}

std::unique_ptr<Transport> make_transport(Device& device, int pipeline, int data, double timeout_s) {
  auto* cpu = dynamic_cast<CpuDevice*>(&device);
  QE_EXPECTS(cpu != nullptr, "every device of make_backend has a transport");
  return make_mpi_transport(*cpu, pipeline, data, timeout_s);
}

}  // namespace qe

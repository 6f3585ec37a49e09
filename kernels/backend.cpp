#include "kernels/backend.h"

#include "core/error.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/device.h"

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

}  // namespace qe

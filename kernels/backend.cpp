#include "kernels/backend.h"

#include "core/error.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/mpi_transport.h"
#ifdef QE_WITH_CUDA
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
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
#else
bool sees_cuda_device() { return false; }
Backend make_cuda(int) {
  throw ConfigError(
      "execution.backend is cuda, but this build has no CUDA backend; build with the CUDA toolkit or use cpu");
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

std::unique_ptr<Transport> make_transport(Device& device, int pipeline, int data, double timeout_s) {
  auto* cpu = dynamic_cast<CpuDevice*>(&device);
  QE_EXPECTS(cpu != nullptr, "every device of make_backend has a transport");
  return make_mpi_transport(*cpu, pipeline, data, timeout_s);
}

}  // namespace qe

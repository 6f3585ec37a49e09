#include "kernels/cuda/library_versions.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

namespace qe::cuda {

namespace {

std::string cuda_dotted(int number) {  // 13010 → 13.1
  return number == 0 ? "none" : std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

std::map<std::string, std::string> library_versions() {
  int driver = 0, runtime = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&runtime);
  const auto cublaslt = static_cast<unsigned>(cublasLtGetVersion());  // 130100 → 13.1.0
  return {{"cuda_driver", cuda_dotted(driver)},
          {"cuda_runtime", cuda_dotted(runtime)},
          {"cublaslt", std::to_string(cublaslt / 10000) + "." + std::to_string(cublaslt / 100 % 100) + "." +
                           std::to_string(cublaslt % 100)}};
}

}  // namespace qe::cuda

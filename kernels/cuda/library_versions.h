// Which libraries the process runs with; what it was built with may be older.
#pragma once

#include <map>
#include <string>

namespace qe::cuda {

// "cuda_driver" (the newest CUDA that it can run), "cuda_runtime", "cublaslt".
[[nodiscard]] std::map<std::string, std::string> library_versions();

}  // namespace qe::cuda

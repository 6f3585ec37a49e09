#include "app/environment.h"

#include <mpi.h>
#include <sys/utsname.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "kernels/backend.h"

namespace qe {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(':');
    if (line.starts_with("model name") && colon != std::string::npos && colon + 2 <= line.size()) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::string mpi_version() {  // allowed before MPI_Init
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

std::string dotted(unsigned number) {  // 801 → 0.8.1
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." + std::to_string(number % 100);
}

}  // namespace

std::string version_text() { return std::string("qeffect ") + QE_VERSION; }

std::string environment_json() {
  utsname os{};
  ::uname(&os);
  nlohmann::ordered_json out{{"qeffect", QE_VERSION},
                             {"host", os.nodename},
                             {"os", std::string(os.sysname) + " " + os.release},
                             {"cpu", cpu_model()},
                             {"cpu_threads", std::thread::hardware_concurrency()},
                             {"compiler", __VERSION__},
                             {"mpi", mpi_version()},
                             {"nlohmann_json", nlohmann::json::meta()["version"]["string"]},
                             {"cli11", CLI11_VERSION},
                             {"xxhash", dotted(XXH_versionNumber())}};
  for (const auto& [library, version] : library_versions()) out[library] = version;
  return out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace qe

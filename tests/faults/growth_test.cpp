// What a long run keeps.
#include <nlohmann/json.hpp>

#include "tests/catch.h"
#include "tests/faults/job.h"

namespace qe::testing {
namespace {

// KiB of memory that the process holds.
long resident_kib(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stol(line.substr(6));
  }
  return 0;
}

std::vector<long> device_bytes(const Job& job, const std::string& name) {
  const auto report = nlohmann::json::parse(text_of(job.dir() / (name + "/report/report.json")));
  std::vector<long> bytes;
  for (const auto& rank : report["resources"]) {
    bytes.push_back(rank["end_bytes"].get<long>());
    bytes.push_back(rank["peak_bytes"].get<long>());
  }
  return bytes;
}

}  // namespace

TEST_CASE("a rank's memory after 300 steps is what it was after 20, on the device to the byte", "[slow]") {
  const Job job(2);
  REQUIRE(run(job.mpirun(job.train("--set training.train_iters=20 checkpoint.interval=0", {}, "short"))).code == 0);
  Running running(job.mpirun(job.train("--set training.train_iters=300 checkpoint.interval=0")));
  REQUIRE(running.reads("step     20/300"));
  const std::vector<pid_t> ranks = running.children();
  REQUIRE(ranks.size() == 2);
  const std::vector<long> early{resident_kib(ranks[0]), resident_kib(ranks[1])};
  REQUIRE(running.reads("step    290/300"));
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const long late = resident_kib(ranks[r]);
    if (late > 0) CHECK(late - early[r] < 20 * 1024);
  }
  CHECK(running.finish().code == 0);
  REQUIRE(device_bytes(job, "run").size() == 4);
  CHECK(device_bytes(job, "run") == device_bytes(job, "short"));
}

}  // namespace qe::testing

// The stream probe without a GPU. By construction of the lazy device this shows a missing edge every time; it says
// nothing about GPUs (tests/cuda/stream_probe_test.cpp does).
#include "tests/stream_probe.h"

#include "kernels/cpu/device.h"
#include "tests/catch.h"

using qe::test::kHandoffs;

namespace {

int stale_reads(bool wait_for_tail, std::uint64_t seed) {
  qe::CpuDevice device(qe::DrainPolicy::kAdversarial, seed);
  return qe::test::stale_reads(device, wait_for_tail);
}

}  // namespace

TEST_CASE("a one-way hand-off reads stale output every time") { CHECK(stale_reads(false, 0) == kHandoffs); }

TEST_CASE("a two-way hand-off never reads stale output") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) CHECK(stale_reads(true, seed) == 0);
}

TEST_CASE("a seed that lets streams run ahead still finds the one-way hand-off") {
  for (std::uint64_t seed = 1; seed < 20; ++seed) CHECK(stale_reads(false, seed) > 0);
}

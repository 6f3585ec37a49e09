// The paper's stream probe (its figure 2) without a GPU: a caller reads what a graph on an internal stream writes.
// By construction of the lazy device this shows a missing edge every time; it says nothing about GPUs.
#include <memory>

#include "kernels/cpu/device.h"
#include "tests/catch.h"

namespace {

constexpr int kHandoffs = 200;

// How many of the caller's reads missed the value that the graph of the same hand-off writes.
int stale_reads(bool wait_for_tail, std::uint64_t seed) {
  qe::CpuDevice device(qe::DrainPolicy::kAdversarial, seed);
  const auto caller = device.make_stream("caller");
  const auto inner = device.make_stream("graph");
  const auto ready = device.make_event();
  const auto tail = device.make_event();
  qe::Buffer input = device.allocate(sizeof(int), qe::MemoryKind::kStep);
  qe::Buffer output = device.allocate(sizeof(int), qe::MemoryKind::kStep);
  const auto graph = device.capture(*inner, [&] { device.copy(*inner, output.data(), input.data(), sizeof(int)); });
  int stale = 0;
  for (int value = 1; value <= kHandoffs; ++value) {
    int seen = 0;
    device.upload(*caller, input.data(), &value, sizeof value);
    device.record(*ready, *caller);
    device.wait(*inner, *ready);
    device.launch(*graph, *inner);
    device.record(*tail, *inner);
    if (wait_for_tail) device.wait(*caller, *tail);
    device.download(*caller, &seen, output.data(), sizeof seen);
    device.synchronize(*caller);
    stale += seen != value;
    device.synchronize(*inner);
  }
  return stale;
}

}  // namespace

TEST_CASE("a one-way hand-off reads stale output every time") { CHECK(stale_reads(false, 0) == kHandoffs); }

TEST_CASE("a two-way hand-off never reads stale output") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) CHECK(stale_reads(true, seed) == 0);
}

TEST_CASE("a seed that lets streams run ahead still finds the one-way hand-off") {
  for (std::uint64_t seed = 1; seed < 20; ++seed) CHECK(stale_reads(false, seed) > 0);
}

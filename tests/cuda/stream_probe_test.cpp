// The paper's stream probe (its figure 2) on a GPU: a caller reads what a graph on another stream writes after work of
// known length. A one-way hand-off reads what was there before; the two-way one never does.
#include <cstddef>
#include <memory>

#include "core/error.h"
#include "kernels/cuda/device.h"
#include "tests/catch.h"

namespace {

constexpr int kHandoffs = 200;

int stale_reads(qe::CudaDevice& device, bool wait_for_tail) {
  constexpr std::size_t kBallast = std::size_t{64} << 20;  // each copy of it takes tens of microseconds
  const auto caller = device.make_stream("caller");
  const auto inner = device.make_stream("graph");
  const auto ready = device.make_event();
  const auto tail = device.make_event();
  const qe::Buffer ballast = device.allocate(2 * kBallast, qe::MemoryKind::kWorkspace);
  const qe::Buffer input = device.allocate(sizeof(int), qe::MemoryKind::kStep);
  const qe::Buffer output = device.allocate(sizeof(int), qe::MemoryKind::kStep);
  const auto graph = device.capture(*inner, [&] {
    device.copy(*inner, ballast.as<std::byte>() + kBallast, ballast.data(), kBallast);
    device.copy(*inner, output.data(), input.data(), sizeof(int));
  });
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

TEST_CASE("on a GPU a one-way hand-off reads stale output, a two-way one never does") {
  if (qe::CudaDevice::count() == 0) {
    WARN("skipped: no CUDA device");
    return;
  }
  qe::CudaDevice device(0);
  const int one_way = stale_reads(device, false);
  WARN("one-way: " << one_way << " of " << kHandoffs << " stale");
  CHECK(one_way > 0);
  CHECK(stale_reads(device, true) == 0);
}

// The stream probe on a GPU, with work of known length before the write: a one-way hand-off reads what was there
// before.
#include "tests/stream_probe.h"

#include <cstddef>

#include "kernels/cuda/device.h"
#include "tests/catch.h"

using qe::test::kHandoffs;
using qe::test::stale_reads;

TEST_CASE("on a GPU a one-way hand-off reads stale output, a two-way one never does") {
  if (qe::CudaDevice::count() == 0) {
    WARN("skipped: no CUDA device");
    return;
  }
  qe::CudaDevice device(0);
  constexpr std::size_t kBallast = std::size_t{64} << 20;  // a copy of it takes tens of microseconds
  const qe::Buffer ballast = device.allocate(2 * kBallast, qe::MemoryKind::kWorkspace);
  const auto copy_ballast = [&](qe::Stream& s) {
    device.copy(s, ballast.as<std::byte>() + kBallast, ballast.data(), kBallast);
  };
  const int one_way = stale_reads(device, false, copy_ballast);
  WARN("one-way: " << one_way << " of " << kHandoffs << " stale");
  CHECK(one_way > 0);
  CHECK(stale_reads(device, true, copy_ballast) == 0);
}

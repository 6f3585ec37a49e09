// The paper's stream probe (its figure 2) on any device: a caller reads what a graph on an internal stream writes.
#pragma once

#include <functional>

#include "core/device.h"

namespace qe::test {

inline constexpr int kHandoffs = 200;

// How many of the caller's reads missed the value that the graph of the same hand-off writes. `before` enqueues what
// the graph does ahead of its write.
inline int stale_reads(
    Device& device, bool wait_for_tail, const std::function<void(Stream&)>& before = [](Stream&) {}) {
  const auto caller = device.make_stream("caller");
  const auto inner = device.make_stream("graph");
  const auto ready = device.make_event();
  const auto tail = device.make_event();
  const Buffer input = device.allocate(sizeof(int), MemoryKind::kStep);
  const Buffer output = device.allocate(sizeof(int), MemoryKind::kStep);
  const auto graph = device.capture(*inner, [&] {
    before(*inner);
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

}  // namespace qe::test

// Completion, device half: the two-way hand-off around every call (paper section III, completion).
#pragma once

#include <cstdint>
#include <memory>

#include "core/device.h"

namespace qe {

// The graph stream waits for the caller's position, the caller for the tail of the call: eager and captured alike.
class Handoff {
 public:
  Handoff(Device&, Stream& caller, Stream& graph);
  // Before the call: graph waits for caller.
  void enter();
  // After the call: caller waits for graph.
  void leave();
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }  // enter and leave, one each

 private:
  Device& device_;
  Stream& caller_;
  Stream& graph_;
  std::unique_ptr<Event> caller_ready_;
  std::unique_ptr<Event> tail_;
  std::uint64_t count_ = 0;
};

}  // namespace qe

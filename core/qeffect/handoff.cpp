// Completion, device half: two waits around every call, and nothing else of the device.
#include "core/qeffect/handoff.h"

namespace qe {

Handoff::Handoff(Device& device, Stream& caller, Stream& graph)
    : device_(device), caller_(caller), graph_(graph), caller_ready_(device.make_event()), tail_(device.make_event()) {}

void Handoff::enter() {
  device_.record(*caller_ready_, caller_);
  device_.wait(graph_, *caller_ready_);
  ++count_;
}

void Handoff::leave() {
  device_.record(*tail_, graph_);
  device_.wait(caller_, *tail_);
  ++count_;
}

}  // namespace qe

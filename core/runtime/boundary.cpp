#include "core/runtime/boundary.h"

#include "core/error.h"

namespace qe {

namespace {
StageIndex neighbour(StageIndex s, int step) { return StageIndex{to_int(s) + step}; }
}  // namespace

Boundary::Boundary(Device& device, Transport& transport, QEffect& contract, std::vector<const TransformerStage*> stages,
                   const std::vector<RingDepth>& rings, const std::vector<int>& rank_of_stage, Stream& graph,
                   StepTimeline* timeline)
    : device_(device),
      transport_(transport),
      contract_(contract),
      rank_of_stage_(rank_of_stage),
      graph_(graph),
      timeline_(timeline) {
  for (const TransformerStage* s : stages) {
    const RingDepth& depth = rings.at(static_cast<std::size_t>(to_int(s->index())));
    const std::size_t bytes = s->output(SlotIndex{0}).bytes();
    stages_.push_back({s, make_ring(depth.input, bytes), make_ring(depth.output_grad, bytes), make_outputs(s->slots()),
                       make_outputs(s->slots())});
    // Streams exist before the first step, so that nothing is created on the way.
    if (depth.input > 0) {
      stream_from(rank_of_stage_.at(static_cast<std::size_t>(to_int(s->index()) - 1)));
      stream_to(rank_of_stage_.at(static_cast<std::size_t>(to_int(s->index()) - 1)));
    }
    if (depth.output_grad > 0) {
      stream_from(rank_of_stage_.at(static_cast<std::size_t>(to_int(s->index()) + 1)));
      stream_to(rank_of_stage_.at(static_cast<std::size_t>(to_int(s->index()) + 1)));
    }
  }
}

std::vector<Boundary::RingEntry> Boundary::make_ring(int depth, std::size_t bytes) {
  std::vector<RingEntry> ring;
  for (int i = 0; i < depth; ++i) {
    ring.push_back({device_.allocate(bytes, MemoryKind::kBoundary), device_.make_event(), device_.make_event()});
  }
  return ring;
}

std::vector<Boundary::Output> Boundary::make_outputs(int slots) {
  std::vector<Output> outputs;
  for (int i = 0; i < slots; ++i) outputs.push_back({device_.make_event(), device_.make_event()});
  return outputs;
}

Boundary::StageBoundary* Boundary::find(StageIndex s) {
  for (StageBoundary& b : stages_) {
    if (b.stage->index() == s) return &b;
  }
  return nullptr;
}

Boundary::StageBoundary& Boundary::at(StageIndex s) {
  StageBoundary* b = find(s);
  QE_EXPECTS(b != nullptr, "the stage is of this rank");
  return *b;
}

Stream& Boundary::stream_to(int peer) {
  auto& stream = to_peer_[peer];
  if (!stream) stream = device_.make_stream("to rank " + std::to_string(peer));
  return *stream;
}

Stream& Boundary::stream_from(int peer) {
  auto& stream = from_peer_[peer];
  if (!stream) stream = device_.make_stream("from rank " + std::to_string(peer));
  return *stream;
}

void Boundary::run_message(const Action& a) {
  StageBoundary& b = at(a.stage);
  switch (a.kind) {
    case ActionKind::kSendF:
      return send(b, Direction::kForward, a);
    case ActionKind::kSendB:
      return send(b, Direction::kBackward, a);
    case ActionKind::kRecvF:
      return receive(b, Direction::kForward, a);
    case ActionKind::kRecvB:
      return receive(b, Direction::kBackward, a);
    default:
      break;
  }
  QE_EXPECTS(false, "the action is a message");
}

void Boundary::send(StageBoundary& b, Direction direction, const Action& a) {
  const bool forward = direction == Direction::kForward;
  const SlotIndex slot{to_int(a.microbatch) % b.stage->slots()};
  const Tensor data = forward ? b.stage->output(slot) : b.stage->input_grad(slot);
  const Output& out = (forward ? b.outputs : b.input_grads)[static_cast<std::size_t>(to_int(slot))];
  const int peer = rank_of_stage_.at(static_cast<std::size_t>(to_int(neighbour(a.stage, forward ? 1 : -1))));
  Stream& stream = stream_to(peer);
  device_.wait(stream, *out.produced);
  contract_.begin_use({a.stage, forward ? BoundaryKind::kOutput : BoundaryKind::kInputGrad, to_int(slot)}, a);
  {
    const StepTimeline::Span span(timeline_, stream, "send", [&] { return to_string(a); });
    transport_.send(stream, data.data, data.bytes(), peer, a);
  }
  device_.record(*out.consumed, stream);
}

void Boundary::receive(StageBoundary& b, Direction direction, const Action& a) {
  const bool forward = direction == Direction::kForward;
  auto& ring = forward ? b.input_ring : b.output_grad_ring;
  QE_EXPECTS(!ring.empty(), "a stage that receives has a ring");
  const int index = to_int(a.microbatch) % static_cast<int>(ring.size());
  RingEntry& entry = ring[static_cast<std::size_t>(index)];
  const int peer = rank_of_stage_.at(static_cast<std::size_t>(to_int(neighbour(a.stage, forward ? -1 : 1))));
  Stream& stream = stream_from(peer);
  const BoundaryBuffer buffer{a.stage, forward ? BoundaryKind::kInputRing : BoundaryKind::kOutputGradRing, index};
  device_.wait(stream, *entry.copied);
  contract_.ordered(buffer);
  contract_.begin_use(buffer, a);
  {
    const StepTimeline::Span span(timeline_, stream, "receive", [&] { return to_string(a); });
    transport_.recv(stream, entry.memory.data(), b.stage->output(SlotIndex{0}).bytes(), peer, a);
  }
  device_.record(*entry.received, stream);
}

void Boundary::order_rewrites(const Action& a, SlotIndex slot) {
  StageBoundary& b = at(a.stage);
  const auto i = static_cast<std::size_t>(to_int(slot));
  if (a.kind == ActionKind::kForward) {
    device_.wait(graph_, *b.outputs[i].consumed);
    contract_.ordered({a.stage, BoundaryKind::kOutput, to_int(slot)});
  } else if (a.kind == ActionKind::kInputGrad || a.kind == ActionKind::kFullBackward) {
    device_.wait(graph_, *b.input_grads[i].consumed);
    contract_.ordered({a.stage, BoundaryKind::kInputGrad, to_int(slot)});
  }
}

void Boundary::deliver_inputs(const Action& a, SlotIndex slot) {
  StageBoundary& b = at(a.stage);
  if (a.kind == ActionKind::kForward && !b.stage->range().embedding) {
    deliver(b, Direction::kForward, a, b.stage->input(slot));
  } else if ((a.kind == ActionKind::kInputGrad || a.kind == ActionKind::kFullBackward) && !b.stage->range().head) {
    deliver(b, Direction::kBackward, a, b.stage->output_grad());
  }
}

void Boundary::deliver(StageBoundary& b, Direction direction, const Action& a, const Tensor& to) {
  const bool forward = direction == Direction::kForward;
  if (StageBoundary* from = find(neighbour(a.stage, forward ? -1 : 1)); from != nullptr) {
    const SlotIndex slot{to_int(a.microbatch) % from->stage->slots()};
    const Tensor data = forward ? from->stage->output(slot) : from->stage->input_grad(slot);
    const Output& out = (forward ? from->outputs : from->input_grads)[static_cast<std::size_t>(to_int(slot))];
    device_.wait(graph_, *out.produced);
    contract_.begin_use(
        {from->stage->index(), forward ? BoundaryKind::kOutput : BoundaryKind::kInputGrad, to_int(slot)}, a);
    const StepTimeline::Span span(timeline_, graph_, "compute", [&] { return "copy to " + to_string(a); });
    device_.copy(graph_, to.data, data.data, to.bytes());
    device_.record(*out.consumed, graph_);
    return;
  }
  auto& ring = forward ? b.input_ring : b.output_grad_ring;
  QE_EXPECTS(!ring.empty(), "a stage with a remote neighbour has a ring");
  const int index = to_int(a.microbatch) % static_cast<int>(ring.size());
  const RingEntry& entry = ring[static_cast<std::size_t>(index)];
  const BoundaryBuffer buffer{a.stage, forward ? BoundaryKind::kInputRing : BoundaryKind::kOutputGradRing, index};
  device_.wait(graph_, *entry.received);
  contract_.ordered(buffer);
  contract_.begin_use(buffer, a);
  const StepTimeline::Span span(timeline_, graph_, "compute", [&] { return "copy to " + to_string(a); });
  device_.copy(graph_, to.data, entry.memory.data(), to.bytes());
  device_.record(*entry.copied, graph_);
}

void Boundary::mark_produced(const Action& a, SlotIndex slot) {
  StageBoundary& b = at(a.stage);
  const auto i = static_cast<std::size_t>(to_int(slot));
  if (a.kind == ActionKind::kForward) {
    device_.record(*b.outputs[i].produced, graph_);
  } else if (a.kind == ActionKind::kInputGrad || a.kind == ActionKind::kFullBackward) {
    device_.record(*b.input_grads[i].produced, graph_);
  }
}

void Boundary::synchronize() {
  for (const auto* streams : {&to_peer_, &from_peer_}) {
    for (const auto& [peer, stream] : *streams) device_.synchronize(*stream);
  }
}

}  // namespace qe

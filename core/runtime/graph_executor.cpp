#include "core/runtime/graph_executor.h"

#include "core/error.h"

namespace qe {

namespace {
constexpr int kThisDevice = 0;  // one device a rank
}

GraphExecutor::GraphExecutor(Device& device, Stream& caller, Stream& graph, std::vector<const TransformerStage*> stages,
                             QEffect& contract, const ExecutorConfig& config)
    : device_(device),
      graph_(graph),
      stages_(std::move(stages)),
      contract_(contract),
      config_(config),
      handoff_(device, caller, graph) {}

GraphExecutor::Unit GraphExecutor::unit_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return Unit::kForward;
    case ActionKind::kInputGrad:
      return Unit::kInputGrad;
    case ActionKind::kWeightGrad:
      return Unit::kWeightGrad;
    case ActionKind::kFullBackward:
      return Unit::kFullBackward;
    default:
      break;
  }
  QE_EXPECTS(false, "only compute actions have a unit");
}

const TransformerStage& GraphExecutor::stage(StageIndex index) const { return *stage_of(stages_, index); }

void GraphExecutor::call(const Key& key, std::span<const SlotIndex> slots) const {
  const TransformerStage& s = stage(key.stage);
  switch (key.unit) {
    case Unit::kRefresh:
      return s.refresh(graph_);
    case Unit::kForward:
      return s.forward(graph_, slots.front());
    case Unit::kInputGrad:
      return s.input_grad(graph_, slots.front());
    case Unit::kWeightGrad:
      return s.weight_grad(graph_, slots, key.first_write);
    case Unit::kFullBackward:
      s.input_grad(graph_, slots.front());
      return s.weight_grad(graph_, slots, key.first_write);
    case Unit::kUpdateForward:
      return s.update_scales(graph_, Chain::kForward);
    case Unit::kUpdateBackward:
      return s.update_scales(graph_, Chain::kBackward);
  }
}

void GraphExecutor::capture_unit(const Key& key) {
  std::vector<SlotIndex> slots{SlotIndex{key.slot}};
  if (key.unit == Unit::kWeightGrad) {
    for (int i = 1; i < stage(key.stage).w_group(); ++i) slots.push_back(SlotIndex{key.slot + i});
  }
  if (key.unit == Unit::kWeightGrad || key.unit == Unit::kFullBackward) check_destinations(stage(key.stage), slots);
  graphs_[key] = device_.capture(graph_, [&] { call(key, slots); });
  ++counts_.graphs;
}

void GraphExecutor::capture() {
  if (!config_.captured) return;
  const Unit last = config_.full_backward ? Unit::kFullBackward : Unit::kWeightGrad;
  for (const TransformerStage* s : stages_) {
    capture_unit({s->index(), Unit::kRefresh, 0, false});
    ++counts_.refresh_graphs;
    for (int slot = 0; slot < s->slots(); ++slot) {
      capture_unit({s->index(), Unit::kForward, slot, false});
      if (!config_.full_backward) capture_unit({s->index(), Unit::kInputGrad, slot, false});
      // Slot 0 holds microbatch 0 of every step: a slot that no other microbatch uses needs the first-write form only.
      if (slot % s->w_group() == 0) capture_unit({s->index(), last, slot, slot == 0 && !config_.peak_slots});
    }
    if (s->scales_apart()) {
      for (const Unit update : {Unit::kUpdateForward, Unit::kUpdateBackward}) {
        capture_unit({s->index(), update, 0, false});
        ++counts_.update_graphs;
      }
    }
    if (config_.peak_slots) {
      capture_unit({s->index(), last, 0, true});
      ++counts_.first_write_graphs;
    }
  }
}

void GraphExecutor::check_destinations(const TransformerStage& s, std::span<const SlotIndex> slots) const {
  std::vector<Tensor> actual;
  for (const SlotIndex slot : slots) {
    const MicrobatchIndex m{to_int(slot)};  // with views, slots are per microbatch
    actual.clear();
    for (const int p : s.matrices()) actual.push_back(s.gradients().bound(p, m));
    contract_.check_destinations(s.index(), m, actual, kThisDevice);
  }
}

void GraphExecutor::execute(const Key& key, std::span<const SlotIndex> slots) {
  handoff_.enter();
  if (config_.captured) {
    const auto found = graphs_.find(key);
    QE_EXPECTS(found != graphs_.end(), "every unit of the schedule was captured");
    device_.launch(*found->second, graph_);
    ++counts_.replays;
  } else {
    call(key, slots);
    ++counts_.eager_calls;
  }
  handoff_.leave();
}

void GraphExecutor::refresh(StageIndex index) {
  execute({index, Unit::kRefresh, 0, false}, {});
  counts_.weight_quantize_launches += static_cast<std::uint64_t>(stage(index).weight_quantize_launches());
}

void GraphExecutor::run(const Action& action, std::span<const SlotIndex> slots, bool first_write) {
  const Unit unit = unit_of(action.kind);
  const bool writes = unit == Unit::kWeightGrad || unit == Unit::kFullBackward;
  if (writes) {
    const TransformerStage& s = stage(action.stage);
    if (!config_.captured) check_destinations(s, slots);
    counts_.matrix_copies += static_cast<std::uint64_t>(s.gradients().copies_per_weight_grad());
  }
  execute({action.stage, unit, to_int(slots.front()), writes && first_write}, slots);
}

void GraphExecutor::update_scales(StageIndex index, Chain chain) {
  execute({index, chain == Chain::kForward ? Unit::kUpdateForward : Unit::kUpdateBackward, 0, false}, {});
  ++counts_.updates;
}

void GraphExecutor::evaluate(StageIndex index, SlotIndex slot) {
  handoff_.enter();
  stage(index).evaluate(graph_, slot);
  handoff_.leave();
}

ExecutionCounts GraphExecutor::counts() const noexcept {
  ExecutionCounts c = counts_;
  c.handoffs = handoff_.count();
  return c;
}

}  // namespace qe

#include "core/runtime/step_runner.h"

namespace qe {

StepRunner::StepRunner(Device& device, QEffect& contract, GraphExecutor& executor, Boundary& boundary,
                       std::vector<const TransformerStage*> stages, std::vector<Action> actions, Stream& caller,
                       Stream& graph, std::uint64_t* counters, ScaleUpdate scale_update)
    : device_(device),
      contract_(contract),
      executor_(executor),
      boundary_(boundary),
      stages_(std::move(stages)),
      actions_(std::move(actions)),
      caller_(caller),
      graph_(graph),
      counters_(counters),
      scale_update_(scale_update) {}

void StepRunner::run() {
  device_.zero(caller_, counters_, 2 * stages_.size() * sizeof(std::uint64_t));
  for (const Action& action : actions_) {
    if (is_send(action.kind) || is_recv(action.kind)) {
      boundary_.run_message(action);
    } else if (action.kind == ActionKind::kReduceGrad) {
      reduce(action.stage);
    } else {
      run_compute(action);
    }
  }
  finalize();
}

void StepRunner::run_compute(const Action& action) {
  if (action.kind == ActionKind::kForward && contract_.needs_refresh(action.stage)) refresh(action.stage);
  // Which slot it will be is a pure function of the microbatch, so the waits can be issued before the check of them.
  const TransformerStage* stage = stage_of(stages_, action.stage);
  const SlotIndex slot{to_int(action.microbatch) % stage->slots()};
  boundary_.order_rewrites(action, slot);

  ActionGuard guard = contract_.begin(action);
  if (action.kind == ActionKind::kForward) {
    const std::int32_t microbatch = to_int(action.microbatch);
    device_.upload(graph_, stage->microbatch_cell(slot), &microbatch, sizeof microbatch);
  }
  boundary_.deliver_inputs(action, slot);
  executor_.run(action, guard.slots(), guard.first_write());
  boundary_.mark_produced(action, slot);
  guard.commit();
}

void StepRunner::refresh(StageIndex stage) {
  executor_.refresh(stage);
  for (const CacheLayout layout : {CacheLayout::kRowwise, CacheLayout::kColumnwise, CacheLayout::kBf16Copies}) {
    contract_.mark_refreshed(stage, layout);
  }
}

void StepRunner::reduce(StageIndex stage) {
  // With one replica there is nothing to add; that every gradient is there is checked all the same.
  contract_.begin_reduction(stage);
  contract_.complete_reduction(stage);
}

void StepRunner::finalize() {
  if (scale_update_ == ScaleUpdate::kStep) {
    for (const TransformerStage* s : stages_) {
      executor_.update_scales(s->index(), Chain::kForward);
      executor_.update_scales(s->index(), Chain::kBackward);
    }
  }
  counted_.assign(2 * stages_.size(), 0);
  device_.download(caller_, counted_.data(), counters_, counted_.size() * sizeof(std::uint64_t));
  device_.synchronize();
  contract_.complete_uses();
  contract_.finalize_step(counted_);
}

}  // namespace qe

#include "core/runtime/step_runner.h"

#include "core/error.h"

namespace qe {

StepRunner::StepRunner(Device& device, Transport& transport, QEffect& contract, GraphExecutor& executor,
                       Boundary& boundary, std::vector<const TransformerStage*> stages, std::vector<Action> actions,
                       Stream& caller, Stream& graph, std::uint64_t* counters, ScaleUpdate scale_update,
                       StepHooks* hooks, StepTimeline* timeline)
    : device_(device),
      transport_(transport),
      contract_(contract),
      executor_(executor),
      boundary_(boundary),
      stages_(std::move(stages)),
      actions_(std::move(actions)),
      caller_(caller),
      graph_(graph),
      counters_(counters),
      scale_update_(scale_update),
      hooks_(hooks),
      timeline_(timeline),
      counted_(device.allocate_host(counter_bytes())) {
  if (transport.size(Group::kData) == 1) return;
  reduction_ = device.make_stream("reduction");
  gradients_done_ = device.make_event();
  reductions_done_ = device.make_event();
}

void StepRunner::run() {
  reducing_.clear();
  for (const Action& action : actions_) {
    if (hooks_ != nullptr && !hooks_->before(action, contract_)) continue;
    if (is_send(action.kind) || is_recv(action.kind)) {
      boundary_.run_message(action);
    } else if (action.kind == ActionKind::kReduceGrad) {
      reduce(action.stage);
    } else {
      run_compute(action);
    }
  }
  if (scale_update_ == ScaleUpdate::kStep) update_scales_of_step();
  // On the graph stream, whose end the host waits for in finalize() while the caller stream goes on.
  device_.download(graph_, counted_.get(), counters_, counter_bytes());
  if (reduction_ == nullptr) return;
  device_.record(*reductions_done_, *reduction_);
  device_.wait(caller_, *reductions_done_);
}

void StepRunner::run_compute(const Action& action) {
  if (action.kind == ActionKind::kForward && contract_.needs_refresh(action.stage)) refresh(action.stage);
  // Which slot it will be is a pure function of the microbatch, so the waits can be issued before the check of them.
  const TransformerStage* stage = stage_of(stages_, action.stage);
  const SlotIndex slot{to_int(action.microbatch) % stage->slots()};
  boundary_.order_rewrites(action, slot);

  ActionGuard guard = contract_.begin(action);
  if (action.kind == ActionKind::kForward) stage->set_microbatch(graph_, slot, action.microbatch);
  boundary_.deliver_inputs(action, slot);
  {
    const StepTimeline::Span span(timeline_, graph_, "compute", [&] { return to_string(action); });
    executor_.run(action, guard.slots(), guard.first_write());
  }
  boundary_.mark_produced(action, slot);
  if (hooks_ != nullptr) hooks_->after(action, *stage, device_, graph_);
  if (scale_update_ == ScaleUpdate::kMicrobatch && stage->scales_apart() && action.kind != ActionKind::kWeightGrad) {
    update_scales(*stage, action.kind == ActionKind::kForward ? Chain::kForward : Chain::kBackward);
  }
  guard.commit();
}

void StepRunner::update_scales(const TransformerStage& stage, Chain chain) {
  if (stage.reduces_amaxes()) {
    const Fp8State& state = stage.scaling(chain);
    transport_.all_reduce_max(graph_, state.amaxes(), state.slots(), Group::kData);
  }
  const StepTimeline::Span span(timeline_, graph_, "compute",
                                [&] { return "update " + std::to_string(to_int(stage.index())); });
  executor_.update_scales(stage.index(), chain);
}

void StepRunner::refresh(StageIndex stage) {
  {
    const StepTimeline::Span span(timeline_, graph_, "compute",
                                  [&] { return "refresh " + std::to_string(to_int(stage)); });
    executor_.refresh(stage);
  }
  mark_refreshed(stage);
}

void StepRunner::mark_refreshed(StageIndex stage) {
  for (const CacheLayout layout : {CacheLayout::kRowwise, CacheLayout::kColumnwise, CacheLayout::kBf16Copies}) {
    contract_.mark_refreshed(stage, layout);
  }
}

void StepRunner::reduce(StageIndex stage) {
  contract_.begin_reduction(stage);
  reducing_.push_back(stage);
  if (reduction_ == nullptr) return complete_reductions();  // one replica: nothing to add, nothing in flight
  device_.record(*gradients_done_, graph_);
  device_.wait(*reduction_, *gradients_done_);
  const StepTimeline::Span span(timeline_, *reduction_, "reduce",
                                [&] { return "reduce " + std::to_string(to_int(stage)); });
  for (const ParameterKind kind : {ParameterKind::kMatrix, ParameterKind::kVector}) {
    const Tensor gradients = stage_of(stages_, stage)->gradients().all(kind);
    QE_EXPECTS(gradients.dtype == DType::kF32, "replicas sum FP32 gradients");
    transport_.all_reduce_sum(*reduction_, gradients.as<float>(), gradients.shape.cols, Group::kData);
  }
}

void StepRunner::complete_reductions() {
  for (const StageIndex stage : reducing_) contract_.complete_reduction(stage);
  reducing_.clear();
}

void StepRunner::update_scales_of_step() {
  for (const TransformerStage* s : stages_) {
    if (!s->scales_apart()) continue;
    for (const Chain chain : {Chain::kForward, Chain::kBackward}) {
      if (s->reduces_amaxes()) s->gather_amaxes(graph_, chain);
      update_scales(*s, chain);
    }
  }
}

void StepRunner::finalize() {
  device_.synchronize(graph_);
  boundary_.synchronize();
  if (reduction_ != nullptr) device_.synchronize(*reduction_);
  complete_reductions();
  contract_.complete_uses();
  contract_.finalize_step(counters());
}

}  // namespace qe

// Algorithm 1: a rank's action list through the contract. The only place where contract and arithmetic meet.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/qeffect/qeffect.h"
#include "core/runtime/boundary.h"
#include "core/runtime/graph_executor.h"
#include "core/runtime/step_hooks.h"
#include "core/runtime/step_timeline.h"
#include "core/schedule.h"
#include "core/transport.h"

namespace qe {

class StepRunner {
 public:
  // `actions` is the rank's lowered list. `counters` are the device counters of its stages, {forward, backward} each,
  // which the caller zeroes.
  // `hooks` and `timeline` may be null.
  StepRunner(Device&, Transport&, QEffect&, GraphExecutor&, Boundary&, std::vector<const TransformerStage*> stages,
             std::vector<Action> actions, Stream& caller, Stream& graph, std::uint64_t* counters,
             ScaleUpdate scale_update, StepHooks* hooks, StepTimeline* timeline);

  // Enqueues every action of one optimizer step. What the caller stream does next comes after them: all gradients are
  // then in their main gradients' memory or views.
  void run();
  // The host waits for the actions, not for what the caller stream was given since, and finalizes the epoch. The
  // caller commits.
  void finalize();
  // The stage's cached weights from its masters, and the contract told of it. Before the first F after a commit.
  void refresh(StageIndex);
  void mark_refreshed(StageIndex);  // every layout, by whatever wrote the caches

  // The device counters as the step left them, {forward, backward} of each stage.
  [[nodiscard]] std::span<const std::uint64_t> counters() const noexcept {
    return {reinterpret_cast<const std::uint64_t*>(counted_.get()), 2 * stages_.size()};
  }

 private:
  void run_compute(const Action&);
  void update_scales(const TransformerStage&, Chain);
  void reduce(StageIndex);
  void complete_reductions();
  void update_scales_of_step();
  [[nodiscard]] std::size_t counter_bytes() const noexcept { return 2 * stages_.size() * sizeof(std::uint64_t); }

  Device& device_;
  Transport& transport_;
  QEffect& contract_;
  GraphExecutor& executor_;
  Boundary& boundary_;
  std::vector<const TransformerStage*> stages_;
  std::vector<Action> actions_;
  Stream& caller_;
  Stream& graph_;
  std::uint64_t* counters_;
  ScaleUpdate scale_update_;
  StepHooks* hooks_;
  StepTimeline* timeline_;
  // Replicas only: gradients are summed beside the other stages' work.
  std::unique_ptr<Stream> reduction_;
  std::unique_ptr<Event> gradients_done_, reductions_done_;
  std::vector<StageIndex> reducing_;
  HostMemory counted_;
};

}  // namespace qe

#include "core/runtime/evaluator.h"

namespace qe {

void enqueue_evaluation(Device& device, Stream& graph, QEffect& contract, Boundary& boundary, GraphExecutor& executor,
                        const std::vector<const TransformerStage*>& stages, const std::vector<int>& rank_of_stage,
                        int microbatches) {
  const int last = static_cast<int>(rank_of_stage.size()) - 1;
  const auto owner = [&](int s) { return rank_of_stage[static_cast<std::size_t>(s)]; };
  // Every microbatch passes through slot 0 and ring entry 0: for the boundary each of them is number 0.
  constexpr MicrobatchIndex kBuffer{0};
  constexpr SlotIndex kSlot{0};
  for (int t = 0; t < microbatches + last; ++t) {
    // Descending: a stage reads its same-rank neighbour's output of the time step before, ahead of its rewriting.
    for (std::size_t i = stages.size(); i-- > 0;) {
      const TransformerStage* stage = stages[i];
      const int s = to_int(stage->index());
      const int microbatch = t - s;
      if (microbatch < 0 || microbatch >= microbatches) continue;
      const Action action{ActionKind::kForward, stage->index(), kBuffer};
      if (s > 0 && owner(s - 1) != owner(s)) boundary.run_message({ActionKind::kRecvF, stage->index(), kBuffer});
      boundary.order_rewrites(action, kSlot);
      contract.begin_evaluate(stage->index(), MicrobatchIndex{microbatch});
      stage->set_evaluated(graph, MicrobatchIndex{microbatch});
      boundary.deliver_inputs(action, kSlot);
      executor.evaluate(stage->index(), kSlot);
      boundary.mark_produced(action, kSlot);
      if (s < last && owner(s + 1) != owner(s)) boundary.run_message({ActionKind::kSendF, stage->index(), kBuffer});
    }
  }
}

}  // namespace qe

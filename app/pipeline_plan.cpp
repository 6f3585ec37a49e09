#include "app/pipeline_plan.h"

#include <algorithm>

namespace qe {

namespace {

bool has_groups(const Schedule& lists) {
  return std::any_of(lists.actions.begin(), lists.actions.end(), [](const std::vector<Action>& list) {
    return std::any_of(list.begin(), list.end(), [](const Action& a) { return a.count > 1; });
  });
}

}  // namespace

Schedule make_lists(const Config& config) {
  const PipelineSection& p = config.pipeline;
  Schedule lists =
      p.csv_lists ? with_backward(*p.csv_lists, p.backward) : make_schedule(p.schedule, config.shape(), p.backward);
  return has_groups(lists) ? lists : group_weight_grads(std::move(lists), config.gradients.w_group);
}

RankPlan make_rank_plan(const Config& config) {
  RankPlan plan;
  plan.schedule = make_lists(config);
  if (!is_lowered(plan.schedule)) plan.schedule = lower(plan.schedule);
  validate(plan.schedule);
  const Resources needs = resources(plan.schedule);
  for (const StageResources& s : needs.stages) {
    plan.slots.push_back(config.pipeline.tape_slots == TapeSlots::kPeak ? s.peak_slots() : config.microbatches());
    plan.rings.push_back({s.forward_ring, s.backward_ring});
  }
  return plan;
}

RankConfig make_rank_config(const Config& config) {
  RankConfig rank;
  rank.stage = config.stage_config();
  rank.optimizer = {.beta1 = static_cast<float>(config.optimizer.adam_beta1),
                    .beta2 = static_cast<float>(config.optimizer.adam_beta2),
                    .epsilon = static_cast<float>(config.optimizer.adam_eps),
                    .weight_decay = static_cast<float>(config.optimizer.weight_decay),
                    .clip_grad = static_cast<float>(config.optimizer.clip_grad),
                    .moments = config.optimizer.moments_dtype,
                    .seed = static_cast<std::uint64_t>(config.training.seed)};
  rank.captured = config.execution.mode == ExecutionMode::kGraph;
  rank.full_backward = config.pipeline.backward == Backward::kFull;
  rank.peak_slots = config.pipeline.tape_slots == TapeSlots::kPeak;
  rank.ranges = cut_into_stages(config.model.num_layers, config.shape().stages(), config.pipeline.layers_per_stage);
  return rank;
}

int update_graphs(const Config& config, const Schedule& schedule, int pipeline_rank) {
  const RankConfig rank = make_rank_config(config);
  int graphs = 0;
  for (std::size_t s = 0; s < schedule.rank_of_stage.size(); ++s) {
    if (schedule.rank_of_stage[s] == pipeline_rank && scales_apart(rank.stage, rank.ranges[s])) graphs += 2;
  }
  return graphs;
}

}  // namespace qe

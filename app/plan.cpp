#include "app/plan.h"

#include <algorithm>

#include "app/pipeline_plan.h"

namespace qe {
namespace {

std::int64_t parameter_count(const Config& config, const StageRange& range) {
  std::int64_t count = 0;
  for (const Parameter& p : stage_parameters(config.stage_config(), range)) count += p.real_rows * p.shape.cols;
  return count;
}

// Around every compute action, and around refreshes and scale updates where a step has them as units of their own.
std::int64_t handoffs(const RankConfig& config, const std::vector<Action>& list, const std::vector<int>& stages) {
  const auto apart = [&](int stage) {
    return scales_apart(config.stage, config.ranges[static_cast<std::size_t>(stage)]);
  };
  const bool once = config.stage.fp8.scale_update == ScaleUpdate::kStep;
  std::int64_t calls = 0;
  const bool refreshes = !caches_follow_update(config.stage);
  for (const int stage : stages) calls += (refreshes ? 1 : 0) + (once && apart(stage) ? 2 : 0);
  for (const Action& action : list) {
    if (!is_compute(action.kind)) continue;
    const bool updates = !once && action.kind != ActionKind::kWeightGrad && apart(to_int(action.stage));
    calls += updates ? 2 : 1;
  }
  return 2 * calls;
}

Prediction predict(const Plan& plan, const PlanCosts& costs, const RankConfig& config) {
  const Timeline line = simulate(plan.lowered, cost_by_stage(stage_costs(costs, config.stage, config.ranges)));
  Prediction p;
  p.lists = line.makespan;
  p.bubble = line.bubble();
  for (const PlannedRank& rank : plan.ranks) {
    p.optimizer = std::max(p.optimizer, costs.optimizer * static_cast<double>(rank.parameters) * 1e-6);
  }
  p.step = p.lists + p.optimizer;
  return p;
}

}  // namespace

std::size_t Plan::most_bytes() const noexcept {
  std::size_t most = 0;
  for (const PlannedRank& rank : ranks) most = std::max(most, rank.footprint.total());
  return most;
}

Plan make_plan(const Config& config, const PlanCosts& costs) {
  const RankPlan rank_plan = make_rank_plan(config);
  const RankConfig rank_config = make_rank_config(config);
  const Resources need = resources(rank_plan.schedule);
  Plan plan;
  plan.lists = make_lists(config);
  plan.lowered = rank_plan.schedule;
  const StageConfig stage = config.stage_config();
  plan.boundary_bytes = std::int64_t{stage.tokens()} * stage.model.hidden_size *
                        static_cast<std::int64_t>(size_of(stage.activation_type()));
  plan.ranks.resize(plan.lowered.actions.size());
  for (std::size_t s = 0; s < need.stages.size(); ++s) {
    const int rank = plan.lowered.rank_of_stage[s];
    const std::int64_t parameters = parameter_count(config, rank_config.ranges[s]);
    plan.stages.push_back({rank, rank_config.ranges[s], parameters, need.stages[s], rank_plan.slots[s]});
    PlannedRank& of_rank = plan.ranks[static_cast<std::size_t>(rank)];
    of_rank.stages.push_back(static_cast<int>(s));
    of_rank.parameters += parameters;
    plan.parameters += parameters;
  }
  const std::vector<int> delayed = delayed_weight_grads(plan.lowered);
  for (std::size_t r = 0; r < plan.ranks.size(); ++r) {
    PlannedRank& rank = plan.ranks[r];
    rank.need = need.ranks[r];
    rank.delayed_w = delayed[r];
    rank.footprint = lay_out(rank_config, rank_plan, static_cast<int>(r), config.parallel.data);
    rank.handoffs = handoffs(rank_config, plan.lowered.actions[r], rank.stages);
  }
  plan.prediction = predict(plan, costs, rank_config);
  return plan;
}

}  // namespace qe

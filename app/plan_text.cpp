// A plan for people: tables, the grid of the lists over time, the prediction. Owns wording only.
#include <algorithm>

#include "app/config_keys.h"
#include "app/plan.h"
#include "app/plan_table.h"

namespace qe {
namespace {

constexpr int kMostGridRanks = 16;  // more columns than a screen has would not be read

std::string value_of(const Config& config, const char* path) {
  for (const KeySpec& key : key_table()) {
    if (key.path() != path) continue;
    const Json value = key.get(config);
    return value.is_string() ? value.get<std::string>() : value.dump();
  }
  return "";
}

std::string layers_text(const StageRange& range) {
  const int last = range.first_layer + range.num_layers - 1;
  std::string text = std::to_string(range.first_layer);
  if (range.num_layers > 1) text += " to " + std::to_string(last);
  if (range.embedding) text = "embedding, " + text;
  if (range.head) text += ", head";
  return text;
}

std::string heading(const Config& c, const Plan& plan) {
  const auto value = [&](const char* path) { return value_of(c, path); };
  std::string text = c.name + ": " + value("model.num_layers") + " layers, hidden " + value("model.hidden_size") +
                     ", ffn " + value("model.ffn_hidden_size") + ", vocabulary " + value("model.vocab_size") + ", " +
                     grouped(plan.parameters) + " parameters, " + value("precision.compute") + " with a head in " +
                     value("head.precision") + "\n";
  if (!c.precision.bf16_layers.empty()) text += "Layers " + value("precision.bf16_layers") + " in bf16\n";
  const PipelineShape& shape = plan.lowered.shape;
  text += "Schedule " + value("pipeline.schedule");
  if (!c.pipeline.schedule_csv.empty()) text += " " + c.pipeline.schedule_csv;
  text += ", backward " + value("pipeline.backward") + ", P " + std::to_string(shape.ranks) + ", V " +
          std::to_string(shape.chunks_per_rank) + ", M " + std::to_string(shape.microbatches);
  if (c.gradients.w_group > 1) text += ", W groups of " + value("gradients.w_group");
  if (c.parallel.data > 1) text += ", " + value("parallel.data") + " replicas";
  text += "; gradients " + value("gradients.placement") + ", tape slots " + value("pipeline.tape_slots") + ", mode " +
          value("execution.mode") + "\n";
  text += "A microbatch is " + value("training.micro_batch_size") + " x " + value("training.seq_length") +
          " tokens, a step " + grouped(c.tokens_per_step()) + "; a message " + grouped(plan.boundary_bytes) +
          " bytes\n";
  return text;
}

std::string stage_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows{
      {"stage", "rank", "layers", "parameters", "peak tapes", "slots", "pending W", "ring in", "ring back"}};
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const PlannedStage& stage = plan.stages[s];
    rows.push_back({std::to_string(s), std::to_string(stage.rank), layers_text(stage.range), grouped(stage.parameters),
                    std::to_string(stage.need.peak_tapes), std::to_string(stage.slots),
                    std::to_string(stage.need.peak_pending_w), std::to_string(stage.need.forward_ring),
                    std::to_string(stage.need.backward_ring)});
  }
  return table(rows);
}

std::string rank_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows{{"rank", "stages", "peak tapes", "pending W", "delayed W", "sent",
                                              "received", "graphs", "first-write", "refresh", "handoffs"}};
  for (std::size_t r = 0; r < plan.ranks.size(); ++r) {
    const PlannedRank& rank = plan.ranks[r];
    std::string stages;
    for (const int s : rank.stages) stages += (stages.empty() ? "" : " ") + std::to_string(s);
    rows.push_back({std::to_string(r), stages, std::to_string(rank.need.peak_tapes),
                    std::to_string(rank.need.peak_pending_w), std::to_string(rank.delayed_w),
                    std::to_string(rank.need.messages_out), std::to_string(rank.need.messages_in),
                    std::to_string(rank.footprint.graphs), std::to_string(rank.footprint.first_write_graphs),
                    std::to_string(rank.footprint.refresh_graphs), std::to_string(rank.handoffs)});
  }
  return table(rows);
}

std::string byte_table(const Plan& plan) {
  std::vector<std::string> names{"rank"};
  for (std::size_t k = 0; k < kMemoryKinds; ++k) {
    std::string name = name_of(static_cast<MemoryKind>(k));
    std::replace(name.begin(), name.end(), '_', ' ');
    names.push_back(name);
  }
  names.push_back("all");
  std::vector<std::vector<std::string>> rows{names};
  for (std::size_t r = 0; r < plan.ranks.size(); ++r) {
    const RankFootprint& footprint = plan.ranks[r].footprint;
    auto& row = rows.emplace_back(1, std::to_string(r));
    for (const std::size_t bytes : footprint.bytes) row.push_back(mebibytes(bytes));
    row.push_back(mebibytes(footprint.total()));
  }
  return table(rows);
}

// A row a unit of time, a column a rank, every F, I and W one unit long.
std::string time_grid(const Plan& plan) {
  const Timeline line = simulate(plan.lowered, cost_of(UniformCosts{}));
  const auto units = static_cast<std::size_t>(line.makespan);
  std::vector<std::vector<std::string>> rows(units + 1);
  rows[0].push_back("time");
  for (std::size_t t = 0; t < units; ++t) rows[t + 1].push_back(std::to_string(t));
  for (std::size_t r = 0; r < plan.lowered.actions.size(); ++r) {
    rows[0].push_back("rank " + std::to_string(r));
    for (std::size_t t = 1; t < rows.size(); ++t) rows[t].push_back(".");
    for (std::size_t i = 0; i < plan.lowered.actions[r].size(); ++i) {
      const Interval& interval = line.intervals[r][i];
      const Action& action = plan.lowered.actions[r][i];
      for (auto t = static_cast<std::size_t>(interval.start);
           is_compute(action.kind) && static_cast<double>(t) < interval.finish; ++t) {
        rows[t + 1].back() = to_string(action);
      }
    }
  }
  return table(rows);
}

std::string prediction_text(const Plan& plan, const PlanCosts& costs) {
  const Prediction& p = plan.prediction;
  const std::string unit = costs.measured ? " ms" : " units";
  std::string text = "Prediction from " + costs.source + "\n";
  text += "  lists " + decimals(p.lists, 3) + unit + ", bubble " + decimals(100 * p.bubble, 1) + "%";
  if (costs.measured) text += "; optimizer " + decimals(p.optimizer, 3) + unit;
  text += "; step " + decimals(p.step, 3) + unit + "\n";
  return text;
}

}  // namespace

std::string plan_text(const Config& config, const Plan& plan, const PlanCosts& costs) {
  std::string text = heading(config, plan);
  text += "\nStages\n" + stage_table(plan);
  text += "\nRanks, of one step\n" + rank_table(plan);
  text += "\nMemory in MiB; a CUDA device has a workspace for matrix products besides\n" + byte_table(plan);
  if (plan.lowered.shape.ranks <= kMostGridRanks) {
    text += "\nLists, every F, I and W one unit long\n" + time_grid(plan);
  } else {
    text += "\nThe lists of " + std::to_string(plan.lowered.shape.ranks) + " ranks are printed by --csv compute\n";
  }
  return text + "\n" + prediction_text(plan, costs);
}

}  // namespace qe

#include "app/plan_compare.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "app/plan_table.h"
#include "core/error.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMostChunks = 8;  // deeper interleaving is all messages

struct Choice {
  ScheduleKind kind;
  int chunks_per_rank;
};

// Interleaved with one chunk is left out: 1f1b is the same with fewer tapes.
std::vector<Choice> choices(const Config& config) {
  std::vector<Choice> all{
      {ScheduleKind::kGpipe, 1}, {ScheduleKind::k1F1B, 1}, {ScheduleKind::kZbv, 2}, {ScheduleKind::kZb1p, 1}};
  for (int chunks = 2; chunks <= kMostChunks; chunks *= 2) {
    if (chunks * config.pipeline.pipeline_model_parallel_size > config.model.num_layers) break;
    all.push_back({ScheduleKind::kInterleaved1F1B, chunks});
    all.push_back({ScheduleKind::kZb1p, chunks});
  }
  if (config.pipeline.csv_lists) all.push_back({ScheduleKind::kCsv, config.pipeline.csv_lists->shape.chunks_per_rank});
  return all;
}

// The config with another schedule, through the reader, so that what train refuses is refused here in the same words.
Config with_choice(const Config& config, const Candidate& c) {
  Json root = Json::parse(dump_config(config));
  Json& pipeline = root["pipeline"];
  const int stages = config.pipeline.pipeline_model_parallel_size * c.chunks_per_rank;
  pipeline["schedule"] = name_of(c.kind);
  if (c.kind != ScheduleKind::kCsv) pipeline.erase("schedule_csv");
  pipeline["virtual_pipeline_model_parallel_size"] = c.chunks_per_rank;
  pipeline["backward"] = c.backward == Backward::kSplit ? "split" : "full";
  if (std::ssize(config.pipeline.layers_per_stage) != stages) pipeline.erase("layers_per_stage");
  root["training"]["global_batch_size"] =
      std::int64_t{c.microbatches} * config.training.micro_batch_size * config.parallel.data;
  return parse_config(root.dump(), config.name + ".json");
}

// The first fault alone, without the head line that counts them.
std::string reason(const std::string& message) {
  const std::size_t first = message.find('\n');
  const std::string faults = first == std::string::npos ? message : message.substr(first + 1);
  const std::string line = faults.substr(0, faults.find('\n'));
  return line.substr(std::min(line.find_first_not_of(' '), line.size()));
}

Candidate judge(const Config& config, const Choice& choice, Backward backward, const PlanCosts& costs) {
  Candidate c{.kind = choice.kind, .chunks_per_rank = choice.chunks_per_rank, .backward = backward};
  c.microbatches = config.microbatches();
  const PipelineShape shape{config.pipeline.pipeline_model_parallel_size, choice.chunks_per_rank, c.microbatches};
  if (const int nearest = nearest_microbatches(choice.kind, shape); nearest != c.microbatches) {
    c.refusal = why_not(choice.kind, shape);
    c.microbatches = nearest;
  }
  try {
    const Config other = with_choice(config, c);
    const Plan plan = make_plan(other, costs);
    c.possible = true;
    c.step = plan.prediction.step;
    c.bubble = plan.prediction.bubble;
    c.most_bytes = plan.most_bytes();
    for (const PlannedRank& rank : plan.ranks) {
      c.peak_tapes = std::max(c.peak_tapes, rank.need.peak_tapes);
      c.graphs = std::max(c.graphs, rank.footprint.graphs);
    }
  } catch (const ConfigError& e) {
    c.refusal = reason(e.what());
  }
  return c;
}

}  // namespace

std::vector<Candidate> compare_schedules(const Config& config, const PlanCosts& costs) {
  std::vector<Candidate> all;
  for (const Choice& choice : choices(config)) {
    for (const Backward backward : {Backward::kSplit, Backward::kFull}) {
      all.push_back(judge(config, choice, backward, costs));
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    if (a.possible != b.possible) return a.possible;
    if (a.per_microbatch() != b.per_microbatch()) return a.per_microbatch() < b.per_microbatch();
    return a.most_bytes < b.most_bytes;
  });
  return all;
}

std::string compare_text(const Config& config, const std::vector<Candidate>& all, const PlanCosts& costs) {
  const std::string unit = costs.measured ? "ms" : "units";
  std::string text = config.name + ": schedules on " + std::to_string(config.ranks()) + " rank(s), P " +
                     std::to_string(config.pipeline.pipeline_model_parallel_size) + ", M " +
                     std::to_string(config.microbatches()) + ", fastest a microbatch first\n";
  std::vector<std::vector<std::string>> rows{{"schedule", "V", "backward", "M", "step " + unit, "a microbatch",
                                              "bubble %", "peak tapes", "graphs", "MiB a rank", "note"}};
  for (const Candidate& c : all) {
    const auto shown = [&](const std::string& cell) { return c.possible ? cell : std::string("-"); };
    rows.push_back({name_of(c.kind), std::to_string(c.chunks_per_rank),
                    c.backward == Backward::kSplit ? "split" : "full", std::to_string(c.microbatches),
                    shown(decimals(c.step, 2)), shown(decimals(c.possible ? c.per_microbatch() : 0, 3)),
                    shown(decimals(100 * c.bubble, 1)), shown(std::to_string(c.peak_tapes)),
                    shown(std::to_string(c.graphs)), shown(mebibytes(c.most_bytes)), c.refusal});
  }
  return text + table(rows) + "Predicted from " + costs.source + "\n";
}

std::string compare_json(const Config& config, const std::vector<Candidate>& all, const PlanCosts& costs) {
  Json rows = Json::array();
  for (const Candidate& c : all) {
    Json row{{"schedule", name_of(c.kind)},
             {"chunks_per_rank", c.chunks_per_rank},
             {"backward", c.backward == Backward::kSplit ? "split" : "full"},
             {"microbatches", c.microbatches},
             {"possible", c.possible},
             {"refusal", c.refusal}};
    if (c.possible) {
      row.update(Json{{"step", c.step},
                      {"per_microbatch", c.per_microbatch()},
                      {"bubble", c.bubble},
                      {"peak_tapes", c.peak_tapes},
                      {"graphs", c.graphs},
                      {"bytes", c.most_bytes}});
    }
    rows.push_back(row);
  }
  const Json root{{"schema_version", 1},
                  {"config", Json::parse(dump_config(config))},
                  {"cost_source", costs.source},
                  {"unit", costs.measured ? "ms" : "layer action"},
                  {"schedules", rows}};
  return root.dump(2) + "\n";
}

}  // namespace qe

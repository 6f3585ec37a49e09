// A plan for programs: configs/schema/plan.schema.json. Owns the form only.
#include <nlohmann/json.hpp>

#include "app/plan.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchemaVersion = 1;

Json json_of(const Schedule& schedule) {
  Json lists = Json::array();
  for (const auto& list : schedule.actions) {
    Json& texts = lists.emplace_back(Json::array());
    for (const Action& action : list) texts.push_back(to_string(action));
  }
  return lists;
}

Json json_of(std::size_t index, const PlannedStage& s) {
  return {{"stage", index},
          {"rank", s.rank},
          {"first_layer", s.range.first_layer},
          {"layers", s.range.num_layers},
          {"embedding", s.range.embedding},
          {"head", s.range.head},
          {"parameters", s.parameters},
          {"peak_tapes", s.need.peak_tapes},
          {"peak_pending_w", s.need.peak_pending_w},
          {"tape_slots", s.slots},
          {"input_ring", s.need.forward_ring},
          {"output_grad_ring", s.need.backward_ring}};
}

Json json_of(std::size_t index, const PlannedRank& r) {
  Json bytes = Json::object();
  for (std::size_t k = 0; k < kMemoryKinds; ++k) bytes[name_of(static_cast<MemoryKind>(k))] = r.footprint.bytes[k];
  return {{"rank", index},
          {"stages", r.stages},
          {"parameters", r.parameters},
          {"peak_tapes", r.need.peak_tapes},
          {"peak_pending_w", r.need.peak_pending_w},
          {"delayed_w", r.delayed_w},
          {"messages_out", r.need.messages_out},
          {"messages_in", r.need.messages_in},
          {"graphs", r.footprint.graphs},
          {"first_write_graphs", r.footprint.first_write_graphs},
          {"refresh_graphs", r.footprint.refresh_graphs},
          {"handoffs", r.handoffs},
          {"bytes_by_kind", bytes},
          {"bytes", r.footprint.total()}};
}

template <class Items>
Json json_list(const Items& items) {
  Json list = Json::array();
  for (std::size_t i = 0; i < items.size(); ++i) list.push_back(json_of(i, items[i]));
  return list;
}

}  // namespace

std::string plan_json(const Config& config, const Plan& plan, const PlanCosts& costs) {
  const Prediction& p = plan.prediction;
  const PipelineShape& shape = plan.lowered.shape;
  const Json root{{"schema_version", kSchemaVersion},
                  {"config", Json::parse(dump_config(config))},
                  {"derived",
                   {{"microbatches", config.microbatches()},
                    {"ranks", config.ranks()},
                    {"tokens_per_step", config.tokens_per_step()},
                    {"parameters", plan.parameters},
                    {"message_bytes", plan.boundary_bytes}}},
                  {"schedule",
                   {{"name", name_of(config.pipeline.schedule)},
                    {"ranks", shape.ranks},
                    {"chunks_per_rank", shape.chunks_per_rank},
                    {"microbatches", shape.microbatches},
                    {"lists", json_of(plan.lowered)}}},
                  {"stages", json_list(plan.stages)},
                  {"resources", json_list(plan.ranks)},
                  {"prediction",
                   {{"cost_source", costs.source},
                    {"unit", costs.measured ? "ms" : "layer action"},
                    {"makespan", p.lists},
                    {"bubble", p.bubble},
                    {"optimizer", p.optimizer},
                    {"step", p.step}}}};
  return root.dump(2) + "\n";
}

}  // namespace qe

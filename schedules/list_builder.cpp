// Stage placement and the numbering list. Owns no schedule.
#include "schedules/list_builder.h"

namespace qe {

std::vector<int> loop_placement(const PipelineShape& shape) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < shape.stages(); ++stage) rank_of_stage.push_back(stage % shape.ranks);
  return rank_of_stage;
}

std::vector<int> v_placement(const PipelineShape& shape) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < shape.stages(); ++stage) {
    rank_of_stage.push_back(stage < shape.ranks ? stage : 2 * shape.ranks - 1 - stage);
  }
  return rank_of_stage;
}

ListBuilder::ListBuilder(const PipelineShape& shape)
    : microbatches_(shape.microbatches),
      forwards_(static_cast<std::size_t>(shape.stages())),
      input_grads_(forwards_.size()),
      weight_grads_(forwards_.size()) {}

void ListBuilder::append(ActionKind kind, int stage, std::vector<int>& counts) {
  const int microbatch = counts.at(static_cast<std::size_t>(stage))++;
  if (microbatch < microbatches_) list_.push_back({kind, StageIndex{stage}, MicrobatchIndex{microbatch}});
}

}  // namespace qe

// Schedule: one action list per rank and the stage → rank map. Data only; makers, lowering and validation live in
// schedules/.
#pragma once

#include <vector>

#include "core/action.h"

namespace qe {

struct PipelineShape {
  int ranks = 1;            // P
  int chunks_per_rank = 1;  // V
  int microbatches = 1;     // M
  [[nodiscard]] int stages() const noexcept { return ranks * chunks_per_rank; }
  bool operator==(const PipelineShape&) const = default;
};

struct Schedule {
  PipelineShape shape;
  std::vector<int> rank_of_stage;            // [S]
  std::vector<std::vector<Action>> actions;  // [P][...]

  [[nodiscard]] int rank_of(StageIndex s) const { return rank_of_stage.at(static_cast<std::size_t>(to_int(s))); }
  [[nodiscard]] StageIndex last_stage() const noexcept { return StageIndex{shape.stages() - 1}; }
  bool operator==(const Schedule&) const = default;
};

}  // namespace qe

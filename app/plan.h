// What a config will do, before anything runs: layout, lists, memory, graphs and predicted time of every rank.
// Owns the numbers; app/plan_text and app/plan_json show them. Needs no GPU, no MPI and no data file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/config.h"
#include "app/plan_costs.h"
#include "app/plan_memory.h"
#include "schedules/schedules.h"

namespace qe {

struct PlannedStage {
  int rank = 0;
  StageRange range;
  std::int64_t parameters = 0;  // without padding
  StageResources need;
  int slots = 0;
};

struct PlannedRank {
  std::vector<int> stages;
  RankResources need;
  int delayed_w = 0;  // Ws that do not directly follow their I in the list
  RankFootprint footprint;
  std::int64_t parameters = 0;
  std::int64_t handoffs = 0;  // of one step, enter and leave one each
};

// Milliseconds when the costs were measured, else units.
struct Prediction {
  double lists = 0;      // makespan of the action lists
  double bubble = 0;     // of that, the mean share in which a rank does not work
  double optimizer = 0;  // of the slowest rank, after all lists are done
  double step = 0;       // both
};

struct Plan {
  Schedule lists;    // compute only, unless a csv file holds messages
  Schedule lowered;  // what runs
  std::vector<PlannedStage> stages;
  std::vector<PlannedRank> ranks;  // of one replica; replicas are alike
  std::int64_t parameters = 0;
  std::int64_t boundary_bytes = 0;  // of one message
  Prediction prediction;

  [[nodiscard]] std::size_t most_bytes() const noexcept;  // of any rank
};

// Throws as train does for what cannot run.
Plan make_plan(const Config&, const PlanCosts&);

std::string plan_text(const Config&, const Plan&, const PlanCosts&);
std::string plan_json(const Config&, const Plan&, const PlanCosts&);

}  // namespace qe

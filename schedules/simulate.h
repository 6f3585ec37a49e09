// The time line of a schedule from the cost of each action: what a plan predicts and a bubble is measured against.
// Owns no costs: whoever measured them says what an action takes.
#pragma once

#include <functional>
#include <vector>

#include "core/schedule.h"

namespace qe {

// Any unit of time, not negative. Asked for compute actions and REDUCE_GRAD (time on the rank) and for SENDs (time on
// the directed edge, during which both ranks go on).
using CostOf = std::function<double(const Action&)>;

struct UniformCosts {
  double forward = 1, input_grad = 1, weight_grad = 1;  // a W over n microbatches costs n of them; B costs I + W
  double message = 0, reduce = 0;
};
CostOf cost_of(const UniformCosts&);

// Stages that differ: in layers, or by the embedding and the head.
struct StageCosts {
  double forward = 0, input_grad = 0, weight_grad = 0;
  double before_first_forward = 0;  // once a step: the refresh of cached weights
};
struct ScheduleCosts {
  std::vector<StageCosts> stages;  // [S]
  double message = 0, reduce = 0;
};
CostOf cost_by_stage(ScheduleCosts costs);

struct Interval {
  double start = 0, finish = 0;
};

struct Timeline {
  double makespan = 0;
  std::vector<std::vector<Interval>> intervals;  // parallel to Schedule::actions; a message's is the transfer's
  std::vector<double> busy;                      // [P] time in compute actions and REDUCE_GRAD
  std::vector<double> idle;                      // [P] waiting between the rank's first and last of these
  // Mean share of the makespan that a rank does not work.
  [[nodiscard]] double bubble() const;
};

// Ranks run their lists in order; only an F, I or B waits, for its message. A transfer starts when its SEND and its
// RECV have been reached and the edge's previous transfer is over. Throws ScheduleError as validate() does.
Timeline simulate(const Schedule& lowered, const CostOf&);

}  // namespace qe

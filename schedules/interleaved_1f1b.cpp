// Interleaved 1F1B: V chunks a rank in loop placement, microbatches in rounds of G, forward before backward.
// With V = 1 this is not classic 1F1B: its warm-up is 2(P-1-r). Owns the order of compute actions only
// (semantics.md 3.2).
#include "schedules/list_builder.h"
#include "schedules/looped_steps.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {

Schedule make_interleaved_1f1b(const PipelineShape& shape) {
  require_possible(ScheduleKind::kInterleaved1F1B, shape);
  Schedule schedule{shape, loop_placement(shape), {}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    ListBuilder list(shape);
    const LoopedSteps steps(shape, rank);
    const int warm_up = steps.warm_up(2);
    for (int k = 0; k < steps.count() + warm_up; ++k) {
      if (k < steps.count()) list.forward(steps.forward_stage(k));
      if (k >= warm_up) list.input_and_weight_grad(steps.backward_stage(k - warm_up));
    }
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

}  // namespace qe

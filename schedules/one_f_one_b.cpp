// Classic 1F1B: one stage a rank, P-r forwards of warm-up, then one backward and one forward in turn.
// Owns the order of compute actions only (semantics.md 3.2).
#include <algorithm>

#include "schedules/list_builder.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {

Schedule make_1f1b(const PipelineShape& shape) {
  require_possible(ScheduleKind::k1F1B, shape);
  Schedule schedule{shape, loop_placement(shape), {}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    ListBuilder list(shape);
    const int warm_up = std::min(shape.ranks - rank, shape.microbatches);
    for (int k = 0; k < warm_up; ++k) list.forward(rank);
    while (list.input_grads(rank) < shape.microbatches) {
      list.input_and_weight_grad(rank);
      if (list.forwards(rank) < shape.microbatches) list.forward(rank);
    }
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

}  // namespace qe

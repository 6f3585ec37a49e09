// GPipe: one stage a rank, all forwards, then all backwards. Backwards ascend, unlike the GPipe paper's: the reversed
// order would reverse the order of the scaling state. Owns the order of compute actions only (semantics.md 3.1).
#include "schedules/list_builder.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {

Schedule make_gpipe(const PipelineShape& shape) {
  require_possible(ScheduleKind::kGpipe, shape);
  Schedule schedule{shape, loop_placement(shape), {}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    ListBuilder list(shape);
    for (int k = 0; k < shape.microbatches; ++k) list.forward(rank);
    for (int k = 0; k < shape.microbatches; ++k) list.input_and_weight_grad(rank);
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

}  // namespace qe

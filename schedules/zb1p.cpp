// ZB1P (ZB-H1 with one chunk): interleaved 1F1B with half the warm-up slope; rank r holds r weight gradients back, so
// that its input gradients leave earlier. Owns the order of compute actions only (semantics.md 3.5).
#include "schedules/list_builder.h"
#include "schedules/looped_steps.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {

Schedule make_zb1p(const PipelineShape& shape) {
  require_possible(ScheduleKind::kZb1p, shape);
  Schedule schedule{shape, loop_placement(shape), {}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    ListBuilder list(shape);
    const LoopedSteps steps(shape, rank);
    const int warm_up = steps.warm_up(1);
    for (int k = 0; k < steps.count() + warm_up; ++k) {
      if (k < steps.count()) list.forward(steps.forward_stage(k));
      if (k >= warm_up) list.input_grad(steps.backward_stage(k - warm_up));
      if (k >= warm_up + rank) list.weight_grad(steps.backward_stage(k - warm_up - rank));  // the oldest
    }
    for (int k = std::max(0, steps.count() - rank); k < steps.count(); ++k) list.weight_grad(steps.backward_stage(k));
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

}  // namespace qe

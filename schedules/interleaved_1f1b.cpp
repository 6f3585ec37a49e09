// Interleaved 1F1B: V chunks a rank in loop placement, microbatches in rounds of G, forward before backward.
// With V = 1 this is not classic 1F1B: its warm-up is 2(P-1-r). Owns the order of compute actions only
// (semantics.md 3.2).
#include <algorithm>

#include "schedules/list_builder.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {

Schedule make_interleaved_1f1b(const PipelineShape& shape) {
  require_possible(ScheduleKind::kInterleaved1F1B, shape);
  const int ranks = shape.ranks;
  const int chunks = shape.chunks_per_rank;
  const int steps = shape.microbatches * chunks;
  const int group = shape.microbatches / std::max(1, shape.microbatches / ranks);  // microbatches in a round

  Schedule schedule{shape, loop_placement(shape), {}};
  for (int rank = 0; rank < ranks; ++rank) {
    ListBuilder list(shape);
    const auto forward = [&](int step) { list.forward(step / group % chunks * ranks + rank); };
    const auto backward = [&](int step) {
      list.input_and_weight_grad((chunks - 1 - step / group % chunks) * ranks + rank);
    };
    const int warm_up = std::min((chunks - 1) * group + 2 * (ranks - 1 - rank), steps);
    for (int k = 0; k < warm_up; ++k) forward(k);
    for (int k = warm_up; k < steps; ++k) {
      forward(k);
      backward(k - warm_up);
    }
    for (int k = steps - warm_up; k < steps; ++k) backward(k);
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

}  // namespace qe

// ZB-V: two chunks a rank in V placement, W split off so that it fills what would be bubbles at F = I = W.
// Owns the order of compute actions only (semantics.md 3.3).
#include <algorithm>

#include "schedules/list_builder.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {
namespace {

std::vector<Action> list_of_rank(const PipelineShape& shape, int rank) {
  const int down = rank;                      // the chunk on the way to the fold
  const int up = 2 * shape.ranks - 1 - rank;  // the chunk on the way back
  const int to_last = shape.ranks - rank;
  const int planned = std::max(2 * shape.ranks - 1, shape.microbatches);  // the list drops what exceeds M
  ListBuilder list(shape);

  for (int k = 0; k < 2 * to_last - 1; ++k) list.forward(down);
  for (int k = 0; k < rank; ++k) {
    list.forward(up);
    list.forward(down);
  }
  for (int k = 0; k < to_last; ++k) {
    list.forward(up);
    list.input_and_weight_grad(up);
  }
  while (list.forwards(up) < list.forwards(down) || list.forwards(down) < planned) {
    if (list.forwards(down) < planned) list.forward(down);
    list.input_and_weight_grad(down);
    list.forward(up);
    list.input_and_weight_grad(up);
  }
  for (int k = 0; k < rank; ++k) {
    list.input_grad(down);
    list.input_grad(up);
  }
  for (int k = 0; k < to_last; ++k) list.input_and_weight_grad(down);
  while (list.weight_grads(up) < list.input_grads(up)) list.weight_grad(up);
  while (list.weight_grads(down) < list.input_grads(down)) list.weight_grad(down);
  return list.take();
}

}  // namespace

Schedule make_zbv(const PipelineShape& shape) {
  require_possible(ScheduleKind::kZbv, shape);
  Schedule schedule{shape, v_placement(shape), {}};
  for (int rank = 0; rank < shape.ranks; ++rank) schedule.actions.push_back(list_of_rank(shape, rank));
  return schedule;
}

}  // namespace qe

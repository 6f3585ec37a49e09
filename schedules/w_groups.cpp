// W groups (design.md 4): a fixed partition of microbatch indices, each part one W. Owns the rewriting of a compute
// list; what a group computes is the stage's business.
#include "core/error.h"
#include "schedules/schedules.h"

namespace qe {

Schedule group_weight_grads(Schedule schedule, int group) {
  if (group < 1 || schedule.shape.microbatches % group != 0) {
    throw ScheduleError("W groups of " + std::to_string(group) + " do not divide " +
                        std::to_string(schedule.shape.microbatches) + " microbatches; use a divisor.");
  }
  // A group stands where its last member stood: by then the I of every member is done, in any valid list.
  for (auto& list : schedule.actions) {
    std::erase_if(list, [group](const Action& a) {
      return a.kind == ActionKind::kWeightGrad && (to_int(a.microbatch) + 1) % group != 0;
    });
    for (Action& action : list) {
      if (action.kind != ActionKind::kWeightGrad) continue;
      action.microbatch = MicrobatchIndex{to_int(action.microbatch) + 1 - group};
      action.count = group;
    }
  }
  return schedule;
}

}  // namespace qe

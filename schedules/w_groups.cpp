// W groups (design.md 4): a fixed partition of microbatch indices, each part one W. Owns the rewriting of a compute
// list; what a group computes is the stage's business.
#include <algorithm>

#include "core/error.h"
#include "schedules/schedules.h"

namespace qe {

namespace {

// A stage's last group is a long action that only its own update waits for, while the rank's remaining input gradients
// hold up the ranks before it: those that another rank waits for go first. No F is left by then, so no tape is held for
// more microbatches.
void put_off_last_groups(const Schedule& schedule, std::vector<Action>& list) {
  const auto awaited = [&](const Action& a) {
    const int stage = to_int(a.stage);
    return a.kind == ActionKind::kInputGrad && stage > 0 &&
           schedule.rank_of(StageIndex{stage - 1}) != schedule.rank_of(a.stage);
  };
  const auto last_awaited = std::find_if(list.rbegin(), list.rend(), awaited).base();
  std::stable_partition(list.begin(), last_awaited, [&](const Action& a) {
    return a.kind != ActionKind::kWeightGrad || to_int(a.microbatch) + a.count != schedule.shape.microbatches;
  });
}

}  // namespace

Schedule group_weight_grads(Schedule schedule, int group) {
  if (group < 1 || schedule.shape.microbatches % group != 0) {
    throw ScheduleError("W groups of " + std::to_string(group) + " do not divide " +
                        std::to_string(schedule.shape.microbatches) + " microbatches; use a divisor.");
  }
  if (group == 1) return schedule;
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
    put_off_last_groups(schedule, list);
  }
  return schedule;
}

}  // namespace qe

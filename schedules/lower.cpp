// Lowering: adds REDUCE_GRAD, SEND and RECV to compute lists. Owns where communication stands, not what is computed.
// A message is placed on both lists at one moment, when its SEND is: all lists then agree with one global order, so
// neither blocking receives nor per-edge FIFO can deadlock. A receiver never places its own RECV.
#include <algorithm>

#include "schedules/messages.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {
namespace {

void require_compute_only(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.shape.ranks; ++rank) {
    const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!is_compute(list[i].kind)) {
        fail_at(schedule, rank, static_cast<int>(i), "lowering adds communication itself, give it F, I, W and B only");
      }
    }
  }
}

class Lowering {
 public:
  explicit Lowering(const Schedule& compute)
      : source_(with_reductions(compute)),
        result_{compute.shape, compute.rank_of_stage, {}},
        next_(source_.actions.size()),
        forward_input_(static_cast<std::size_t>(compute.shape.stages()) * microbatches()),
        backward_input_(forward_input_.size()) {
    result_.actions.resize(source_.actions.size());
  }

  // Round robin over ranks in rank order, one action a turn.
  Schedule run() {
    std::size_t left = 0;
    for (const auto& list : source_.actions) left += list.size();
    while (left > 0) {
      bool progress = false;
      for (std::size_t rank = 0; rank < source_.actions.size(); ++rank) {
        const auto& list = source_.actions[rank];
        if (next_[rank] == list.size() || !is_ready(list[next_[rank]])) continue;
        place(rank, list[next_[rank]++]);
        --left;
        progress = true;
      }
      if (!progress) fail_stuck();
    }
    return std::move(result_);
  }

 private:
  [[nodiscard]] std::size_t microbatches() const { return static_cast<std::size_t>(source_.shape.microbatches); }
  [[nodiscard]] std::size_t cell(StageIndex stage, MicrobatchIndex microbatch) const {
    return static_cast<std::size_t>(to_int(stage)) * microbatches() + static_cast<std::size_t>(to_int(microbatch));
  }

  [[nodiscard]] bool is_ready(const Action& action) const {
    switch (action.kind) {
      case ActionKind::kForward:
        return action.stage == StageIndex{0} || forward_input_[cell(action.stage, action.microbatch)];
      case ActionKind::kInputGrad:
      case ActionKind::kFullBackward:
        return action.stage == source_.last_stage() || backward_input_[cell(action.stage, action.microbatch)];
      default:
        return true;
    }
  }

  void place(std::size_t rank, const Action& action) {
    result_.actions[rank].push_back(action);
    if (action.kind == ActionKind::kWeightGrad || action.kind == ActionKind::kReduceGrad) return;
    const StageIndex peer = peer_stage(action);
    if (to_int(peer) < 0 || peer > source_.last_stage()) return;
    (action.kind == ActionKind::kForward ? forward_input_ : backward_input_)[cell(peer, action.microbatch)] = true;
    if (!crosses_ranks(source_, action)) return;
    const Action send = send_of(action);
    result_.actions[rank].push_back(send);
    result_.actions[static_cast<std::size_t>(source_.rank_of(peer))].push_back(recv_of(send));
  }

  [[noreturn]] void fail_stuck() const {
    std::size_t rank = 0;
    while (next_[rank] == source_.actions[rank].size()) ++rank;
    const Action& head = source_.actions[rank][next_[rank]];
    const bool forward = head.kind == ActionKind::kForward;
    const int supplier = to_int(head.stage) + (forward ? -1 : 1);
    fail_at(source_, static_cast<int>(rank), static_cast<int>(next_[rank]),
            "no rank can go on, this one waits for the " + std::string(forward ? "output" : "input gradient") +
                " of stage " + std::to_string(supplier) + " for microbatch " + std::to_string(to_int(head.microbatch)) +
                ", which is missing or stands behind an action that waits too");
  }

  Schedule source_, result_;
  std::vector<std::size_t> next_;                     // [P] head of each source list
  std::vector<bool> forward_input_, backward_input_;  // [S × M] the input is on the stage's rank
};

}  // namespace

Schedule with_reductions(const Schedule& lists) {
  Schedule result{lists.shape, lists.rank_of_stage, {}};
  std::vector<int> done(static_cast<std::size_t>(lists.shape.stages()));
  for (const auto& list : lists.actions) {
    auto& out = result.actions.emplace_back();
    for (const Action& action : list) {
      out.push_back(action);
      if (action.kind != ActionKind::kWeightGrad && action.kind != ActionKind::kFullBackward) continue;
      int& count = done[static_cast<std::size_t>(to_int(action.stage))];
      const bool was_complete = count >= lists.shape.microbatches;
      count += action.count;
      if (!was_complete && count >= lists.shape.microbatches) out.push_back({ActionKind::kReduceGrad, action.stage});
    }
  }
  return result;
}

bool is_lowered(const Schedule& schedule) {
  return std::any_of(schedule.actions.begin(), schedule.actions.end(), [](const std::vector<Action>& list) {
    return std::any_of(list.begin(), list.end(), [](const Action& action) { return !is_compute(action.kind); });
  });
}

Schedule lower(const Schedule& compute) {
  require_well_formed(compute);
  require_compute_only(compute);
  return Lowering(compute).run();
}

}  // namespace qe

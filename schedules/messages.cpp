// Neighbour rules of a pipeline. Owns no lists.
#include "schedules/messages.h"

namespace qe {

StageIndex peer_stage(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
    case ActionKind::kSendF:
    case ActionKind::kRecvB:
      return StageIndex{to_int(action.stage) + 1};
    default:
      return StageIndex{to_int(action.stage) - 1};
  }
}

bool crosses_ranks(const Schedule& schedule, const Action& action) {
  if (action.kind == ActionKind::kWeightGrad || action.kind == ActionKind::kReduceGrad) return false;
  const int peer = to_int(peer_stage(action));
  if (peer < 0 || peer >= schedule.shape.stages()) return false;
  return schedule.rank_of(StageIndex{peer}) != schedule.rank_of(action.stage);
}

Action send_of(const Action& compute) {
  const bool forward = compute.kind == ActionKind::kForward;
  return {forward ? ActionKind::kSendF : ActionKind::kSendB, compute.stage, compute.microbatch};
}

Action recv_of(const Action& send) {
  const bool forward = send.kind == ActionKind::kSendF;
  return {forward ? ActionKind::kRecvF : ActionKind::kRecvB, peer_stage(send), send.microbatch};
}

}  // namespace qe

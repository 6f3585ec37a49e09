// What a lowered schedule will hold at once: tapes, pending W, ring entries, graphs. Owns counting only; no bytes.
#include <algorithm>

#include "schedules/schedules.h"

namespace qe {
namespace {

struct Level {
  int now = 0, peak = 0;
  void add(int n) {
    now += n;
    peak = std::max(peak, now);
  }
};

struct Levels {
  Level tapes, pending_w, input_grads, forward_ring, backward_ring;
};

// A receive ring's entry is free once the consumer's call has copied it out. A neighbour on the same rank hands its
// tensor over without a ring, so there the level would fall below zero and stay without a peak.
void count(const Action& action, Levels& stage, Levels& rank) {
  switch (action.kind) {
    case ActionKind::kForward:
      stage.tapes.add(1);
      rank.tapes.add(1);
      stage.forward_ring.add(-1);
      break;
    case ActionKind::kInputGrad:
      stage.pending_w.add(1);
      rank.pending_w.add(1);
      stage.backward_ring.add(-1);
      break;
    case ActionKind::kWeightGrad:
      stage.pending_w.add(-action.count);
      rank.pending_w.add(-action.count);
      stage.tapes.add(-action.count);
      rank.tapes.add(-action.count);
      break;
    case ActionKind::kFullBackward:
      stage.tapes.add(-1);
      rank.tapes.add(-1);
      stage.backward_ring.add(-1);
      break;
    case ActionKind::kRecvF:
      stage.forward_ring.add(1);
      break;
    case ActionKind::kRecvB:
      stage.backward_ring.add(1);
      break;
    default:
      break;
  }
}

bool is_backward(ActionKind kind) { return kind == ActionKind::kInputGrad || kind == ActionKind::kFullBackward; }

// An input gradient waits in its slot for SEND_B, or for the I or B of a neighbour on the same rank.
void count_input_grads(const Schedule& schedule, const Action& action, std::vector<Levels>& stages) {
  const auto s = static_cast<std::size_t>(to_int(action.stage));
  if (action.kind == ActionKind::kSendB) stages.at(s).input_grads.add(-1);
  if (!is_backward(action.kind)) return;
  const bool reads_neighbour =
      action.stage < schedule.last_stage() && schedule.rank_of_stage[s] == schedule.rank_of_stage[s + 1];
  if (reads_neighbour) stages.at(s + 1).input_grads.add(-1);
  if (s > 0) stages.at(s).input_grads.add(1);
}

int graphs_per_group(const std::vector<Action>& list, StageIndex stage, int slots) {
  bool forward = false, input_grad = false, full = false;
  int group = 0;
  for (const Action& action : list) {
    if (action.stage != stage) continue;
    forward |= action.kind == ActionKind::kForward;
    input_grad |= action.kind == ActionKind::kInputGrad;
    full |= action.kind == ActionKind::kFullBackward;
    if (action.kind == ActionKind::kWeightGrad) group = std::max(group, action.count);
  }
  return slots * (forward + input_grad + full) + (group == 0 ? 0 : slots / group);
}

}  // namespace

Resources resources(const Schedule& lowered) {
  Resources result;
  std::vector<Levels> stages(static_cast<std::size_t>(lowered.shape.stages()));
  result.stages.resize(stages.size());
  for (const auto& list : lowered.actions) {
    Levels rank;
    RankResources& totals = result.ranks.emplace_back();
    for (const Action& action : list) {
      const auto s = static_cast<std::size_t>(to_int(action.stage));
      count(action, stages.at(s), rank);
      count_input_grads(lowered, action, stages);
      if (action.kind == ActionKind::kWeightGrad) {
        result.stages[s].w_group = std::max(result.stages[s].w_group, action.count);
      }
      totals.messages_out += is_send(action.kind);
      totals.messages_in += is_recv(action.kind);
    }
    totals.peak_tapes = rank.tapes.peak;
    totals.peak_pending_w = rank.pending_w.peak;
  }
  for (std::size_t s = 0; s < stages.size(); ++s) {
    result.stages[s].peak_tapes = stages[s].tapes.peak;
    result.stages[s].peak_pending_w = stages[s].pending_w.peak;
    result.stages[s].peak_input_grads = stages[s].input_grads.peak;
    result.stages[s].forward_ring = stages[s].forward_ring.peak;
    result.stages[s].backward_ring = stages[s].backward_ring.peak;
  }
  return result;
}

std::vector<int> delayed_weight_grads(const Schedule& schedule) {
  std::vector<int> delayed;
  for (const auto& list : schedule.actions) {
    int& count_of_rank = delayed.emplace_back(0);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].kind != ActionKind::kWeightGrad) continue;
      const Action own_i{ActionKind::kInputGrad, list[i].stage,
                         MicrobatchIndex{to_int(list[i].microbatch) + list[i].count - 1}};
      count_of_rank += i == 0 || list[i - 1] != own_i;
    }
  }
  return delayed;
}

GraphCount graph_count(const Schedule& lowered, int rank, bool peak_slots) {
  const Resources need = resources(lowered);
  GraphCount count;
  for (int stage = 0; stage < lowered.shape.stages(); ++stage) {
    if (lowered.rank_of(StageIndex{stage}) != rank) continue;
    const StageResources& r = need.stages[static_cast<std::size_t>(stage)];
    const int slots = peak_slots ? r.peak_slots() : lowered.shape.microbatches;
    count.compute += graphs_per_group(lowered.actions.at(static_cast<std::size_t>(rank)), StageIndex{stage}, slots);
    count.first_write += peak_slots;
    ++count.refresh;
  }
  return count;
}

}  // namespace qe

// The proof that a lowered schedule is safe to run: each list alone, then the messages between lists, then progress.
// Owns no repair: it accepts or names the first faulty cell.
#include <deque>
#include <map>
#include <utility>

#include "schedules/messages.h"
#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {
namespace {

std::string number(int value) { return std::to_string(value); }

// Everything ascends, so a counter per stage says exactly which microbatches are done.
struct StageProgress {
  int forwards = 0, input_grads = 0, weight_grads = 0;
  int sent_f = 0, received_f = 0, sent_b = 0, received_b = 0;
  bool reduced = false;
};

// One rank's list: completeness, ascending order, local dependencies.
class ListCheck {
 public:
  ListCheck(const Schedule& schedule, int rank)
      : schedule_(schedule), rank_(rank), stages_(static_cast<std::size_t>(schedule.shape.stages())) {}

  void run() {
    for (const Action& action : schedule_.actions[static_cast<std::size_t>(rank_)]) {
      check(action);
      ++position_;
    }
    for (int stage = 0; stage < schedule_.shape.stages(); ++stage) {
      if (schedule_.rank_of(StageIndex{stage}) == rank_) require_complete(stage);
    }
  }

 private:
  StageProgress& of(StageIndex stage) { return stages_[static_cast<std::size_t>(to_int(stage))]; }
  [[noreturn]] void fail(const std::string& what) const { fail_at(schedule_, rank_, position_, what); }
  void require(bool condition, const char* what) const {
    if (!condition) fail(what);
  }

  void check(const Action& action) {
    StageProgress& stage = of(action.stage);
    const int m = to_int(action.microbatch);
    switch (action.kind) {
      case ActionKind::kForward:
        require_input(action);
        advance(stage.forwards, action);
        break;
      case ActionKind::kInputGrad:
        require_gradient(action);
        advance(stage.input_grads, action);
        break;
      case ActionKind::kFullBackward:
        require_gradient(action);
        advance(stage.input_grads, action);
        advance(stage.weight_grads, action);
        break;
      case ActionKind::kWeightGrad:
        require(stage.input_grads >= m + action.count, "W comes before the I of its microbatch");
        advance(stage.weight_grads, action);
        break;
      case ActionKind::kSendF:
        check_message(action, stage.sent_f, stage.forwards, "SEND_F comes before the F that makes its tensor");
        break;
      case ActionKind::kSendB:
        check_message(action, stage.sent_b, stage.input_grads, "SEND_B comes before the I or B that makes its tensor");
        break;
      case ActionKind::kRecvF:
        check_message(action, stage.received_f, m + 1, "");
        break;
      case ActionKind::kRecvB:
        check_message(action, stage.received_b, m + 1, "");
        break;
      case ActionKind::kReduceGrad:
        require(!stage.reduced, "the stage's gradients were reduced before, one REDUCE_GRAD a stage is wanted");
        require(stage.weight_grads == schedule_.shape.microbatches, "REDUCE_GRAD comes before the stage's last W");
        stage.reduced = true;
        break;
    }
  }

  // F needs the output of the stage before: received, or made on this rank.
  void require_input(const Action& f) {
    if (f.stage == StageIndex{0}) return;
    const StageIndex before{to_int(f.stage) - 1};
    const bool local = schedule_.rank_of(before) == rank_;
    require((local ? of(before).forwards : of(f.stage).received_f) > to_int(f.microbatch),
            local ? "F comes before the F of the stage before it" : "F comes before its RECV_F");
  }

  // I and B need their own F and the input gradient of the stage after.
  void require_gradient(const Action& backward) {
    const int m = to_int(backward.microbatch);
    require(of(backward.stage).forwards > m, "the backward comes before the F of its microbatch");
    if (backward.stage == schedule_.last_stage()) return;
    const StageIndex after{to_int(backward.stage) + 1};
    const bool local = schedule_.rank_of(after) == rank_;
    require(
        (local ? of(after).input_grads : of(backward.stage).received_b) > m,
        local ? "the backward comes before the I or B of the stage after it" : "the backward comes before its RECV_B");
  }

  void check_message(const Action& message, int& next, int available, const char* too_early) {
    require(crosses_ranks(schedule_, message),
            "there is no such message: the neighbour stage is on this rank or missing");
    require(available > to_int(message.microbatch), too_early);
    advance(next, message);
  }

  void advance(int& next, const Action& action) const {
    const int m = to_int(action.microbatch);
    if (m != next) {
      fail((m < next ? "this microbatch was done before, microbatch " : "microbatches ascend, microbatch ") +
           (next < schedule_.shape.microbatches ? number(next) + " is due" : "none is due"));
    }
    next += action.count;
  }

  // A missing RECV needs no line here: the F, I or B that wants it failed already.
  void require_complete(int stage) const {
    const StageProgress& done = stages_[static_cast<std::size_t>(stage)];
    const auto require_all = [&](int count, const char* what) {
      if (count < schedule_.shape.microbatches) fail("stage " + number(stage) + " lacks " + what + number(count));
    };
    const auto has = [&](ActionKind message) { return crosses_ranks(schedule_, {message, StageIndex{stage}}); };
    require_all(done.forwards, "the F of microbatch ");
    require_all(done.input_grads, "the I or B of microbatch ");
    require_all(done.weight_grads, "the W of microbatch ");
    if (has(ActionKind::kSendF)) require_all(done.sent_f, "the SEND_F of microbatch ");
    if (has(ActionKind::kSendB)) require_all(done.sent_b, "the SEND_B of microbatch ");
    if (!done.reduced) fail("stage " + number(stage) + " lacks its REDUCE_GRAD");
  }

  const Schedule& schedule_;
  const int rank_;
  int position_ = 0;
  std::vector<StageProgress> stages_;  // [S], used where the stage is on this rank
};

using Edge = std::pair<int, int>;  // sender, receiver

Edge edge_of(const Schedule& schedule, const Action& message) {
  const int here = schedule.rank_of(message.stage);
  const int peer = schedule.rank_of(peer_stage(message));
  return is_send(message.kind) ? Edge{here, peer} : Edge{peer, here};
}

// A directed edge is a FIFO: the k-th RECV must answer the k-th SEND.
void check_edges(const Schedule& schedule) {
  std::map<Edge, std::vector<Action>> sent;
  for (const auto& list : schedule.actions) {
    for (const Action& action : list) {
      if (is_send(action.kind)) sent[edge_of(schedule, action)].push_back(action);
    }
  }
  std::map<Edge, std::size_t> received;
  for (int rank = 0; rank < schedule.shape.ranks; ++rank) {
    const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!is_recv(list[i].kind)) continue;
      const Edge edge = edge_of(schedule, list[i]);
      // In range: the list checks proved that every message has both ends exactly once.
      const Action& send = sent[edge].at(received[edge]++);
      if (recv_of(send) != list[i]) {
        fail_at(schedule, rank, static_cast<int>(i),
                "rank " + number(edge.first) + " sends " + to_string(send) + " at this place of its order, so " +
                    to_string(recv_of(send)) + " is due");
      }
    }
  }
}

// Runs the lists with receives that block and sends that do not. Compute never waits: the list checks cover it.
class Progress {
 public:
  explicit Progress(const Schedule& schedule)
      : schedule_(schedule), position_(schedule.actions.size()), waits_(schedule.actions.size()) {}

  void run() {
    std::deque<int> runnable;
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) runnable.push_back(rank);
    while (!runnable.empty()) {
      const int rank = runnable.front();
      runnable.pop_front();
      advance(rank, runnable);
    }
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      if (waits_[static_cast<std::size_t>(rank)]) fail_cycle(rank);
    }
  }

 private:
  [[nodiscard]] const Action& head(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return schedule_.actions[r][position_[r]];
  }

  void advance(int rank, std::deque<int>& runnable) {
    const auto r = static_cast<std::size_t>(rank);
    waits_[r] = false;
    for (; position_[r] < schedule_.actions[r].size(); ++position_[r]) {
      const Action& action = head(rank);
      if (is_send(action.kind)) {
        const Edge edge = edge_of(schedule_, action);
        ++in_flight_[edge];
        if (waits_[static_cast<std::size_t>(edge.second)]) runnable.push_back(edge.second);
      } else if (is_recv(action.kind)) {
        int& waiting = in_flight_[edge_of(schedule_, action)];
        if (waiting == 0) {
          waits_[r] = true;
          return;
        }
        --waiting;
      }
    }
  }

  // Follows "waits for" until a rank repeats: every stuck rank leads into a cycle, since finished ranks sent
  // everything.
  [[noreturn]] void fail_cycle(int rank) const {
    for (int step = 0; step < schedule_.shape.ranks; ++step) rank = edge_of(schedule_, head(rank)).first;
    std::string chain;
    int at = rank;
    do {
      const int sender = edge_of(schedule_, head(at)).first;
      chain += (chain.empty() ? "" : ", ") + ("rank " + number(at)) + " waits in " + to_string(head(at)) +
               " for rank " + number(sender);
      at = sender;
    } while (at != rank);
    fail_at(schedule_, rank, static_cast<int>(position_[static_cast<std::size_t>(rank)]),
            "the ranks wait in a cycle: " + chain);
  }

  const Schedule& schedule_;
  std::vector<std::size_t> position_;  // [P]
  std::vector<bool> waits_;            // [P]
  std::map<Edge, int> in_flight_;
};

}  // namespace

void validate(const Schedule& lowered) {
  require_well_formed(lowered);
  for (int rank = 0; rank < lowered.shape.ranks; ++rank) ListCheck(lowered, rank).run();
  check_edges(lowered);
  Progress(lowered).run();
}

}  // namespace qe

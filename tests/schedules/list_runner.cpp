// Executes lists one action at a time with mailboxes. Sets of names instead of the validator's counters, on purpose.
#include "tests/schedules/list_runner.h"

#include <deque>
#include <map>
#include <set>

namespace qe_test {
namespace {

using qe::Action;
using qe::ActionKind;

struct Fault {
  std::string what;
};

std::string name(const char* what, int stage, int microbatch) {
  return std::string(what) + "/" + std::to_string(stage) + "/" + std::to_string(microbatch);
}

class Runner {
 public:
  explicit Runner(const qe::Schedule& schedule)
      : schedule_(schedule), at_(schedule.actions.size()), holds_(schedule.actions.size()) {}

  void run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
        while (at_[index(rank)] < schedule_.actions[index(rank)].size() &&
               step(rank, schedule_.actions[index(rank)][at_[index(rank)]])) {
          ++at_[index(rank)];
          progress = true;
        }
      }
    }
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      if (at_[index(rank)] != schedule_.actions[index(rank)].size()) throw Fault{"stuck"};
    }
    for (const auto& [edge, letters] : mail_) {
      if (!letters.empty()) throw Fault{"undelivered " + letters.front()};
    }
    for (int stage = 0; stage < schedule_.shape.stages(); ++stage) {
      if (!done_.contains(name("reduce", stage, 0))) throw Fault{"unreduced stage"};
    }
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  int owner(int stage) const {
    if (stage < 0 || stage >= schedule_.shape.stages()) throw Fault{"no stage"};
    return schedule_.rank_of_stage[index(stage)];
  }
  void need(int rank, const std::string& thing) {
    if (!holds_[index(rank)].contains(thing)) throw Fault{"missing " + thing};
  }
  // Makes a thing once, and only after the same thing of the microbatch before it.
  void make(const char* what, int stage, int microbatch) {
    if (microbatch > 0 && !done_.contains(name(what, stage, microbatch - 1))) throw Fault{"not ascending"};
    if (!done_.insert(name(what, stage, microbatch)).second) throw Fault{"made twice"};
  }

  void forward(int rank, int stage, int m) {
    if (stage > 0) need(rank, name("y", stage - 1, m));
    make("f", stage, m);
    holds_[index(rank)].insert(name("y", stage, m));
    holds_[index(rank)].insert(name("tape", stage, m));
  }
  void input_grad(int rank, int stage, int m) {
    if (stage + 1 < schedule_.shape.stages()) need(rank, name("dx", stage + 1, m));
    need(rank, name("tape", stage, m));
    make("i", stage, m);
    holds_[index(rank)].insert(name("dx", stage, m));
    holds_[index(rank)].insert(name("dy", stage, m));
  }
  void weight_grad(int rank, int stage, int m) {
    need(rank, name("dy", stage, m));
    make("w", stage, m);
    holds_[index(rank)].erase(name("tape", stage, m));
  }
  void reduce(int stage) {
    for (int m = 0; m < schedule_.shape.microbatches; ++m) {
      if (!done_.contains(name("w", stage, m))) throw Fault{"reduced early"};
    }
    make("reduce", stage, 0);
  }
  void send(int rank, int to_stage, const char* what, int stage, int m) {
    const int to = owner(to_stage);
    if (to == rank) throw Fault{"message to itself"};
    need(rank, name(what, stage, m));
    make(what[0] == 'y' ? "send_y" : "send_dx", stage, m);
    mail_[{rank, to}].push_back(name(what, stage, m));
  }
  bool receive(int rank, int from_stage, const char* what, int m) {
    const int from = owner(from_stage);
    if (from == rank) throw Fault{"message from itself"};
    auto& letters = mail_[{from, rank}];
    if (letters.empty()) return false;
    if (letters.front() != name(what, from_stage, m)) throw Fault{"wrong letter"};
    holds_[index(rank)].insert(letters.front());
    letters.pop_front();
    return true;
  }

  bool step(int rank, const Action& action) {
    const int stage = to_int(action.stage);
    const int m = to_int(action.microbatch);
    if (owner(stage) != rank) throw Fault{"wrong rank"};
    if (m < 0 || m + action.count > schedule_.shape.microbatches) throw Fault{"no microbatch"};
    if (action.count < 1 || (action.count > 1 && action.kind != ActionKind::kWeightGrad)) throw Fault{"bad count"};
    switch (action.kind) {
      case ActionKind::kForward:
        forward(rank, stage, m);
        return true;
      case ActionKind::kInputGrad:
        input_grad(rank, stage, m);
        return true;
      case ActionKind::kWeightGrad:
        for (int k = 0; k < action.count; ++k) weight_grad(rank, stage, m + k);
        return true;
      case ActionKind::kFullBackward:
        input_grad(rank, stage, m);
        weight_grad(rank, stage, m);
        return true;
      case ActionKind::kSendF:
        send(rank, stage + 1, "y", stage, m);
        return true;
      case ActionKind::kSendB:
        send(rank, stage - 1, "dx", stage, m);
        return true;
      case ActionKind::kRecvF:
        return receive(rank, stage - 1, "y", m);
      case ActionKind::kRecvB:
        return receive(rank, stage + 1, "dx", m);
      case ActionKind::kReduceGrad:
        if (m != 0) throw Fault{"reduction with a microbatch"};
        reduce(stage);
        return true;
    }
    throw Fault{"unknown kind"};
  }

  const qe::Schedule& schedule_;
  std::vector<std::size_t> at_;
  std::vector<std::set<std::string>> holds_;
  std::set<std::string> done_;
  std::map<std::pair<int, int>, std::deque<std::string>> mail_;
};

}  // namespace

std::string run_lists(const qe::Schedule& lowered) {
  try {
    Runner(lowered).run();
  } catch (const Fault& fault) {
    return fault.what;
  }
  return "";
}

}  // namespace qe_test

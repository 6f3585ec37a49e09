// Discrete simulation of a lowered schedule. Owns when things happen, never whether they may: validate() says that.
#include "schedules/simulate.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "schedules/messages.h"
#include "schedules/schedules.h"

namespace qe {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();

// One message, seen by its receiver: F's is the stage's input, I's and B's the stage's output gradient.
struct Message {
  double sent = kUnknown, posted = kUnknown, arrived = kUnknown;
  double consumed = kUnknown;  // start of the F, I or B that takes it out of the ring
  Interval* at_sender = nullptr;
  Interval* at_receiver = nullptr;
  double cost = 0;
};

bool takes_input(const Action& action) { return is_compute(action.kind) && action.kind != ActionKind::kWeightGrad; }

class Simulation {
 public:
  Simulation(const Schedule& schedule, const CostOf& cost)
      : schedule_(schedule),
        cost_(cost),
        need_(resources(schedule)),
        next_(schedule.actions.size()),
        clock_(schedule.actions.size()) {
    const auto cells =
        static_cast<std::size_t>(schedule.shape.stages()) * static_cast<std::size_t>(schedule.shape.microbatches);
    forward_.resize(cells);
    backward_.resize(cells);
    result_.busy.resize(schedule.actions.size());
    result_.idle.resize(schedule.actions.size());
    for (const auto& list : schedule.actions) result_.intervals.emplace_back(list.size());
  }

  Timeline run() {
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) runnable_.push_back(rank);
    while (!runnable_.empty()) {
      const int rank = runnable_.front();
      runnable_.pop_front();
      advance(rank);
    }
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) finish(rank);
    return std::move(result_);
  }

 private:
  Message& message(bool forward, StageIndex receiver, MicrobatchIndex microbatch) {
    const auto cell =
        static_cast<std::size_t>(to_int(receiver)) * static_cast<std::size_t>(schedule_.shape.microbatches) +
        static_cast<std::size_t>(to_int(microbatch));
    return (forward ? forward_ : backward_)[cell];
  }

  // Runs the rank until its end or until a message is missing; whoever completes that message brings the rank back.
  void advance(int rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (; next_[r] < schedule_.actions[r].size(); ++next_[r]) {
      const Action& action = schedule_.actions[r][next_[r]];
      Interval& interval = result_.intervals[r][next_[r]];
      if (is_send(action.kind)) {
        Message& m = message(action.kind == ActionKind::kSendF, peer_stage(action), action.microbatch);
        m.sent = clock_[r];
        m.cost = cost_(action);
        m.at_sender = &interval;
        transfer(m, rank, schedule_.rank_of(peer_stage(action)));
      } else if (is_recv(action.kind)) {
        Message& m = message(action.kind == ActionKind::kRecvF, action.stage, action.microbatch);
        m.posted = entry_free(action);
        m.at_receiver = &interval;
        transfer(m, schedule_.rank_of(peer_stage(action)), rank);
      } else {
        const double ready = input_time(action);
        if (ready == kUnknown) return;
        work(r, action, interval, ready);
      }
    }
  }

  // The ring's depth makes the consumer of the entry's previous message stand before this RECV in the list.
  double entry_free(const Action& receive) {
    const bool forward = receive.kind == ActionKind::kRecvF;
    const StageResources& stage = need_.stages[static_cast<std::size_t>(to_int(receive.stage))];
    const int previous = to_int(receive.microbatch) - (forward ? stage.forward_ring : stage.backward_ring);
    return previous < 0 ? 0 : message(forward, receive.stage, MicrobatchIndex{previous}).consumed;
  }

  // When the action's message is there; 0 without one, since list order covers what the rank made itself.
  double input_time(const Action& action) {
    const bool forward = action.kind == ActionKind::kForward;
    if (!takes_input(action)) return 0;
    const Action receive{forward ? ActionKind::kRecvF : ActionKind::kRecvB, action.stage, action.microbatch};
    return crosses_ranks(schedule_, receive) ? message(forward, action.stage, action.microbatch).arrived : 0;
  }

  void work(std::size_t rank, const Action& action, Interval& interval, double ready) {
    const double cost = cost_(action);
    interval.start = std::max(clock_[rank], ready);
    interval.finish = clock_[rank] = interval.start + cost;
    result_.busy[rank] += cost;
    if (takes_input(action)) {
      message(action.kind == ActionKind::kForward, action.stage, action.microbatch).consumed = interval.start;
    }
  }

  // Both ends list an edge's messages in one order, so calls that find both ends known come in that order too.
  void transfer(Message& m, int sender, int receiver) {
    if (m.sent == kUnknown || m.posted == kUnknown) return;
    double& edge_free = edge_free_[{sender, receiver}];
    const double start = std::max({m.sent, m.posted, edge_free});
    m.arrived = edge_free = start + m.cost;
    *m.at_sender = *m.at_receiver = {start, m.arrived};
    runnable_.push_back(receiver);
  }

  void finish(std::size_t rank) {
    result_.makespan = std::max(result_.makespan, clock_[rank]);
    for (std::size_t i = 0; i < schedule_.actions[rank].size(); ++i) {
      if (!is_compute(schedule_.actions[rank][i].kind)) continue;
      result_.idle[rank] = clock_[rank] - result_.intervals[rank][i].start - result_.busy[rank];
      return;
    }
  }

  const Schedule& schedule_;
  const CostOf& cost_;
  Resources need_;
  std::deque<int> runnable_;
  std::vector<std::size_t> next_;            // [P]
  std::vector<double> clock_;                // [P]
  std::vector<Message> forward_, backward_;  // [S × M]
  std::map<std::pair<int, int>, double> edge_free_;
  Timeline result_;
};

double cost_at(const Action& action, const StageCosts& stage, double message, double reduce) {
  switch (action.kind) {
    case ActionKind::kForward:
      return stage.forward + (action.microbatch == MicrobatchIndex{0} ? stage.before_first_forward : 0);
    case ActionKind::kInputGrad:
      return stage.input_grad;
    case ActionKind::kWeightGrad:
      return stage.weight_grad * action.count;
    case ActionKind::kFullBackward:
      return stage.input_grad + stage.weight_grad;
    case ActionKind::kSendF:
    case ActionKind::kSendB:
      return message;
    case ActionKind::kReduceGrad:
      return reduce;
    default:
      return 0;
  }
}

}  // namespace

CostOf cost_of(const UniformCosts& costs) {
  return [costs](const Action& action) {
    const StageCosts every{costs.forward, costs.input_grad, costs.weight_grad};
    return cost_at(action, every, costs.message, costs.reduce);
  };
}

CostOf cost_by_stage(ScheduleCosts costs) {
  return [costs = std::move(costs)](const Action& action) {
    return cost_at(action, costs.stages.at(static_cast<std::size_t>(to_int(action.stage))), costs.message,
                   costs.reduce);
  };
}

double Timeline::bubble() const {
  const double mean_busy = std::accumulate(busy.begin(), busy.end(), 0.0) / static_cast<double>(busy.size());
  return 1 - mean_busy / makespan;
}

Timeline simulate(const Schedule& lowered, const CostOf& cost) {
  validate(lowered);
  return Simulation(lowered, cost).run();
}

}  // namespace qe

// Property: whatever legal order a schedule chooses, the contract accepts it; whatever is done to one action of it, the
// contract refuses at the first action that an independent count of what may run next calls illegal.
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

namespace {

struct Pipeline {
  int stages, slots, microbatches, group;
  bool full;  // B instead of I and W
};

// What has run, by counting alone: F, I and W of a stage ascend, so three numbers tell everything.
class Oracle {
 public:
  explicit Oracle(const Pipeline& p) : p_(p), done_(static_cast<std::size_t>(p.stages)) {}

  [[nodiscard]] bool legal(const Action& a) const {
    if (to_int(a.stage) < 0 || to_int(a.stage) >= p_.stages) return false;
    const Done& d = done_[static_cast<std::size_t>(to_int(a.stage))];
    const int m = to_int(a.microbatch);
    switch (a.kind) {
      case ActionKind::kForward:
        return a.count == 1 && m == d.f && m < p_.microbatches && m - p_.slots < d.w;
      case ActionKind::kInputGrad:
        return a.count == 1 && m == d.i && m < d.f;
      case ActionKind::kWeightGrad:
        return a.count >= 1 && m == d.w && m + a.count <= d.i;
      case ActionKind::kFullBackward:
        return a.count == 1 && m == d.i && m == d.w && m < d.f;
      default:
        return false;
    }
  }
  void run(const Action& a) {
    Done& d = done_[static_cast<std::size_t>(to_int(a.stage))];
    if (a.kind == ActionKind::kForward) ++d.f;
    if (a.kind == ActionKind::kInputGrad || a.kind == ActionKind::kFullBackward) ++d.i;
    if (a.kind == ActionKind::kWeightGrad || a.kind == ActionKind::kFullBackward) d.w += a.count;
  }
  [[nodiscard]] bool complete() const {
    for (const Done& d : done_) {
      if (d.w != p_.microbatches) return false;
    }
    return true;
  }
  // What a schedule may choose next, in this pipeline's own style.
  [[nodiscard]] std::vector<Action> choices() const {
    std::vector<Action> next;
    for (int s = 0; s < p_.stages; ++s) {
      const Done& d = done_[static_cast<std::size_t>(s)];
      const StageIndex stage{s};
      const std::vector<Action> wanted =
          p_.full ? std::vector<Action>{{ActionKind::kForward, stage, MicrobatchIndex{d.f}},
                                        {ActionKind::kFullBackward, stage, MicrobatchIndex{d.i}}}
                  : std::vector<Action>{{ActionKind::kForward, stage, MicrobatchIndex{d.f}},
                                        {ActionKind::kInputGrad, stage, MicrobatchIndex{d.i}},
                                        {ActionKind::kWeightGrad, stage, MicrobatchIndex{d.w}, p_.group}};
      for (const Action& a : wanted) {
        if (legal(a)) next.push_back(a);
      }
    }
    return next;
  }

 private:
  struct Done {
    int f = 0, i = 0, w = 0;
  };
  Pipeline p_;
  std::vector<Done> done_;
};

using Random = std::mt19937;
int below(Random& random, std::size_t n) { return static_cast<int>(random() % n); }

Pipeline random_pipeline(Random& random) {
  const int group = 1 << below(random, 3);  // 1, 2 or 4
  const bool full = group == 1 && below(random, 3) == 0;
  const int slots = group * (1 + below(random, 3));
  const int microbatches = group * (1 + below(random, 4));
  return {1 + below(random, 3), slots, microbatches, group, full};
}

QEffect make_contract(const Pipeline& p) {
  ContractConfig config;
  config.microbatches = p.microbatches;
  for (int s = 0; s < p.stages; ++s) config.stages.push_back(one_layer(s, p.slots));
  return QEffect(config);
}

void refresh_all(QEffect& q, const Pipeline& p) {
  for (int s = 0; s < p.stages; ++s) refresh(q, s);
}

// Appends random legal actions until the step is complete.
std::vector<Action> random_rest(Random& random, Oracle oracle) {
  std::vector<Action> list;
  while (!oracle.complete()) {
    const std::vector<Action> choices = oracle.choices();
    REQUIRE_FALSE(choices.empty());
    list.push_back(choices[static_cast<std::size_t>(below(random, choices.size()))]);
    oracle.run(list.back());
  }
  return list;
}

std::vector<Action> mutate(Random& random, std::vector<Action> list) {
  const int at = below(random, list.size());
  const auto it = list.begin() + at;
  switch (below(random, 4)) {
    case 0:
      list.erase(it);
      break;
    case 1:
      list.insert(list.begin() + at + below(random, list.size() - static_cast<std::size_t>(at)), *it);
      break;
    case 2:
      std::swap(*it, list[static_cast<std::size_t>(below(random, list.size()))]);
      break;
    default:
      it->microbatch = MicrobatchIndex{to_int(it->microbatch) + (below(random, 2) == 0 ? 1 : -1)};
      break;
  }
  return list;
}

// Runs the list against contract and oracle, which must agree on every action. Stops at the first refusal.
void run_both(QEffect& q, Oracle& oracle, const std::vector<Action>& list) {
  for (const Action& action : list) {
    INFO("at " << to_string(action));
    bool accepted = true;
    try {
      q.begin(action).commit();
    } catch (const ContractViolation&) {
      accepted = false;
    }
    REQUIRE(accepted == oracle.legal(action));
    if (!accepted) return;
    oracle.run(action);
  }
}

void finish_all(QEffect& q, const Pipeline& p) {
  REQUIRE(q.live_tapes() == 0);
  q.finalize_step(counters(p.microbatches, p.stages));
  q.commit_step();
  q.require_quiescent();
}

}  // namespace

TEST_CASE("every legal order of every pipeline completes, for many steps") {
  Random random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const Pipeline p = random_pipeline(random);
    INFO("stages " << p.stages << ", slots " << p.slots << ", microbatches " << p.microbatches << ", group "
                   << p.group);
    QEffect q = make_contract(p);
    for (int step = 0; step < 10; ++step) {
      refresh_all(q, p);
      for (const Action& action : random_rest(random, Oracle(p))) q.begin(action).commit();
      finish_all(q, p);
    }
    CHECK(q.epoch() == 10);
  }
}

TEST_CASE("a mutated order is refused at its first illegal action, and the step still completes") {
  Random random(2);
  int illegal = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Pipeline p = random_pipeline(random);
    QEffect q = make_contract(p);
    refresh_all(q, p);
    Oracle oracle(p);
    run_both(q, oracle, mutate(random, random_rest(random, oracle)));
    if (!oracle.complete()) {
      ++illegal;
      CHECK_THROWS_AS(q.finalize_step(counters(p.microbatches, p.stages)), ContractViolation);
      CHECK_FALSE(q.aborted());
      // The refusal left everything intact: what was due goes on.
      for (const Action& action : random_rest(random, oracle)) q.begin(action).commit();
    }
    finish_all(q, p);
  }
  CHECK(illegal > 1000);
}

TEST_CASE("one dropped, doubled, exchanged or renumbered action never passes for a whole step") {
  Random random(3);
  for (int trial = 0; trial < 1000; ++trial) {
    const Pipeline p = random_pipeline(random);
    std::vector<Action> list = random_rest(random, Oracle(p));
    const auto at = static_cast<std::size_t>(below(random, list.size()));
    const Action chosen = list[at];
    const int mutation = below(random, 4);
    if (mutation == 0) list.erase(list.begin() + static_cast<std::ptrdiff_t>(at));
    if (mutation == 1) list.push_back(chosen);
    if (mutation == 2) {  // with another of its kind and stage
      std::size_t other = 0;
      while (other < list.size() &&
             (other == at || list[other].kind != chosen.kind || list[other].stage != chosen.stage)) {
        ++other;
      }
      if (other == list.size()) continue;  // it is the only one
      std::swap(list[at], list[other]);
    }
    if (mutation == 3) list[at].microbatch = MicrobatchIndex{to_int(chosen.microbatch) + 1};

    QEffect q = make_contract(p);
    refresh_all(q, p);
    const auto whole_step = [&] {
      for (const Action& action : list) q.begin(action).commit();
      q.finalize_step(counters(p.microbatches, p.stages));
    };
    INFO("mutation " << mutation << " of " << to_string(chosen));
    CHECK_THROWS_AS(whole_step(), ContractViolation);
  }
}

TEST_CASE("arbitrary actions never crash the contract and agree with the count") {
  Random random(4);
  const std::vector<ActionKind> kinds{ActionKind::kForward, ActionKind::kInputGrad, ActionKind::kWeightGrad,
                                      ActionKind::kFullBackward};
  for (int trial = 0; trial < 50; ++trial) {
    const Pipeline p = random_pipeline(random);
    QEffect q = make_contract(p);
    refresh_all(q, p);
    Oracle oracle(p);
    for (int n = 0; n < 400; ++n) {
      const Action action{kinds[static_cast<std::size_t>(below(random, 4))], StageIndex{below(random, 4) - 1},
                          MicrobatchIndex{below(random, 8) - 1}, below(random, 4)};
      run_both(q, oracle, {action});
    }
    for (Oracle rest = oracle; !rest.complete();) {  // mixed styles may leave a part of a group
      const Action split = [&] {
        for (int s = 0; s < p.stages; ++s) {
          for (int m = 0; m < p.microbatches; ++m) {
            for (ActionKind kind : {ActionKind::kWeightGrad, ActionKind::kInputGrad, ActionKind::kForward}) {
              const Action a{kind, StageIndex{s}, MicrobatchIndex{m}};
              if (rest.legal(a)) return a;
            }
          }
        }
        return Action{ActionKind::kForward, StageIndex{-1}};
      }();
      q.begin(split).commit();
      rest.run(split);
    }
    finish_all(q, p);
  }
}

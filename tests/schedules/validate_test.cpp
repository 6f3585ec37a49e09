// validate() against single faults, seeded mutations and an independent executor.
#include <algorithm>

#include "core/error.h"
#include "schedules/schedules.h"
#include "tests/catch.h"
#include "tests/schedules/list_runner.h"

using qe::Action;
using qe::ActionKind;
using qe::Schedule;
using qe::ScheduleKind;

namespace {

// Own generator: the standard's distributions differ between libraries, seeds must not.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::size_t below(std::size_t n) {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::size_t>(state_ >> 33) % n;
  }

 private:
  std::uint64_t state_;
};

enum class Mutation { kDrop, kDuplicate, kSwapNeighbours, kMicrobatch, kStage, kKind, kSwapMessages, kCount_ };

void swap_two_messages(Schedule& schedule, Dice& dice) {
  auto& list = schedule.actions[dice.below(schedule.actions.size())];
  std::vector<std::size_t> messages;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (is_send(list[i].kind) || is_recv(list[i].kind)) messages.push_back(i);
  }
  if (messages.size() < 2) return;
  std::swap(list[messages[dice.below(messages.size())]], list[messages[dice.below(messages.size())]]);
}

void mutate(Schedule& schedule, Mutation mutation, Dice& dice) {
  if (mutation == Mutation::kSwapMessages) return swap_two_messages(schedule, dice);
  auto& list = schedule.actions[dice.below(schedule.actions.size())];
  const std::size_t i = dice.below(list.size());
  const auto place = list.begin() + static_cast<std::ptrdiff_t>(i);
  switch (mutation) {
    case Mutation::kDrop:
      list.erase(place);
      break;
    case Mutation::kDuplicate: {
      const Action copy = *place;
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(dice.below(list.size() + 1)), copy);
      break;
    }
    case Mutation::kSwapNeighbours:
      std::swap(list[i], list[(i + 1) % list.size()]);
      break;
    case Mutation::kMicrobatch:
      list[i].microbatch = qe::MicrobatchIndex{
          static_cast<int>(dice.below(static_cast<std::size_t>(schedule.shape.microbatches) + 2)) - 1};
      break;
    case Mutation::kStage:
      list[i].stage =
          qe::StageIndex{static_cast<int>(dice.below(static_cast<std::size_t>(schedule.shape.stages()) + 2)) - 1};
      break;
    case Mutation::kKind:
      list[i].kind = static_cast<ActionKind>(dice.below(9));
      break;
    default:
      break;
  }
}

std::string refusal_of(const Schedule& schedule) {
  try {
    qe::validate(schedule);
  } catch (const qe::ScheduleError& error) {
    return error.what();
  }
  return "";
}

std::vector<Schedule> samples() {
  std::vector<Schedule> result;
  const auto add = [&](ScheduleKind kind, const qe::PipelineShape& shape, qe::Backward backward) {
    result.push_back(qe::lower(qe::make_schedule(kind, shape, backward)));
  };
  add(ScheduleKind::k1F1B, {3, 1, 4}, qe::Backward::kSplit);
  add(ScheduleKind::kInterleaved1F1B, {2, 2, 4}, qe::Backward::kSplit);
  add(ScheduleKind::kInterleaved1F1B, {2, 3, 4}, qe::Backward::kFull);
  add(ScheduleKind::kZbv, {2, 2, 4}, qe::Backward::kSplit);
  add(ScheduleKind::kZbv, {3, 2, 5}, qe::Backward::kSplit);
  add(ScheduleKind::kZb1p, {3, 1, 4}, qe::Backward::kSplit);
  return result;
}

Schedule two_ranks() { return qe::lower(qe::make_1f1b({2, 1, 2})); }

std::size_t find(const std::vector<Action>& list, const char* text) {
  const auto at = std::find(list.begin(), list.end(), qe::parse_action(text));
  REQUIRE(at != list.end());
  return static_cast<std::size_t>(at - list.begin());
}

void move_before(std::vector<Action>& list, const char* what, const char* before) {
  const Action action = qe::parse_action(what);
  std::erase(list, action);
  list.insert(list.begin() + static_cast<std::ptrdiff_t>(find(list, before)), action);
}

}  // namespace

TEST_CASE("a mutated list is refused with its cell exactly when it does not run") {
  int refused = 0, accepted_changed = 0;
  for (const Schedule& original : samples()) {
    REQUIRE(qe_test::run_lists(original) == "");
    for (int mutation = 0; mutation < static_cast<int>(Mutation::kCount_); ++mutation) {
      for (std::uint64_t seed = 0; seed < 150; ++seed) {
        Dice dice(seed * 7919 + static_cast<std::uint64_t>(mutation));
        Schedule mutant = original;
        mutate(mutant, static_cast<Mutation>(mutation), dice);
        if (seed % 3 == 0) mutate(mutant, static_cast<Mutation>(mutation), dice);
        const std::string fault = qe_test::run_lists(mutant);
        const std::string refusal = refusal_of(mutant);
        INFO("mutation " << mutation << " seed " << seed << " runner: " << fault << "\nvalidate: " << refusal);
        REQUIRE(refusal.empty() == fault.empty());
        if (refusal.empty()) {
          accepted_changed += mutant.actions != original.actions;
        } else {
          ++refused;
          REQUIRE_THAT(refusal, ContainsSubstring("Rank ") && ContainsSubstring("<-- ERROR HERE"));
        }
      }
    }
  }
  CHECK(refused > 3000);
  CHECK(accepted_changed > 100);  // harmless swaps stay allowed
}

TEST_CASE("a dropped action is named as missing or as the reason why the next is too early") {
  for (const char* text : {"0F1", "0I0", "0W1", "0SEND_F1", "0RECV_B0", "0REDUCE_GRAD"}) {
    Schedule schedule = two_ranks();
    std::erase(schedule.actions[0], qe::parse_action(text));
    INFO(text);
    CHECK_THAT(refusal_of(schedule), ContainsSubstring("Rank 0"));
  }
  Schedule schedule = two_ranks();
  std::erase(schedule.actions[1], qe::parse_action("1REDUCE_GRAD"));
  CHECK_THAT(refusal_of(schedule), ContainsSubstring("end of list: stage 1 lacks its REDUCE_GRAD") &&
                                       ContainsSubstring("(end) <-- ERROR HERE"));
  std::erase(schedule.actions[1], qe::parse_action("1W1"));
  CHECK_THAT(refusal_of(schedule), ContainsSubstring("stage 1 lacks the W of microbatch 1"));
}

TEST_CASE("each broken dependency is named at its cell") {
  struct Case {
    int rank;
    const char *what, *before, *said;
  };
  const Case cases[] = {
      {0, "0W0", "0I0", "W comes before the I"},
      {0, "0I0", "0F0", "backward comes before the F"},
      {0, "0I0", "0RECV_B0", "backward comes before its RECV_B"},
      {1, "1F0", "1RECV_F0", "F comes before its RECV_F"},
      {1, "1SEND_B0", "1I0", "SEND_B comes before"},
      {0, "0SEND_F0", "0F0", "SEND_F comes before"},
      {0, "0REDUCE_GRAD", "0W1", "REDUCE_GRAD comes before"},
      {0, "0F1", "0F0", "microbatches ascend, microbatch 0 is due"},
      {0, "0W1", "0W0", "W comes before the I"},
  };
  for (const Case& c : cases) {
    Schedule schedule = two_ranks();
    move_before(schedule.actions[static_cast<std::size_t>(c.rank)], c.what, c.before);
    INFO(c.what << " before " << c.before);
    CHECK_THAT(refusal_of(schedule), ContainsSubstring(c.said));
  }
}

TEST_CASE("W out of order is refused even when both I are done") {
  Schedule schedule = two_ranks();
  auto& list = schedule.actions[0];
  move_before(list, "0W0", "0W1");  // both I done
  qe::validate(schedule);
  move_before(list, "0W1", "0W0");
  CHECK_THAT(refusal_of(schedule), ContainsSubstring("action 0W1: microbatches ascend, microbatch 0 is due"));
}

TEST_CASE("messages in different orders at the two ends of an edge are refused at the receiver") {
  // Looped chunks on two ranks: the edge 0 → 1 carries the inputs of stages 1 and 3 and stage 1's gradients.
  Schedule schedule = qe::lower(qe::make_interleaved_1f1b({2, 2, 4}));
  move_before(schedule.actions[1], "3RECV_F0", "1RECV_F1");
  REQUIRE(qe_test::run_lists(schedule) == "wrong letter");
  CHECK_THAT(refusal_of(schedule),
             ContainsSubstring("action 3RECV_F0: rank 0 sends 0SEND_F1") && ContainsSubstring("so 1RECV_F1 is due"));
}

TEST_CASE("ranks that wait for each other in a cycle are refused with the cycle") {
  // Each list alone and each edge alone are in order; only together they cannot run.
  Schedule schedule = qe::lower(qe::make_interleaved_1f1b({2, 2, 2}));
  auto& first = schedule.actions[0];
  // Rank 0 waits for stage 1's output of microbatch 0 before it lets microbatch 1 go; rank 1 the other way round.
  move_before(first, "2RECV_F0", "0F1");
  move_before(schedule.actions[1], "1RECV_F1", "1F0");
  REQUIRE(qe_test::run_lists(schedule) == "stuck");
  CHECK_THAT(refusal_of(schedule), ContainsSubstring("the ranks wait in a cycle") &&
                                       ContainsSubstring("rank 0 waits in") && ContainsSubstring("rank 1 waits in") &&
                                       ContainsSubstring("<-- ERROR HERE"));
}

TEST_CASE("a W over consecutive microbatches covers each of them once") {
  const auto list_with = [](std::initializer_list<const char*> tail) {
    Schedule schedule{{1, 1, 4}, {0}, {{}}};
    for (const char* text : {"0F0", "0F1", "0F2", "0F3", "0I0", "0I1", "0I2", "0I3"}) {
      schedule.actions[0].push_back(qe::parse_action(text));
    }
    for (const char* text : tail) schedule.actions[0].push_back(qe::parse_action(text));
    return schedule;
  };
  for (const auto& good : {list_with({"0W0x4", "0REDUCE_GRAD"}), list_with({"0W0x2", "0W2x2", "0REDUCE_GRAD"}),
                           list_with({"0W0", "0W1x3", "0REDUCE_GRAD"})}) {
    CHECK(refusal_of(good) == "");
    CHECK(qe_test::run_lists(good) == "");
  }
  for (const auto& bad :
       {list_with({"0W0x3", "0REDUCE_GRAD"}), list_with({"0W0x2", "0W1x3", "0REDUCE_GRAD"}),
        list_with({"0W0x3", "0W3x2", "0REDUCE_GRAD"}), list_with({"0W2x2", "0W0x2", "0REDUCE_GRAD"})}) {
    CHECK(refusal_of(bad) != "");
    CHECK(qe_test::run_lists(bad) != "");
  }
  Schedule early = list_with({"0W2x2", "0REDUCE_GRAD"});
  early.actions[0].insert(early.actions[0].begin() + 5, qe::parse_action("0W0x2"));  // I of microbatch 1 still to come
  CHECK_THAT(refusal_of(early), ContainsSubstring("action 0W0x2: W comes before the I"));
  CHECK_THAT(refusal_of(list_with({"0W0x2", "0W2x3", "0REDUCE_GRAD"})), ContainsSubstring("microbatches are 0 to 3"));
}

TEST_CASE("the grid has a column a rank, a row a step, and marks one cell") {
  const Schedule schedule = qe::lower(qe::make_1f1b({2, 1, 1}));
  CHECK(qe::format_grid(schedule, 1, 2) ==
        "step  rank 0        rank 1\n"
        "0     0F0           1RECV_F0\n"
        "1     0SEND_F0      1F0\n"
        "2     0RECV_B0      1I0 <-- ERROR HERE\n"
        "3     0I0           1SEND_B0\n"
        "4     0W0           1W0\n"
        "5     0REDUCE_GRAD  1REDUCE_GRAD\n");
  CHECK(qe::format_grid(schedule).find("ERROR") == std::string::npos);
}

TEST_CASE("the grid of a long list's error shows only the steps around it") {
  const Schedule schedule = qe::lower(qe::make_1f1b({2, 1, 256}));
  const std::string grid = qe::format_grid(schedule, 0, 500);
  CHECK(std::count(grid.begin(), grid.end(), '\n') < 60);
  CHECK_THAT(grid, ContainsSubstring("\n500 ") && ContainsSubstring("<-- ERROR HERE"));
}

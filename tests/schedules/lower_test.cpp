// Where lowering puts communication and reductions, and what it refuses.
#include "core/error.h"
#include "schedules/schedules.h"
#include "tests/catch.h"

using qe::Action;
using qe::ActionKind;
using qe::Schedule;

namespace {

Schedule from_text(const qe::PipelineShape& shape, std::vector<int> rank_of_stage,
                   const std::vector<std::vector<const char*>>& lists) {
  Schedule schedule{shape, std::move(rank_of_stage), {}};
  for (const auto& list : lists) {
    auto& out = schedule.actions.emplace_back();
    for (const char* text : list) out.push_back(qe::parse_action(text));
  }
  return schedule;
}

}  // namespace

TEST_CASE("REDUCE_GRAD follows the last weight gradient of its stage at once") {
  for (const qe::Backward backward : {qe::Backward::kSplit, qe::Backward::kFull}) {
    const Schedule lowered = qe::lower(qe::make_schedule(qe::ScheduleKind::kZbv, {4, 2, 8}, backward));
    const ActionKind last = backward == qe::Backward::kSplit ? ActionKind::kWeightGrad : ActionKind::kFullBackward;
    int reductions = 0;
    for (const auto& list : lowered.actions) {
      std::vector<Action> without_messages;
      for (const Action& action : list) {
        if (!is_send(action.kind) && !is_recv(action.kind)) without_messages.push_back(action);
      }
      for (std::size_t i = 0; i < without_messages.size(); ++i) {
        if (without_messages[i].kind != ActionKind::kReduceGrad) continue;
        ++reductions;
        REQUIRE(i > 0);
        CHECK(without_messages[i - 1] == Action{last, without_messages[i].stage, qe::MicrobatchIndex{7}});
      }
    }
    CHECK(reductions == 8);
  }
}

TEST_CASE("a SEND directly follows the action that made its tensor, before W") {
  const Schedule lowered = qe::lower(qe::make_interleaved_1f1b({4, 2, 8}));
  for (const auto& list : lowered.actions) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!is_send(list[i].kind)) continue;
      REQUIRE(i > 0);
      const ActionKind maker = list[i].kind == ActionKind::kSendF ? ActionKind::kForward : ActionKind::kInputGrad;
      CHECK(list[i - 1] == Action{maker, list[i].stage, list[i].microbatch});
    }
  }
}

TEST_CASE("one rank and the fold of a V need no messages") {
  const Schedule one_rank = qe::lower(qe::make_zbv({1, 2, 4}));
  for (const Action& action : one_rank.actions[0]) {
    CHECK(!is_send(action.kind));
    CHECK(!is_recv(action.kind));
  }
  const Schedule folded = qe::lower(qe::make_zbv({4, 2, 8}));
  for (const Action& action : folded.actions[3]) {
    CHECK(action != Action{ActionKind::kSendF, qe::StageIndex{3}, action.microbatch});
    CHECK(action != Action{ActionKind::kRecvB, qe::StageIndex{3}, action.microbatch});
  }
}

TEST_CASE("lists that wait for each other are refused with the grid and the waiting cell") {
  // Rank 0 wants the gradient of microbatch 0 before it gives rank 1 anything to work on.
  const Schedule stuck = from_text({2, 1, 1}, {0, 1}, {{"0I0", "0F0", "0W0"}, {"1F0", "1I0", "1W0"}});
  REQUIRE_THROWS_AS(qe::lower(stuck), qe::ScheduleError);
  REQUIRE_THROWS_WITH(qe::lower(stuck), ContainsSubstring("Rank 0, position 0, action 0I0") &&
                                            ContainsSubstring("input gradient of stage 1 for microbatch 0") &&
                                            ContainsSubstring("0I0 <-- ERROR HERE"));
}

TEST_CASE("lowering refuses communication, strangers and wrong sizes in its input") {
  const Schedule good = qe::make_1f1b({2, 1, 2});
  REQUIRE_THROWS_WITH(qe::lower(qe::lower(good)), ContainsSubstring("action 0SEND_F0"));

  Schedule wrong_rank = good;
  wrong_rank.actions[0].push_back(wrong_rank.actions[1].back());
  REQUIRE_THROWS_WITH(qe::lower(wrong_rank), ContainsSubstring("stage 1 lives on rank 1"));

  Schedule no_stage = good;
  no_stage.actions[0][0].stage = qe::StageIndex{2};
  REQUIRE_THROWS_WITH(qe::lower(no_stage), ContainsSubstring("stages are 0 to 1"));

  Schedule no_microbatch = good;
  no_microbatch.actions[1][0].microbatch = qe::MicrobatchIndex{2};
  REQUIRE_THROWS_WITH(qe::lower(no_microbatch), ContainsSubstring("microbatches are 0 to 1"));

  Schedule lists = good;
  lists.actions.pop_back();
  REQUIRE_THROWS_WITH(qe::lower(lists), ContainsSubstring("1 action lists for 2 ranks"));

  Schedule stages = good;
  stages.rank_of_stage = {0, 2};
  REQUIRE_THROWS_WITH(qe::lower(stages), ContainsSubstring("on rank 2"));
}

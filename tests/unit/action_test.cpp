// The text form of actions: one text per action, one action per text.
#include "core/action.h"

#include <limits>
#include <vector>

#include "core/error.h"
#include "tests/catch.h"

using namespace qe;

namespace {
Action action(ActionKind kind, int stage, int microbatch = 0, int count = 1) {
  return {kind, StageIndex{stage}, MicrobatchIndex{microbatch}, count};
}
}  // namespace

TEST_CASE("every kind of action has the field's text") {
  CHECK(to_string(action(ActionKind::kForward, 2, 0)) == "2F0");
  CHECK(to_string(action(ActionKind::kInputGrad, 1, 3)) == "1I3");
  CHECK(to_string(action(ActionKind::kWeightGrad, 0, 11)) == "0W11");
  CHECK(to_string(action(ActionKind::kWeightGrad, 0, 4, 4)) == "0W4x4");
  CHECK(to_string(action(ActionKind::kFullBackward, 12, 7)) == "12B7");
  CHECK(to_string(action(ActionKind::kSendF, 0, 2)) == "0SEND_F2");
  CHECK(to_string(action(ActionKind::kRecvF, 1, 2)) == "1RECV_F2");
  CHECK(to_string(action(ActionKind::kSendB, 1, 2)) == "1SEND_B2");
  CHECK(to_string(action(ActionKind::kRecvB, 0, 2)) == "0RECV_B2");
  CHECK(to_string(action(ActionKind::kReduceGrad, 3)) == "3REDUCE_GRAD");
}

TEST_CASE("parsing is the exact inverse of printing") {
  const int largest = std::numeric_limits<int>::max();
  const std::vector<ActionKind> kinds{ActionKind::kForward, ActionKind::kInputGrad,    ActionKind::kWeightGrad,
                                      ActionKind::kSendF,   ActionKind::kFullBackward, ActionKind::kRecvF,
                                      ActionKind::kSendB,   ActionKind::kRecvB};
  for (int stage : {0, 1, 9, 10, 63, largest}) {
    for (int microbatch : {0, 5, 10, 100, largest}) {
      for (ActionKind kind : kinds) {
        const Action a = action(kind, stage, microbatch);
        CHECK(parse_action(to_string(a)) == a);
      }
      for (int count : {2, 4, 16}) {
        const Action a = action(ActionKind::kWeightGrad, stage, microbatch, count);
        CHECK(parse_action(to_string(a)) == a);
      }
    }
    CHECK(parse_action(to_string(action(ActionKind::kReduceGrad, stage))) == action(ActionKind::kReduceGrad, stage));
  }
}

TEST_CASE("a text that printing would not give is refused by name") {
  for (const char* text : {"",
                           "F0",
                           "0",
                           "0F",
                           "0Q1",
                           "0f1",
                           " 0F0",
                           "0F0 ",
                           "0 F0",
                           "-1F0",
                           "+1F0",
                           "0F-1",
                           "01F0",
                           "0F01",
                           "00F0",
                           "0F0x2",
                           "0I0x2",
                           "0B0x2",
                           "0W0x1",
                           "0W0x0",
                           "0W0x",
                           "0W0x02",
                           "0W0X2",
                           "0W0x2x2",
                           "0SEND_F",
                           "0SEND_F0x2",
                           "0SEND0",
                           "0SENDF0",
                           "0REDUCE",
                           "3REDUCE_GRAD0",
                           "0F2147483648",
                           "2147483648F0",
                           "0W0x99999999999",
                           "0UNSHARD",
                           "0RESHARD",
                           "0F0,0F1",
                           "(0F3;3B1)OVERLAP_F_B"}) {
    INFO("text \"" << text << "\"");
    CHECK_THROWS_AS(parse_action(text), ScheduleError);
    CHECK_THROWS_WITH(parse_action(text), ContainsSubstring("\"" + std::string(text) + "\""));
  }
}

TEST_CASE("a refused action says what is wrong with it") {
  CHECK_THROWS_WITH(parse_action("F0"), ContainsSubstring("the stage is missing"));
  CHECK_THROWS_WITH(parse_action("0F"), ContainsSubstring("the microbatch is missing"));
  CHECK_THROWS_WITH(parse_action("0X1"), ContainsSubstring("no action kind"));
  CHECK_THROWS_WITH(parse_action("0F01"), ContainsSubstring("leading zero"));
  CHECK_THROWS_WITH(parse_action("0W0x1"), ContainsSubstring("at least two"));
  CHECK_THROWS_WITH(parse_action("0F0x2"), ContainsSubstring("\"x2\" is left over"));
}

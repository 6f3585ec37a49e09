// The CSV form: what PyTorch writes is read, what is written is read back, and every fault is named by line and cell.
#include "schedules/csv.h"

#include "core/error.h"
#include "schedules/schedules.h"
#include "schedules/simulate.h"
#include "tests/catch.h"

using qe::Backward;
using qe::Schedule;
using qe::ScheduleKind;

namespace {

Schedule parse(const std::string& text) { return qe::parse_schedule_csv(text, "x.csv"); }

std::string refusal(const std::string& text) {
  try {
    parse(text);
  } catch (const qe::ScheduleError& e) {
    return e.what();
  }
  return "accepted";
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// DualPipeV for two ranks and four microbatches, as PyTorch's ScheduleDualPipeV gives it.
const std::string kDualPipeV =
    "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,"
    "0W3\n"
    "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3\n";

}  // namespace

TEST_CASE("every schedule reads back from its CSV, as compute lists and lowered, split and full") {
  const int ranks = GENERATE(1, 2, 3, 4);
  for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbv,
                                  ScheduleKind::kGpipe, ScheduleKind::kZb1p}) {
    for (const int chunks : {1, 2, 3}) {
      for (const int microbatches : {1, ranks, 2 * ranks}) {
        if (!qe::why_not(kind, {ranks, chunks, microbatches}).empty()) continue;
        for (const Backward backward : {Backward::kSplit, Backward::kFull}) {
          const Schedule compute = qe::make_schedule(kind, {ranks, chunks, microbatches}, backward);
          const Schedule lowered = qe::lower(compute);
          INFO(qe::name_of(kind) << " P=" << ranks << " V=" << chunks << " M=" << microbatches);
          CHECK(parse(qe::to_csv(compute)) == compute);
          CHECK(parse(qe::to_csv(lowered)) == lowered);
          CHECK(!qe::is_lowered(compute));
          CHECK(qe::is_lowered(lowered));
        }
      }
    }
  }
}

TEST_CASE("PyTorch's bubbles, shard actions, line ends and blanks are read over") {
  const Schedule plain = parse("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n");
  CHECK(parse("0UNSHARD,0F0,0F1,,,0I0,0W0,0I1,0W1,0RESHARD,\r\n,1F0,1I0,1W0,1F1, 1I1 ,1W1\r\n\r\n") == plain);
  CHECK(parse("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1") == plain);
}

TEST_CASE("a lowered file without REDUCE_GRAD, as older PyTorch writes it, gets one a stage") {
  const Schedule lowered = qe::lower(qe::make_zbv({2, 2, 4}));
  std::string text = qe::to_csv(lowered);
  for (const char* stage : {"0", "1", "2", "3"}) text = replaced(text, std::string(",") + stage + "REDUCE_GRAD", "");
  REQUIRE(text.find("REDUCE") == std::string::npos);
  CHECK(parse(text) == lowered);
}

TEST_CASE("overlapped pairs are read as one after the other: DualPipeV comes in with the table's peaks and makespan") {
  const Schedule compute = parse(kDualPipeV);
  CHECK(compute.rank_of_stage == std::vector<int>{0, 1, 1, 0});
  CHECK(compute.shape == qe::PipelineShape{2, 2, 4});
  const Schedule lowered = qe::lower(compute);
  const qe::Resources need = qe::resources(lowered);
  const int tapes[] = {4, 3, 2, 1};
  for (std::size_t s = 0; s < 4; ++s) CHECK(need.stages[s].peak_tapes == tapes[s]);
  CHECK(need.ranks[0].peak_tapes == 5);
  CHECK(need.ranks[1].peak_tapes == 5);
  CHECK(need.ranks[0].peak_pending_w == 1);
  CHECK(need.ranks[1].peak_pending_w == 2);
  CHECK(need.ranks[0].messages_out == 8);
  CHECK(need.ranks[1].messages_in == 8);
  CHECK(qe::delayed_weight_grads(compute) == std::vector<int>{0, 2});
  CHECK(qe::delayed_weight_grads(lowered) == std::vector<int>{1, 2});
  CHECK(qe::simulate(lowered, qe::cost_of({})).makespan == 25);
}

TEST_CASE("a file that mixes B with I and W becomes all split or all full") {
  const Schedule mixed = parse(kDualPipeV);
  const Schedule split = qe::with_backward(mixed, Backward::kSplit);
  const Schedule full = qe::with_backward(mixed, Backward::kFull);
  const auto count = [](const Schedule& s, qe::ActionKind kind) {
    int n = 0;
    for (const auto& list : s.actions) {
      for (const qe::Action& a : list) n += a.kind == kind;
    }
    return n;
  };
  CHECK(count(split, qe::ActionKind::kFullBackward) == 0);
  CHECK(count(split, qe::ActionKind::kWeightGrad) == 16);
  CHECK(count(full, qe::ActionKind::kFullBackward) == 16);
  CHECK(count(full, qe::ActionKind::kInputGrad) == 0);
  for (const Schedule& s : {split, full}) {
    qe::validate(qe::lower(s));
    qe::validate(qe::with_backward(qe::lower(mixed), &s == &split ? Backward::kSplit : Backward::kFull));
  }
  // A file of B alone is the maker's full backward, and the maker's split one is that file's.
  const Schedule made = qe::make_schedule(ScheduleKind::kInterleaved1F1B, {2, 2, 4}, Backward::kFull);
  CHECK(qe::with_backward(parse(qe::to_csv(made)), Backward::kSplit) == qe::make_interleaved_1f1b({2, 2, 4}));
}

TEST_CASE("a W over several microbatches is read and printed, and refused as PyTorch's CSV") {
  const Schedule grouped = parse("0F0,0F1,0F2,0F3,0I0,0I1,0I2,0I3,0W0x4\n");
  CHECK(to_string(grouped.actions[0].back()) == "0W0x4");
  CHECK(to_string(qe::parse_action("0W4x4")) == "0W4x4");
  REQUIRE_THROWS_WITH(qe::to_csv(grouped), ContainsSubstring("Action 0W0x4") && ContainsSubstring("gradients.w_group"));
}

TEST_CASE("every fault names the file, the line and the cell") {
  struct Case {
    const char *text, *place, *said;
  };
  const Case cases[] = {
      {"0F0,0I0,0W0,hello\n", "x.csv:1, cell 4: ", "\"hello\" cannot be read"},
      {"0F0,,0I0,0W\n", "x.csv:1, cell 4: ", "the microbatch is missing"},
      {"0F0,0I0,0W0\n1F0,1BW0\n", "x.csv:2, cell 2: ", "cannot be read"},
      {"(0F0;0F)OVERLAP_F_B\n", "x.csv:1, cell 1: ", "the microbatch is missing"},
      {"0F1,0F0,0I0,0W0,0I1,0W1\n", "x.csv:1, cell 1 \"0F1\": ", "ascend on a stage, microbatch 0 is due"},
      {"0F0,0F1,,0I1,0I0,0W0,0W1\n", "x.csv:1, cell 4 \"0I1\": ", "microbatch 0 is due"},
      {"0F0,0F1,0I0,0I1,0W1,0W0\n", "x.csv:1, cell 5 \"0W1\": ", "microbatch 0 is due"},
      {"0F0,0F0,0I0,0W0\n", "x.csv:1, cell 2 \"0F0\": ", "microbatch 1 is due"},
      {"0F0,0I0,0W0,0F2147483647\n", "x.csv:1, cell 4 \"0F2147483647\": ", "microbatch 1 is due"},
      {"0F0,0I0,0W0,2147483647F0\n", "x.csv: ", "stage 1 is missing"},
      {"0F0,0I0\n0W0\n", "x.csv:2, cell 1 \"0W0\": ", "stage 0 stands in line 1 too"},
      {"0F0,0I0,0W0\n2F0,2I0,2W0\n", "x.csv: ", "stage 1 is missing"},
      {"0F0,2F0,2I0,2W0,0I0,0W0\n1F0,1I0,1W0\n", "x.csv:2: ", "found 1 stages, line 1 has 2"},
      {"0F0,0I0,0W0\n\n1F0,1I0,1W0\n", "x.csv:2: ", "found 0 stages"},
      {"", "x.csv: ", "the file is empty"},
      {"\n\r\n", "x.csv: ", "the file is empty"},
      {"0I0,0W0\n", "x.csv: ", "there is no F"},
      {"0W0,0F0,0I0\n", "x.csv:1, cell 1 \"0W0\": ", "W comes before the I"},
      {"0F0,0I0\n", "x.csv:1, end of line: ", "0W0, or a B in its place, is missing"},
      {"0F0,0I0,0W0x2\n", "x.csv:1, cell 3 \"0W0x2\": ", "microbatches are 0 to 0"},
      {"0I0,0F0,0W0\n1F0,1I0,1W0\n", "x.csv:1, cell 1 \"0I0\": ", "no rank can go on"},
      {"0F0,0I0,0W0\n1F0,1F1,1I0,1W0,1I1,1W1\n", "x.csv:1, end of line: ", "0F1 is missing"},
      {"0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1W0\n", "x.csv:2, end of line: ", "lacks the SEND_B"},
      {"0F0,0SEND_F0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n", "x.csv:1, cell 3 \"0I0\": ", "before its RECV_B"},
      {"0F0,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
       "x.csv:2, end of line: ", "lacks its REDUCE_GRAD"},
  };
  for (const Case& c : cases) {
    INFO(c.text << refusal(c.text));
    CHECK(refusal(c.text).starts_with(c.place));
    CHECK_THAT(refusal(c.text), ContainsSubstring(c.said));
  }
  CHECK_THAT(refusal("0W0,0F0,0I0\n"), ContainsSubstring("0     0W0 <-- ERROR HERE"));
}

TEST_CASE("a cell is counted in the file, empty ones and inserted messages aside") {
  // Lowering puts messages and reductions between the actions; the place is still the file's.
  const std::string text = "0F0,,0F1,0I0,0I1,0W0,0W1\n,1F0,1I0,,1W0,1F1,1W1,1I1\n";
  CHECK(refusal(text).starts_with("x.csv:2, cell 7 \"1W1\": W comes before the I"));
}

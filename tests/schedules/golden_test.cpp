// Makers and lowering against lists that PyTorch's schedules give, stored as text under tests/golden/schedules.
#include <fstream>
#include <sstream>

#include "schedules/schedules.h"
#include "tests/catch.h"

namespace {

struct Golden {
  qe::ScheduleKind kind;
  qe::PipelineShape shape;
  const char* file;
  bool lowered = false;
};

using enum qe::ScheduleKind;

const Golden kGoldens[] = {
    {k1F1B, {4, 1, 8}, "1f1b_p4_v1_m8.compute.csv"},
    {kInterleaved1F1B, {2, 2, 4}, "interleaved_1f1b_p2_v2_m4.compute.csv"},
    {kInterleaved1F1B, {2, 2, 8}, "interleaved_1f1b_p2_v2_m8.compute.csv"},
    {kInterleaved1F1B, {4, 1, 8}, "interleaved_1f1b_p4_v1_m8.compute.csv"},
    {kZbv, {2, 2, 4}, "zbv_p2_v2_m4.compute.csv"},
    {kZbv, {2, 2, 8}, "zbv_p2_v2_m8.compute.csv"},
    {kZbv, {4, 2, 8}, "zbv_p4_v2_m8.compute.csv"},
    {kZb1p, {2, 2, 4}, "zb1p_p2_v2_m4.compute.csv"},
    {kZb1p, {2, 2, 8}, "zb1p_p2_v2_m8.compute.csv"},
    {kZb1p, {4, 1, 8}, "zb1p_p4_v1_m8.compute.csv"},
    {kInterleaved1F1B, {2, 2, 4}, "interleaved_1f1b_p2_v2_m4.lowered.csv", true},
    {kZbv, {2, 2, 4}, "zbv_p2_v2_m4.lowered.csv", true},
};

std::string read_golden(const char* name) {
  std::ifstream in(std::string(QE_GOLDEN_SCHEDULES) + "/" + name);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string to_csv(const qe::Schedule& schedule) {
  std::string text;
  for (const auto& list : schedule.actions) {
    for (const qe::Action& action : list) text += to_string(action) + ",";
    text.back() = '\n';
  }
  return text;
}

}  // namespace

TEST_CASE("makers and lowering give the golden lists character by character") {
  for (const Golden& golden : kGoldens) {
    INFO(golden.file);
    const std::string expected = read_golden(golden.file);
    REQUIRE(!expected.empty());
    const qe::Schedule compute = qe::make_schedule(golden.kind, golden.shape, qe::Backward::kSplit);
    CHECK(to_csv(golden.lowered ? qe::lower(compute) : compute) == expected);
  }
}

TEST_CASE("every action of a golden list parses and prints back unchanged") {
  for (const Golden& golden : kGoldens) {
    std::stringstream lines(read_golden(golden.file));
    int actions = 0;
    for (std::string line; std::getline(lines, line);) {
      std::stringstream cells(line);
      for (std::string cell; std::getline(cells, cell, ','); ++actions)
        CHECK(to_string(qe::parse_action(cell)) == cell);
    }
    CHECK(actions >= 2 * 3 * golden.shape.microbatches);
  }
}

TEST_CASE("gpipe runs all forwards and then all backwards, both ascending") {
  CHECK(to_csv(qe::make_gpipe({2, 1, 3})) ==
        "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n"
        "1F0,1F1,1F2,1I0,1W0,1I1,1W1,1I2,1W2\n");
}

TEST_CASE("the 1f1b maker is classic and differs from the interleaved maker with one chunk") {
  const qe::PipelineShape shape{4, 1, 8};
  CHECK(qe::make_1f1b(shape).actions[0] != qe::make_interleaved_1f1b(shape).actions[0]);
  CHECK(qe::make_1f1b(shape).actions[3] == qe::make_interleaved_1f1b(shape).actions[3]);
}

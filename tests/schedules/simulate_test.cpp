// simulate() against computed makespans, idle times and bubbles, and by hand where messages take time.
#include "schedules/simulate.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "schedules/schedules.h"
#include "tests/catch.h"

using qe::Backward;
using qe::ScheduleKind;

namespace {

using enum ScheduleKind;
constexpr Backward kSplit = Backward::kSplit, kFull = Backward::kFull;

struct Row {
  ScheduleKind kind;
  Backward backward;
  qe::PipelineShape shape;
  double makespan;                 // F = I = W = 1, exact
  std::vector<double> idle;        // empty: not in the table
  double bubble;                   // per cent, one digit
  double unequal, unequal_bubble;  // F 1, I 1.2, W 0.9, one digit
};

const Row kRows[] = {
    {kInterleaved1F1B, kSplit, {2, 2, 4}, 26, {2, 0}, 7.7, 27.0, 8.1},
    {kZbv, kSplit, {2, 2, 4}, 25, {0, 0}, 4.0, 26.0, 4.6},
    {kZb1p, kSplit, {2, 2, 4}, 25, {1, 0}, 4.0, 26.1, 5.0},
    {kInterleaved1F1B, kSplit, {2, 2, 8}, 50, {2, 0}, 4.0, 51.8, 4.2},
    {kZbv, kSplit, {2, 2, 8}, 49, {0, 0}, 2.0, 50.8, 2.4},
    {kZb1p, kSplit, {2, 2, 8}, 49, {1, 0}, 2.0, 50.9, 2.6},
    {kInterleaved1F1B, kSplit, {4, 2, 8}, 54, {6, 4, 2, 0}, 11.1, 56.2, 11.7},
    {kZbv, kSplit, {4, 2, 8}, 51, {0, 0, 0, 0}, 5.9, 53.2, 6.8},
    {kZb1p, kSplit, {4, 2, 8}, 51, {3, 2, 1, 0}, 5.9, 53.5, 7.3},
    {kInterleaved1F1B, kSplit, {4, 1, 8}, 30, {6, 4, 2, 0}, 20.0, 31.4, 21.0},
    {k1F1B, kSplit, {4, 1, 8}, 30, {6, 4, 2, 0}, 20.0, 31.4, 21.0},
    {kZb1p, kSplit, {4, 1, 8}, 27, {3, 2, 1, 0}, 11.1, 28.7, 13.6},
    {kInterleaved1F1B, kFull, {2, 2, 4}, 27, {}, 11.1, 27.9, 11.1},
    {kInterleaved1F1B, kFull, {2, 2, 8}, 51, {}, 5.9, 52.7, 5.9},
    {kInterleaved1F1B, kFull, {4, 2, 8}, 57, {}, 15.8, 58.9, 15.8},
    {kInterleaved1F1B, kFull, {4, 1, 8}, 33, {}, 27.3, 34.1, 27.3},
};

qe::Timeline run(ScheduleKind kind, Backward backward, const qe::PipelineShape& shape, const qe::UniformCosts& costs) {
  return qe::simulate(qe::lower(qe::make_schedule(kind, shape, backward)), qe::cost_of(costs));
}

qe::Interval at(const qe::Schedule& schedule, const qe::Timeline& line, const char* text) {
  const qe::Action action = qe::parse_action(text);
  const auto rank = static_cast<std::size_t>(schedule.rank_of(action.stage));
  const auto& list = schedule.actions[rank];
  const auto place = std::find(list.begin(), list.end(), action);
  REQUIRE(place != list.end());
  return line.intervals[rank][static_cast<std::size_t>(place - list.begin())];
}

bool rounds_to(double value, double printed) { return std::abs(value - printed) <= 0.05 + 1e-9; }

}  // namespace

TEST_CASE("makespan, idle time and bubble are those of the computed table") {
  for (const Row& row : kRows) {
    INFO(qe::name_of(row.kind) << " P=" << row.shape.ranks << " V=" << row.shape.chunks_per_rank
                               << " M=" << row.shape.microbatches << (row.backward == kFull ? " full" : " split"));
    const qe::Timeline equal = run(row.kind, row.backward, row.shape, {});
    CHECK(equal.makespan == row.makespan);
    if (!row.idle.empty()) CHECK(equal.idle == row.idle);
    CHECK(rounds_to(100 * equal.bubble(), row.bubble));
    const qe::Timeline unequal = run(row.kind, row.backward, row.shape, {1, 1.2, 0.9});
    INFO("unequal " << unequal.makespan << " " << 100 * unequal.bubble());
    CHECK(rounds_to(unequal.makespan, row.unequal));
    CHECK(rounds_to(100 * unequal.bubble(), row.unequal_bubble));
  }
}

TEST_CASE("a full backward costs zbv three units and zb1p two at two ranks") {
  CHECK(run(kZbv, kFull, {2, 2, 4}, {}).makespan == 28);
  CHECK(run(kZbv, kFull, {2, 2, 8}, {}).makespan == 52);
  CHECK(run(kZb1p, kFull, {2, 2, 4}, {}).makespan == 27);
  CHECK(run(kZb1p, kFull, {2, 2, 8}, {}).makespan == 51);
}

TEST_CASE("splitting the backward takes P-1 weight gradients off the bubble of 1f1b and gpipe") {
  for (const ScheduleKind kind : {k1F1B, kGpipe}) {
    const qe::UniformCosts costs{2, 3, 5};
    CHECK(run(kind, kFull, {4, 1, 8}, costs).makespan == 8 * 10 + 3 * 10);
    CHECK(run(kind, kSplit, {4, 1, 8}, costs).makespan == 8 * 10 + 3 * (2 + 3));
  }
}

TEST_CASE("a message delays its receiver and not its sender") {
  const qe::Schedule list = qe::lower(qe::make_gpipe({2, 1, 2}));
  const qe::Timeline line = qe::simulate(list, qe::cost_of({1, 1, 1, 4, 0.5}));
  CHECK(at(list, line, "0SEND_F0").start == 1);
  CHECK(at(list, line, "0F1").start == 1);
  CHECK(at(list, line, "1RECV_F0").finish == 5);
  CHECK(at(list, line, "1F0").start == 5);
  CHECK(at(list, line, "1F1").start == 9);
  CHECK(at(list, line, "1I0").start == 10);
  CHECK(at(list, line, "0I0").start == 15);  // 1I0 ends at 11, the transfer back takes 4
  CHECK(at(list, line, "1REDUCE_GRAD").finish == 14.5);
  CHECK(line.busy[0] == 6.5);
  CHECK(line.makespan == at(list, line, "0REDUCE_GRAD").finish);
}

TEST_CASE("transfers of one edge follow each other") {
  // Two ring entries and a ready tensor at 2, but the edge carries microbatch 0 until 5.
  const qe::Schedule list = qe::lower(qe::make_interleaved_1f1b({2, 2, 4}));
  REQUIRE(qe::resources(list).stages[1].forward_ring == 2);
  const qe::Timeline line = qe::simulate(list, qe::cost_of({1, 1, 1, 4}));
  CHECK(at(list, line, "0F1").finish == 2);
  CHECK(at(list, line, "0SEND_F1").start == 5);
}

TEST_CASE("a transfer waits until the consumer of its ring entry's previous message has started") {
  const qe::Schedule list = qe::lower(qe::make_gpipe({2, 1, 3}));
  REQUIRE(qe::resources(list).stages[1].forward_ring == 1);
  const qe::Timeline line = qe::simulate(list, [](const qe::Action& action) {
    if (is_send(action.kind)) return 2.0;
    return action.stage == qe::StageIndex{1} ? 10.0 : 1.0;
  });
  CHECK(at(list, line, "0SEND_F1").finish == 5);
  CHECK(at(list, line, "1F1").start == 13);
  CHECK(at(list, line, "0SEND_F2").start == 13);
}

TEST_CASE("a W over four microbatches costs four W, a B one I and one W") {
  const qe::CostOf cost = qe::cost_of({1, 2, 3, 5, 7});
  CHECK(cost(qe::parse_action("0W0x4")) == 12);
  CHECK(cost(qe::parse_action("0B0")) == 5);
  CHECK(cost(qe::parse_action("0SEND_B0")) == 5);
  CHECK(cost(qe::parse_action("0REDUCE_GRAD")) == 7);
}

TEST_CASE("a slow stage is slow where it stands") {
  // The last stage of two takes four times as long: the first waits for it.
  const qe::Schedule list = qe::lower(qe::make_1f1b({2, 1, 4}));
  const qe::Timeline line = qe::simulate(list, [](const qe::Action& action) {
    if (!is_compute(action.kind)) return 0.0;
    return action.stage == qe::StageIndex{1} ? 4.0 : 1.0;
  });
  CHECK(line.idle[1] == 0);
  CHECK(line.busy[1] == 4 * 3 * 4);
  CHECK(line.makespan == 1 + 48);
  CHECK(line.intervals[0].back().finish == 1 + 48 - 4 + 2);  // its last I waits for all but the other rank's last W
}

TEST_CASE("an unsafe schedule is refused before it is timed") {
  qe::Schedule list = qe::lower(qe::make_1f1b({2, 1, 2}));
  list.actions[0].pop_back();
  REQUIRE_THROWS_AS(qe::simulate(list, qe::cost_of({})), qe::ScheduleError);
}

TEST_CASE("costs by stage: embedding and head weigh where they stand, a refresh once before the stage's first F") {
  const qe::CostOf cost = qe::cost_by_stage({{{1, 2, 3, 10}, {4, 5, 6, 0}}, 7, 8});
  CHECK(cost(qe::parse_action("0F0")) == 11);
  CHECK(cost(qe::parse_action("0F1")) == 1);
  CHECK(cost(qe::parse_action("1I0")) == 5);
  CHECK(cost(qe::parse_action("1W0x2")) == 12);
  CHECK(cost(qe::parse_action("0B1")) == 5);
  CHECK(cost(qe::parse_action("0SEND_F1")) == 7);
  CHECK(cost(qe::parse_action("1REDUCE_GRAD")) == 8);
  // Two ranks, one microbatch, by hand: 0F0 11, message 7, 1F0 4, 1I0 5, then the message back while 1W0 runs.
  const qe::Timeline line = qe::simulate(qe::lower(qe::make_1f1b({2, 1, 1})), cost);
  CHECK(line.makespan == 11 + 7 + 4 + 5 + 7 + 2 + 3 + 8);
  CHECK(line.busy[1] == 4 + 5 + 6 + 8);
}

TEST_CASE("a stage's costs may not be left out") {
  const qe::Schedule list = qe::lower(qe::make_1f1b({2, 1, 1}));
  CHECK_THROWS(qe::simulate(list, qe::cost_by_stage({{{1, 1, 1}}})));
}

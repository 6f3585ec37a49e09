// Peaks, rings, messages, delayed W and graph counts against the computed tables and the paper's figure 5.
#include <map>
#include <set>

#include "schedules/schedules.h"
#include "tests/catch.h"

using qe::Action;
using qe::ActionKind;
using qe::Backward;
using qe::Schedule;
using qe::ScheduleKind;

namespace {

using enum ScheduleKind;

struct Row {
  ScheduleKind kind;
  qe::PipelineShape shape;
  int rank;
  int tapes;
  std::vector<int> stage_tapes;  // of the rank's stages, ascending
  int pending;
  std::vector<int> stage_pending;
  int delayed_compute, delayed_lowered;
  int messages;
};

const Row kRows[] = {
    {kInterleaved1F1B, {2, 2, 4}, 0, 5, {4, 2}, 1, {1, 1}, 0, 5, 12},
    {kInterleaved1F1B, {2, 2, 4}, 1, 3, {3, 1}, 1, {1, 1}, 0, 8, 12},
    {kZbv, {2, 2, 4}, 0, 4, {4, 1}, 1, {1, 1}, 0, 5, 8},
    {kZbv, {2, 2, 4}, 1, 4, {3, 2}, 3, {2, 1}, 3, 5, 8},
    {kInterleaved1F1B, {2, 2, 8}, 0, 5, {4, 2}, 1, {1, 1}, 0, 11, 24},
    {kInterleaved1F1B, {2, 2, 8}, 1, 3, {3, 1}, 1, {1, 1}, 0, 16, 24},
    {kZbv, {2, 2, 8}, 0, 4, {4, 1}, 1, {1, 1}, 0, 9, 16},
    {kZbv, {2, 2, 8}, 1, 4, {3, 2}, 3, {2, 1}, 3, 9, 16},
    {kInterleaved1F1B, {4, 2, 8}, 0, 11, {8, 4}, 1, {1, 1}, 0, 10, 24},
    {kInterleaved1F1B, {4, 2, 8}, 1, 9, {8, 4}, 1, {1, 1}, 0, 16, 32},
    {kInterleaved1F1B, {4, 2, 8}, 2, 7, {7, 3}, 1, {1, 1}, 0, 16, 32},
    {kInterleaved1F1B, {4, 2, 8}, 3, 5, {5, 1}, 1, {1, 1}, 0, 16, 24},
    {kZbv, {4, 2, 8}, 0, 8, {8, 1}, 1, {1, 1}, 0, 11, 16},
    {kZbv, {4, 2, 8}, 1, 8, {7, 2}, 3, {2, 1}, 5, 16, 32},
    {kZbv, {4, 2, 8}, 2, 8, {6, 3}, 5, {3, 2}, 6, 16, 32},
    {kZbv, {4, 2, 8}, 3, 8, {5, 4}, 7, {4, 3}, 7, 11, 16},
    {kInterleaved1F1B, {4, 1, 8}, 0, 7, {7}, 1, {1}, 0, 0, 8},
    {kInterleaved1F1B, {4, 1, 8}, 1, 5, {5}, 1, {1}, 0, 8, 16},
    {kInterleaved1F1B, {4, 1, 8}, 2, 3, {3}, 1, {1}, 0, 8, 16},
    {kInterleaved1F1B, {4, 1, 8}, 3, 1, {1}, 1, {1}, 0, 8, 8},
    {k1F1B, {4, 1, 8}, 0, 4, {4}, 1, {1}, 0, 0, 8},
    {k1F1B, {4, 1, 8}, 1, 3, {3}, 1, {1}, 0, 8, 16},
    {k1F1B, {4, 1, 8}, 2, 2, {2}, 1, {1}, 0, 8, 16},
    {k1F1B, {4, 1, 8}, 3, 1, {1}, 1, {1}, 0, 8, 8},
    {kZb1p, {2, 2, 4}, 0, 4, {4, 2}, 1, {1, 1}, 0, 5, 12},
    {kZb1p, {2, 2, 4}, 1, 4, {4, 2}, 2, {2, 2}, 8, 8, 12},
    {kZb1p, {2, 2, 8}, 0, 4, {4, 2}, 1, {1, 1}, 0, 11, 24},
    {kZb1p, {2, 2, 8}, 1, 4, {4, 2}, 2, {2, 2}, 16, 16, 24},
    {kZb1p, {4, 2, 8}, 0, 8, {8, 4}, 1, {1, 1}, 0, 8, 24},
    {kZb1p, {4, 2, 8}, 1, 8, {8, 4}, 2, {2, 2}, 16, 16, 32},
    {kZb1p, {4, 2, 8}, 2, 8, {8, 4}, 3, {3, 3}, 16, 16, 32},
    {kZb1p, {4, 2, 8}, 3, 8, {8, 4}, 4, {4, 4}, 16, 16, 24},
    {kZb1p, {4, 1, 8}, 0, 4, {4}, 1, {1}, 0, 0, 8},
    {kZb1p, {4, 1, 8}, 1, 4, {4}, 2, {2}, 8, 8, 16},
    {kZb1p, {4, 1, 8}, 2, 4, {4}, 3, {3}, 8, 8, 16},
    {kZb1p, {4, 1, 8}, 3, 4, {4}, 4, {4}, 8, 8, 8},
};

Schedule lowered(ScheduleKind kind, const qe::PipelineShape& shape, Backward backward = Backward::kSplit) {
  return qe::lower(qe::make_schedule(kind, shape, backward));
}

int deepest_ring(const qe::Resources& need) {
  int deepest = 0;
  for (const auto& stage : need.stages) deepest = std::max({deepest, stage.forward_ring, stage.backward_ring});
  return deepest;
}

// Writes every received message into entry microbatch mod depth and reads it back at its consumer.
void check_ring_never_overwrites(const Schedule& schedule) {
  const qe::Resources need = qe::resources(schedule);
  for (const auto& list : schedule.actions) {
    std::map<std::pair<bool, qe::StageIndex>, std::map<int, int>> rings;  // entry → live microbatch
    for (const Action& action : list) {
      const bool forward = action.kind == ActionKind::kRecvF || action.kind == ActionKind::kForward;
      const auto& stage = need.stages[static_cast<std::size_t>(to_int(action.stage))];
      const int depth = forward ? stage.forward_ring : stage.backward_ring;
      auto& ring = rings[{forward, action.stage}];
      const int m = to_int(action.microbatch);
      if (is_recv(action.kind)) {
        REQUIRE(depth > 0);
        REQUIRE(ring.emplace(m % depth, m).second);
      } else if (is_compute(action.kind) && action.kind != ActionKind::kWeightGrad && depth > 0) {
        REQUIRE(ring.at(m % depth) == m);
        ring.erase(m % depth);
      }
    }
  }
}

}  // namespace

TEST_CASE("peak tapes, pending W, delayed W and messages are those of the computed table") {
  for (const Row& row : kRows) {
    const auto r = static_cast<std::size_t>(row.rank);
    INFO(qe::name_of(row.kind) << " P=" << row.shape.ranks << " M=" << row.shape.microbatches << " rank " << row.rank);
    const Schedule compute = qe::make_schedule(row.kind, row.shape, Backward::kSplit);
    const Schedule list = qe::lower(compute);
    const qe::Resources need = qe::resources(list);
    CHECK(need.ranks[r].peak_tapes == row.tapes);
    CHECK(need.ranks[r].peak_pending_w == row.pending);
    CHECK(need.ranks[r].messages_out == row.messages);
    CHECK(need.ranks[r].messages_in == row.messages);
    CHECK(qe::delayed_weight_grads(compute)[r] == row.delayed_compute);
    CHECK(qe::delayed_weight_grads(list)[r] == row.delayed_lowered);
    std::vector<int> tapes, pending;
    for (int stage = 0; stage < row.shape.stages(); ++stage) {
      if (list.rank_of(qe::StageIndex{stage}) != row.rank) continue;
      tapes.push_back(need.stages[static_cast<std::size_t>(stage)].peak_tapes);
      pending.push_back(need.stages[static_cast<std::size_t>(stage)].peak_pending_w);
    }
    CHECK(tapes == row.stage_tapes);
    CHECK(pending == row.stage_pending);
  }
}

TEST_CASE("zbv on two ranks shows the paper's figure 5") {
  const int microbatches[] = {2, 4, 8, 16};
  const int peak_tapes[] = {3, 4, 4, 4};
  const int delayed[] = {2, 5, 9, 17};
  for (std::size_t i = 0; i < 4; ++i) {
    const Schedule list = lowered(kZbv, {2, 2, microbatches[i]});
    CHECK(qe::resources(list).ranks[0].peak_tapes == peak_tapes[i]);
    CHECK(qe::delayed_weight_grads(list) == std::vector<int>{delayed[i], delayed[i]});
  }
}

TEST_CASE("graph counts stop growing with peak slots and grow with M with one slot a microbatch") {
  for (const int microbatches : {4, 8, 16, 64}) {
    const Schedule list = lowered(kZbv, {2, 2, microbatches});
    for (const int rank : {0, 1}) {
      const qe::GraphCount count = qe::graph_count(list, rank, true);
      CHECK(count.compute == 15);
      CHECK(count.first_write == 2);
      CHECK(count.refresh == 2);
      CHECK(count.total() == 19);
    }
  }
  for (const int microbatches : {2, 4, 8, 16}) {
    for (const ScheduleKind kind : {kZbv, kInterleaved1F1B}) {
      const qe::GraphCount count = qe::graph_count(lowered(kind, {2, 2, microbatches}), 0, false);
      CHECK(count.compute == 6 * microbatches);
      CHECK(count.first_write == 0);
      CHECK(count.refresh == 2);
    }
  }
  CHECK(qe::graph_count(lowered(kInterleaved1F1B, {2, 2, 8}), 0, true).compute == 18);
  CHECK(qe::graph_count(lowered(kInterleaved1F1B, {2, 2, 8}), 1, true).compute == 12);
}

TEST_CASE("a full backward has two graphs a slot, no pending W, and frees its tape at B") {
  const Schedule list = lowered(kZbv, {2, 2, 8}, Backward::kFull);
  CHECK(qe::graph_count(list, 0, false).compute == 2 * 2 * 8);
  const qe::Resources need = qe::resources(list);
  CHECK(need.ranks[0].peak_pending_w == 0);
  CHECK(qe::graph_count(list, 0, true).compute == 2 * (need.stages[0].peak_tapes + need.stages[3].peak_tapes));
  CHECK(qe::delayed_weight_grads(list) == std::vector<int>{0, 0});
  CHECK(qe::resources(lowered(k1F1B, {4, 1, 8}, Backward::kFull)).ranks[0].peak_tapes == 4);
}

TEST_CASE("a W over several microbatches rounds slots up and needs one W graph a group") {
  // One rank, W in pairs: three tapes live at once, so four adjacent slots.
  Schedule list{{1, 1, 6}, {0}, {{}}};
  for (const char* text : {"0F0", "0F1", "0F2", "0I0", "0I1", "0W0x2", "0F3", "0F4", "0I2", "0I3", "0W2x2", "0F5",
                           "0I4", "0I5", "0W4x2", "0REDUCE_GRAD"}) {
    list.actions[0].push_back(qe::parse_action(text));
  }
  qe::validate(list);
  const qe::Resources need = qe::resources(list);
  CHECK(need.stages[0].peak_tapes == 3);
  CHECK(need.ranks[0].peak_tapes == 3);
  CHECK(need.stages[0].peak_pending_w == 2);
  CHECK(need.stages[0].w_group == 2);
  CHECK(need.stages[0].peak_slots() == 4);
  CHECK(qe::graph_count(list, 0, true).compute == 4 + 4 + 2);
  CHECK(qe::graph_count(list, 0, true).total() == 4 + 4 + 2 + 1 + 1);
  CHECK(qe::graph_count(list, 0, false).compute == 6 + 6 + 3);
  CHECK(qe::delayed_weight_grads(list) == std::vector<int>{0});
}

TEST_CASE("every maker's list stays valid when its Ws are grouped, and a group waits for its last member") {
  for (const ScheduleKind kind : {k1F1B, kInterleaved1F1B, kZbv, ScheduleKind::kGpipe, ScheduleKind::kZb1p}) {
    const int chunks = kind == kZbv || kind == kInterleaved1F1B ? 2 : 1;
    const Schedule single = qe::make_schedule(kind, {2, chunks, 8}, Backward::kSplit);
    for (const int group : {1, 2, 4, 8}) {
      INFO(qe::name_of(kind) << " group " << group);
      const Schedule grouped = qe::group_weight_grads(single, group);
      qe::validate(qe::lower(grouped));
      int weight_grads = 0;
      for (const qe::Action& a : grouped.actions[0]) weight_grads += a.kind == qe::ActionKind::kWeightGrad;
      CHECK(weight_grads == chunks * 8 / group);
      const qe::StageResources need = qe::resources(qe::lower(grouped)).stages[0];
      CHECK(need.peak_slots() % group == 0);
      CHECK(need.peak_tapes >= qe::resources(qe::lower(single)).stages[0].peak_tapes);
    }
    CHECK(qe::group_weight_grads(single, 1).actions == single.actions);
    REQUIRE_THROWS_WITH(qe::group_weight_grads(single, 3), ContainsSubstring("do not divide 8 microbatches"));
  }
}

TEST_CASE("a stage's last W group lets the input gradients go first that another rank waits for") {
  const auto tail = [](const Schedule& list, int rank, std::size_t count) {
    std::string text;
    const std::vector<Action>& actions = list.actions.at(static_cast<std::size_t>(rank));
    for (std::size_t i = actions.size() - count; i < actions.size(); ++i) text += to_string(actions[i]) + " ";
    return text;
  };
  const Schedule loops = qe::group_weight_grads(qe::make_schedule(kInterleaved1F1B, {2, 2, 4}, Backward::kSplit), 4);
  CHECK(tail(loops, 1, 5) == "3I3 1I2 1I3 3W0x4 1W0x4 ");
  CHECK(tail(loops, 0, 5) == "2I3 2W0x4 0I2 0I3 0W0x4 ");  // nobody waits for stage 0's
  const Schedule folded = qe::group_weight_grads(qe::make_schedule(kZbv, {2, 2, 4}, Backward::kSplit), 4);
  CHECK(tail(folded, 1, 4) == "2I3 1I3 2W0x4 1W0x4 ");
  CHECK(tail(folded, 0, 5) == "3I3 3W0x4 0I2 0I3 0W0x4 ");
  // Earlier groups stand where they stood: their tapes are wanted for the microbatches to come.
  const Schedule pairs = qe::group_weight_grads(qe::make_schedule(kInterleaved1F1B, {2, 2, 4}, Backward::kSplit), 2);
  CHECK(tail(pairs, 1, 5) == "3I3 1I2 1I3 3W2x2 1W2x2 ");
}

TEST_CASE("receive rings are one deep for classic 1f1b, at most two for zbv, a round deep for interleaved chunks") {
  for (const int ranks : {2, 3, 4, 8}) {
    for (int rounds = 2; rounds <= 4; ++rounds) {
      const int microbatches = ranks * rounds;
      INFO("P=" << ranks << " M=" << microbatches);
      CHECK(deepest_ring(qe::resources(lowered(k1F1B, {ranks, 1, microbatches}))) == 1);
      // The long warm-up of interleaved with one chunk lets a second forward arrive while the last rank still runs W.
      CHECK(deepest_ring(qe::resources(lowered(kInterleaved1F1B, {ranks, 1, microbatches}))) == 2);
      CHECK(deepest_ring(qe::resources(lowered(kZbv, {ranks, 2, microbatches}))) <= 2);
      CHECK(deepest_ring(qe::resources(lowered(kInterleaved1F1B, {ranks, 2, microbatches}))) == ranks);
      CHECK(deepest_ring(qe::resources(lowered(kInterleaved1F1B, {ranks, 3, microbatches}))) == ranks);
      CHECK(deepest_ring(qe::resources(lowered(kGpipe, {ranks, 1, microbatches}))) == 1);
      CHECK(deepest_ring(qe::resources(lowered(kZb1p, {ranks, 1, microbatches}))) == 1);
      CHECK(deepest_ring(qe::resources(lowered(kZb1p, {ranks, 2, microbatches}))) == ranks);
    }
  }
  CHECK(deepest_ring(qe::resources(lowered(kZbv, {1, 2, 4}))) == 0);
  const qe::Resources ends = qe::resources(lowered(k1F1B, {2, 1, 4}));
  CHECK(ends.stages[0].forward_ring == 0);
  CHECK(ends.stages[0].backward_ring == 1);
  CHECK(ends.stages[1].forward_ring == 1);
  CHECK(ends.stages[1].backward_ring == 0);
}

TEST_CASE("no two live messages of a stage share a ring entry") {
  const int ranks = GENERATE(1, 2, 3, 4, 8);
  for (const ScheduleKind kind : {k1F1B, kInterleaved1F1B, kZbv, kGpipe, kZb1p}) {
    for (const int chunks : {1, 2, 3}) {
      for (int microbatches = 1; microbatches <= 3 * ranks; ++microbatches) {
        if (!qe::why_not(kind, {ranks, chunks, microbatches}).empty()) continue;
        check_ring_never_overwrites(lowered(kind, {ranks, chunks, microbatches}));
        check_ring_never_overwrites(lowered(kind, {ranks, chunks, microbatches}, Backward::kFull));
      }
    }
  }
}

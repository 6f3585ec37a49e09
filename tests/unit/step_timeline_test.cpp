// A watched step: its pieces against the list that ran, and the trace that is made of them.
#include "core/runtime/step_timeline.h"

#include <cctype>
#include <string>
#include <vector>

#include "app/bench/step_times.h"
#include "app/pipeline_plan.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

using namespace qe;
using namespace qe::testing;

namespace {

struct Watched {
  std::vector<std::vector<StepTimeline::Piece>> ranks;
  std::vector<std::uint64_t> digests;
};

Watched run(const Config& config, bool watch) {
  ThreadWorld world(config.pipeline.pipeline_model_parallel_size, 1);
  Watched watched;
  watched.ranks.resize(static_cast<std::size_t>(config.ranks()));
  watched.digests.resize(watched.ranks.size());
  run_ranks(world, [&](int rank) {
    CpuDevice device;
    CpuOps ops(device);
    const auto transport = world.connect(rank, device);
    StepTimeline timeline(device);
    timeline.watch(watch);
    RankConfig rank_config = make_rank_config(config);
    rank_config.timeline = &timeline;
    PipelineRank pipeline(device, ops, *transport, rank_config, make_rank_plan(config), nullptr);
    for (std::uint32_t step = 1; step <= 2; ++step) {
      const Batch batch = synthetic_batch(config, step);
      pipeline.train_step(batch.tokens, batch.targets, 1e-3, step);
    }
    watched.ranks[static_cast<std::size_t>(rank)] = timeline.pieces();
    watched.digests[static_cast<std::size_t>(rank)] = pipeline.state_digest();
    transport->barrier(Group::kWorld);
  });
  return watched;
}

const Overrides kZbv{"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2",
                     "pipeline.virtual_pipeline_model_parallel_size=2"};

}  // namespace

TEST_CASE("a watched step has a piece for every action of the list, and the bytes of one that nobody watched") {
  const Config config = test_config(kZbv);
  const Watched watched = run(config, true);
  const RankPlan plan = make_rank_plan(config);
  for (std::size_t r = 0; r < watched.ranks.size(); ++r) {
    std::vector<std::string> listed, seen;
    for (const Action& a : plan.schedule.actions[r]) listed.push_back(to_string(a));
    for (const StepTimeline::Piece& p : watched.ranks[r]) {
      CHECK(p.begin_ms >= 0.0);
      CHECK(p.end_ms >= p.begin_ms);
      if (std::isdigit(static_cast<unsigned char>(p.name.front())) != 0) seen.push_back(p.name);
    }
    std::erase_if(listed, [](const std::string& name) { return name.find("REDUCE") != std::string::npos; });
    CHECK(seen == listed);
  }
  const Watched alone = run(config, false);
  CHECK(alone.ranks[0].empty());
  CHECK(alone.digests == watched.digests);
}

TEST_CASE("a trace names every lane, and sums by kind add up") {
  const std::vector<StepTimeline::Piece> pieces{
      {"compute", "refresh 0", 0.0, 1.0},   {"compute", "0F0", 1.0, 3.0},      {"send", "0SEND_F0", 3.0, 3.5},
      {"compute", "copy to 0I0", 5.0, 5.5}, {"compute", "0I0", 5.5, 7.5},      {"compute", "0W0x4", 7.5, 8.5},
      {"compute", "12F1", 8.5, 12.5},       {"optimizer", "AdamW", 13.0, 14.0}};
  const std::vector<StepTimeline::Piece> again = pieces_from(to_text(pieces));
  REQUIRE(again.size() == pieces.size());
  CHECK(again[3].name == "copy to 0I0");
  CHECK(again[3].end_ms == 5.5);
  const auto table = time_by_kind(pieces);
  CHECK(table["span_ms"] == 14.0);
  CHECK(table["compute_idle_ms"] == 2.0);
  CHECK(table["kinds"]["F"]["count"] == 2);
  CHECK(table["kinds"]["F"]["sum_ms"] == 6.0);
  CHECK(table["kinds"]["W"]["sum_ms"] == 1.0);
  CHECK(table["kinds"]["SEND_F"]["sum_ms"] == 0.5);
  CHECK(table["kinds"]["refresh"]["sum_ms"] == 1.0);
  CHECK(table["kinds"]["copy"]["sum_ms"] == 0.5);
  CHECK(table["kinds"]["AdamW"]["sum_ms"] == 1.0);

  const auto trace = chrome_trace({pieces, pieces});
  int names = 0, events = 0;
  for (const auto& e : trace["traceEvents"]) {
    names += e["ph"] == "M" ? 1 : 0;
    events += e["ph"] == "X" ? 1 : 0;
  }
  CHECK(names == 2 * (1 + 3));
  CHECK(events == 2 * 8);
}

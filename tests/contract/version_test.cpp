// Version: a cached weight is used only in the epoch it was made for.
#include "core/qeffect/weight_version.h"

#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

namespace {
constexpr StageIndex kStage{0};
}

TEST_CASE("F checks the rowwise cache and the BF16 copies, each by name") {
  QEffect q(one_stage(1, 1));
  q.mark_refreshed(kStage, CacheLayout::kColumnwise);
  CHECK(refused_begin(q, "0F0").expected == "rowwise weight cache of epoch 0 (refresh the stage first)");
  q.mark_refreshed(kStage, CacheLayout::kRowwise);
  const ViolationReport r = refused_begin(q, "0F0");
  CHECK(r.relation == Violation::kVersion);
  CHECK(r.expected == "BF16 copies weight cache of epoch 0 (refresh the stage first)");
  CHECK(r.found == "no valid copy");
  q.mark_refreshed(kStage, CacheLayout::kBf16Copies);
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
}

TEST_CASE("I and B check the columnwise cache although F passed") {
  const std::string backward = GENERATE(as<std::string>{}, "0I0", "0B0");
  QEffect q(one_stage(1, 1));
  q.mark_refreshed(kStage, CacheLayout::kRowwise);
  q.mark_refreshed(kStage, CacheLayout::kBf16Copies);
  run(q, "0F0");
  const ViolationReport r = refused_begin(q, backward);
  CHECK(r.relation == Violation::kVersion);
  CHECK(r.operation == "begin(" + backward + ")");
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.expected == "columnwise weight cache of epoch 0 (refresh the stage first)");
  CHECK(r.found == "no valid copy");
  CHECK(q.live_tapes() == 1);
  q.mark_refreshed(kStage, CacheLayout::kColumnwise);
  run(q, "0B0");
  finish(q, 1);
}

TEST_CASE("a layout lost in the middle of a step is a violation and asks for no refresh") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0");
  q.invalidate(kStage, CacheLayout::kBf16Copies);
  CHECK_FALSE(q.needs_refresh(kStage));
  CHECK(refused_begin(q, "0F1").relation == Violation::kVersion);
  CHECK(refused_begin(q, "0I0").relation == Violation::kVersion);
  q.mark_refreshed(kStage, CacheLayout::kBf16Copies);
  run(q, "0F1 0I0");
  q.invalidate(kStage, CacheLayout::kRowwise);
  q.invalidate(kStage, CacheLayout::kColumnwise);
  run(q, "0W0");  // W reads the tape alone
  refresh(q);
  run(q, "0I1 0W1");
  finish(q, 2);
}

TEST_CASE("a refresh is due at the start and after a commit, a load and a rebuild, until every layout is marked") {
  QEffect q(one_stage(1, 1));
  const auto refresh_is_due = [&] {
    for (CacheLayout layout : {CacheLayout::kBf16Copies, CacheLayout::kRowwise, CacheLayout::kColumnwise}) {
      CHECK(q.needs_refresh(kStage));
      q.mark_refreshed(kStage, layout);
    }
    CHECK_FALSE(q.needs_refresh(kStage));
  };
  refresh_is_due();
  run(q, "0F0 0I0 0W0");
  CHECK_FALSE(q.needs_refresh(kStage));
  finish(q, 1);
  refresh_is_due();
  q.restore(41);
  CHECK(q.epoch() == 41);
  CHECK(q.version(kStage).weight_epoch() == 41);
  CHECK(q.version(kStage).cache_epoch(CacheLayout::kRowwise) == kNeverCached);
  refresh_is_due();
  q.abort_epoch();
  CHECK_FALSE(q.needs_refresh(kStage));
  q.rebuild();
  refresh_is_due();
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
  CHECK(q.epoch() == 42);
  CHECK(q.version(kStage).weight_epoch() == 42);
}

TEST_CASE("a load of the same epoch leaves no cache usable") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  q.restore(0);
  CHECK(refused_begin(q, "0F0").found == "no valid copy");
  refresh(q);
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
}

TEST_CASE("versions of two stages are independent") {
  QEffect q({{one_layer(0, 1), one_layer(1, 1)}, 1});
  refresh(q, 0);
  run(q, "0F0");
  CHECK(refused_begin(q, "1F0").relation == Violation::kVersion);
  run(q, "0I0 0W0");
  refresh(q, 1);
  run(q, "1F0 1I0 1W0");
  finish(q, 1, 2);
}

TEST_CASE("evaluation checks the caches, the output buffer and the tapes, and binds nothing") {
  QEffect q({{one_layer(0, 1), one_layer(1, 1)}, 1});
  const ViolationReport stale = refused([&] { q.begin_evaluate(kStage, MicrobatchIndex{9}); });
  CHECK(stale.relation == Violation::kVersion);
  CHECK(stale.operation == "begin(0F9)");
  refresh(q, 0);
  refresh(q, 1);
  q.begin_evaluate(kStage, MicrobatchIndex{9});  // not bounded by the step's microbatches
  q.begin_evaluate(kStage, MicrobatchIndex{9});
  CHECK(q.live_tapes() == 0);

  q.begin_use({kStage, BoundaryKind::kOutput, 0}, parse_action("0SEND_F9"));
  CHECK(refused([&] { q.begin_evaluate(kStage, MicrobatchIndex{10}); }).relation == Violation::kCompletion);
  q.ordered({kStage, BoundaryKind::kOutput, 0});
  q.begin_evaluate(kStage, MicrobatchIndex{10});
  q.complete_uses();

  run(q, "1F0");
  const ViolationReport live = refused([&] { q.begin_evaluate(kStage, MicrobatchIndex{0}); });
  CHECK(live.relation == Violation::kOwnership);
  CHECK(live.operation == "begin_evaluate(0F0)");
  CHECK(live.key == "epoch 0, stage 1, microbatch 0, unit 0, invocation 0");
  CHECK(live.ref == "slot 0, generation 1");
  CHECK(live.found == "a live tape");
  run(q, "1B0 0F0 0B0");
  q.finalize_step(counters(1, 2));
  CHECK(refused([&] { q.begin_evaluate(kStage, MicrobatchIndex{0}); }).relation == Violation::kCommit);
  q.commit_step();
  refresh(q, 0);
  q.begin_evaluate(kStage, MicrobatchIndex{0});
  q.abort_epoch();
  CHECK(refused([&] { q.begin_evaluate(kStage, MicrobatchIndex{0}); }).relation == Violation::kRebuild);
}

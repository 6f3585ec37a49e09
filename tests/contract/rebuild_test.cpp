// Failure: an action that does not commit aborts its epoch; nothing of it counts until gradient memory is rebuilt.
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

TEST_CASE("an action of any kind that fails aborts the epoch and releases every tape of the rank") {
  const std::string failing = GENERATE(as<std::string>{}, "0F1", "0I0", "0B0", "1W0");
  QEffect q({{one_layer(0, 2), one_layer(1, 2)}, 2});
  refresh(q, 0);
  refresh(q, 1);
  run(q, "0F0 1F0 1I0");
  REQUIRE(q.live_tapes() == 2);
  { ActionGuard guard = q.begin(parse_action(failing)); }
  CHECK(q.aborted());
  CHECK(q.live_tapes() == 0);
  CHECK(q.pending_weight_grads() == 0);
  for (const std::string action : {"0F1", "0I0", "1W0", "1F1"}) {
    const ViolationReport r = refused_begin(q, action);
    CHECK(r.relation == Violation::kRebuild);
    CHECK(r.operation == "begin(" + action + ")");
    CHECK(r.found == "epoch 0 aborted by " + failing);
  }
  CHECK(refused([&] { q.finalize_step(counters(2, 2)); }).relation == Violation::kRebuild);
  CHECK(refused([&] { q.commit_step(); }).relation == Violation::kRebuild);
  CHECK(refused([&] { q.begin_reduction(StageIndex{0}); }).relation == Violation::kRebuild);
  CHECK(refused([&] { q.complete_reduction(StageIndex{0}); }).relation == Violation::kRebuild);

  q.rebuild();
  CHECK_FALSE(q.aborted());
  CHECK(q.epoch() == 0);
  CHECK(refused_begin(q, "0F0").relation == Violation::kVersion);
  refresh(q, 0);
  refresh(q, 1);
  run(q, "0F0 0F1 1F0 1F1 0B0 0B1 1B0 1B1");
  finish(q, 2, 2);
  q.require_quiescent();
}

TEST_CASE("a guard whose epoch was aborted meanwhile cannot commit, even after a rebuild") {
  const bool rebuilt = GENERATE(false, true);
  QEffect q(one_stage(1, 1));
  refresh(q);
  {
    ActionGuard late = q.begin(parse_action("0F0"));
    q.abort_epoch();
    if (rebuilt) {
      q.rebuild();
      refresh(q);
      ActionGuard again = q.begin(parse_action("0F0"));
      const ViolationReport r = refused([&] { late.commit(); });
      CHECK(r.relation == Violation::kRebuild);
      CHECK(r.operation == "commit(0F0)");
      CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
      CHECK(r.found == "that epoch aborted");
      again.commit();
    } else {
      CHECK(refused([&] { late.commit(); }).relation == Violation::kRebuild);
    }
  }  // the late guard aborts nothing of the new attempt
  CHECK(q.aborted() == !rebuilt);
  if (!rebuilt) {
    q.rebuild();
    refresh(q);
    run(q, "0F0");
  }
  run(q, "0I0 0W0");
  finish(q, 1);
}

TEST_CASE("an abort after finalize takes the commit back") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0B0");
  q.finalize_step(counters(1));
  q.abort_epoch();
  const ViolationReport r = refused([&] { q.commit_step(); });
  CHECK(r.relation == Violation::kRebuild);
  CHECK(r.found == "epoch 0 aborted");
  q.rebuild();
  CHECK(refused([&] { q.commit_step(); }).relation == Violation::kCommit);
  refresh(q);
  run(q, "0F0 0B0");
  finish(q, 1);
}

TEST_CASE("an abort forgets the reductions of the step") {
  ContractConfig config = one_stage(1, 1);
  config.reduced = true;
  QEffect q(config);
  refresh(q);
  run(q, "0F0 0B0");
  q.begin_reduction(StageIndex{0});
  q.abort_epoch();
  q.rebuild();
  refresh(q);
  run(q, "0F0 0B0");
  CHECK(refused([&] { q.finalize_step(counters(1)); }).found == "none begun in this step");
  q.begin_reduction(StageIndex{0});
  q.complete_reduction(StageIndex{0});
  finish(q, 1);
}

TEST_CASE("a rebuild without an abort is refused") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0");
  const ViolationReport r = refused([&] { q.rebuild(); });
  CHECK(r.relation == Violation::kRebuild);
  CHECK(r.operation == "rebuild");
  CHECK(r.expected == "an aborted epoch");
  CHECK(q.live_tapes() == 1);
  run(q, "0B0");
  finish(q, 1);
}

TEST_CASE("a guard moves its duty along and commits once") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  ActionGuard first = q.begin(parse_action("0F0"));
  {
    ActionGuard second = std::move(first);
    CHECK(to_string(second.action()) == "0F0");
    second.commit();
    CHECK_THROWS_AS(second.commit(), std::logic_error);
  }
  CHECK_FALSE(q.aborted());
  run(q, "0B0");
  finish(q, 1);
}

TEST_CASE("a rejected check is no abort") {
  QEffect q(one_stage(2, 1));
  refresh(q);
  run(q, "0F0");
  for (const std::string wrong : {"0F1", "0F0", "0I1", "0W0", "0W0x2", "0B1", "9F0"}) {
    refused_begin(q, wrong);
    CHECK_FALSE(q.aborted());
    CHECK(q.live_tapes() == 1);
    CHECK(q.find(key(0, 0, 0)).generation == 1);
  }
  run(q, "0B0 0F1 0B1");
  finish(q, 2);
}

// Commit: an optimizer step needs everything, once; afterwards a new epoch starts.
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

namespace {
constexpr StageIndex kStage{0};
}

TEST_CASE("finalize names a missing I before the W that waits for it") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0 0W0");
  const ViolationReport r = refused([&] { q.finalize_step(counters(2)); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.key == "stage 0, vector 0, microbatch 1");
  CHECK(r.found == "missing I");
  run(q, "0I1 0W1");
  finish(q, 2);
}

TEST_CASE("finalize names a missing microbatch of any stage of the rank") {
  QEffect q({{one_layer(0, 2), one_layer(7, 2)}, 2});
  refresh(q, 0);
  refresh(q, 7);
  run(q, "0F0 0B0 0F1 0B1 7F0 7B0");
  CHECK(refused([&] { q.finalize_step(counters(2, 2)); }).key == "stage 7, vector 0, microbatch 1");
  run(q, "7F1 7B1");
  finish(q, 2, 2);
}

TEST_CASE("a live tape withholds the step even of a stage without gradients") {
  QEffect q({{{kStage, 1, 0, 0}}, 1});
  refresh(q);
  run(q, "0F0 0I0");
  const ViolationReport r = refused([&] { q.finalize_step(counters(1)); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.expected == "no live tape");
  run(q, "0W0");
  finish(q, 1);
}

TEST_CASE("an action in progress withholds the step") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0");
  ActionGuard open = q.begin(parse_action("0W0"));
  const ViolationReport r = refused([&] { q.finalize_step(counters(1)); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.found == "0W0 begun and not committed");
  open.commit();
  finish(q, 1);
}

TEST_CASE("a commit without a finalized step is refused, also twice in a row") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0 0W0");
  const ViolationReport r = refused([&] { q.commit_step(); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.operation == "commit_step");
  CHECK(r.key == "epoch 0");
  CHECK(r.expected == "finalize_step() before it");
  finish(q, 1);
  CHECK(refused([&] { q.commit_step(); }).key == "epoch 1");
  CHECK(q.epoch() == 1);
}

TEST_CASE("after finalize only the commit is legal") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0 0W0");
  q.finalize_step(counters(1));
  for (const std::string action : {"0F0", "0I0", "0W0", "0B0"}) {
    const ViolationReport r = refused_begin(q, action);
    CHECK(r.relation == Violation::kCommit);
    CHECK(r.operation == "begin(" + action + ")");
    CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
    CHECK(r.found == "epoch 0 finalized and not committed");
  }
  CHECK(refused([&] { q.finalize_step(counters(1)); }).relation == Violation::kCommit);
  CHECK(refused([&] { q.begin_reduction(kStage); }).relation == Violation::kCommit);
  q.commit_step();
  refresh(q);
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
  CHECK(q.epoch() == 2);
}

TEST_CASE("a reduction waits for every gradient of its stage") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0 0W0 0I1");
  const ViolationReport r = refused([&] { q.begin_reduction(kStage); });
  CHECK(r.relation == Violation::kDestination);
  CHECK(r.operation == "begin_reduction");
  CHECK(r.key == "stage 0, matrix 0, microbatch 1");
  CHECK(r.found == "missing W");
  run(q, "0W1");
  q.begin_reduction(kStage);
  q.complete_reduction(kStage);
  finish(q, 2);
}

TEST_CASE("a reduction in flight withholds the step") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0B0");
  q.begin_reduction(kStage);
  const ViolationReport r = refused([&] { q.finalize_step(counters(1)); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.key == "stage 0");
  CHECK(r.expected == "completed gradient reductions");
  CHECK(r.found == "a reduction in flight");
  q.complete_reduction(kStage);
  finish(q, 1);
}

TEST_CASE("gradients are reduced once a step") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0B0");
  CHECK(refused([&] { q.complete_reduction(kStage); }).found == "none begun in this step");
  q.begin_reduction(kStage);
  const ViolationReport r = refused([&] { q.begin_reduction(kStage); });
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.found == "one in flight");
  q.complete_reduction(kStage);
  CHECK(refused([&] { q.begin_reduction(kStage); }).found == "a second one");
  CHECK(refused([&] { q.complete_reduction(kStage); }).found == "one that has completed");
  finish(q, 1);
}

TEST_CASE("with replicas a step without its reductions is withheld") {
  ContractConfig config = one_stage(1, 1);
  config.reduced = true;
  QEffect q(config);
  for (int step = 0; step < 2; ++step) {
    refresh(q);
    run(q, "0F0 0B0");
    const ViolationReport r = refused([&] { q.finalize_step(counters(1)); });
    CHECK(r.relation == Violation::kCommit);
    CHECK(r.found == "none begun in this step");
    q.begin_reduction(kStage);
    q.complete_reduction(kStage);
    finish(q, 1);
  }
}

TEST_CASE("the number of device counters is ours to get right") {
  QEffect q(one_stage(1, 1));
  CHECK_THROWS_AS(q.finalize_step({}), std::logic_error);
}

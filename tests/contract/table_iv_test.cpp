// The paper's seven injected violations, in the order of its Table IV. Each is refused at its first invalid operation,
// and what it did not touch goes on: every case ends with a finished step or a checkpoint that may be taken.
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

TEST_CASE("Table IV 1: a stale reference after slot reuse is rejected at lookup and the current tape survives") {
  QEffect q(one_stage(2, 1));
  refresh(q);
  run(q, "0F0");
  const TapeRef old = q.find(key(0, 0, 0));
  run(q, "0I0 0W0 0F1");
  const TapeRef current = q.find(key(0, 0, 1));
  REQUIRE(current.slot == old.slot);

  const ViolationReport r = refused([&] { q.check_reference(key(0, 0, 0), old); });
  CHECK(r.relation == Violation::kLookup);
  CHECK(r.operation == "check_reference");
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.expected == "this tape live in exactly this generation");
  CHECK(r.found == "slot 0 held by epoch 0, stage 0, microbatch 1, unit 0, invocation 0 in generation 2");
  // The right key with the old generation, and the old key with the right generation, are stale as well.
  CHECK(refused([&] { q.check_reference(key(0, 0, 1), old); }).relation == Violation::kLookup);
  CHECK(refused([&] { q.check_reference(key(0, 0, 0), current); }).relation == Violation::kLookup);
  // So is the action that would have used it.
  const ViolationReport again = refused_begin(q, "0I0");
  CHECK(again.relation == Violation::kLookup);
  CHECK(again.operation == "begin(0I0)");
  CHECK(again.ref == "slot 0, generation 1");

  q.check_reference(key(0, 0, 1), current);
  CHECK(q.live_tapes() == 1);
  run(q, "0I1 0W1");
  finish(q, 2);
}

TEST_CASE("Table IV 2: a repeated I is rejected by ownership and W still finds its tape") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0");

  const ViolationReport r = refused_begin(q, "0I0");
  CHECK(r.relation == Violation::kOwnership);
  CHECK(r.operation == "begin(0I0)");
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.expected == "one I per tape");
  CHECK(r.found == "a second I");

  CHECK(q.pending_weight_grads() == 1);
  run(q, "0W0");
  finish(q, 1);
}

TEST_CASE("Table IV 3: finalize with one missing W is withheld and succeeds once W has run") {
  QEffect q(one_stage(4, 4));
  refresh(q);
  run(q, "0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3");

  const ViolationReport r = refused([&] { q.finalize_step(counters(4)); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.operation == "finalize_step");
  CHECK(r.key == "stage 0, matrix 0, microbatch 3");
  CHECK(r.ref.empty());
  CHECK(r.expected == "every gradient written exactly once");
  CHECK(r.found == "missing W");
  CHECK(refused([&] { q.commit_step(); }).relation == Violation::kCommit);
  CHECK(q.epoch() == 0);

  run(q, "0W3");
  finish(q, 4);
  CHECK(q.epoch() == 1);
}

TEST_CASE("Table IV 4: a write after an aborted write is rejected until gradient memory is rebuilt") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0 0I1 0W0");
  { ActionGuard failing = q.begin(parse_action("0W1")); }  // the write throws: no commit
  REQUIRE(q.aborted());

  const ViolationReport r = refused_begin(q, "0W1");
  CHECK(r.relation == Violation::kRebuild);
  CHECK(r.operation == "begin(0W1)");
  CHECK(r.key == "epoch 0, stage 0, microbatch 1, unit 0, invocation 0");
  CHECK(r.ref.empty());
  CHECK(r.expected == "gradient memory rebuilt after the abort");
  CHECK(r.found == "epoch 0 aborted by 0W1");

  CHECK(q.epoch() == 0);
  q.rebuild();
  refresh(q);
  run(q, "0F0 0F1 0I0 0W0 0I1 0W1");
  finish(q, 2);
}

TEST_CASE("Table IV 5: a stale weight cache is rejected at the start of F") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0 0W0");
  finish(q, 1);

  const ViolationReport r = refused_begin(q, "0F0");
  CHECK(r.relation == Violation::kVersion);
  CHECK(r.operation == "begin(0F0)");
  CHECK(r.key == "epoch 1, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref.empty());
  CHECK(r.expected == "rowwise weight cache of epoch 1 (refresh the stage first)");
  CHECK(r.found == "the copy of epoch 0");
  CHECK(q.live_tapes() == 0);
  CHECK(q.needs_refresh(StageIndex{0}));

  refresh(q);
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
}

TEST_CASE("Table IV 6: a checkpoint with a live tape is withheld") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0");

  const ViolationReport r = refused([&] { q.require_quiescent(); });
  CHECK(r.relation == Violation::kQuiescence);
  CHECK(r.operation == "require_quiescent");
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.expected == "no live tape");
  CHECK(r.found == "a live tape");

  CHECK(q.live_tapes() == 1);
  run(q, "0I0 0W0");
  finish(q, 1);
  q.require_quiescent();
}

TEST_CASE("Table IV 7: a checkpoint with a reduction in flight is withheld") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0 0W0");
  q.begin_reduction(StageIndex{0});

  const ViolationReport r = refused([&] { q.require_quiescent(); });
  CHECK(r.relation == Violation::kQuiescence);
  CHECK(r.operation == "require_quiescent");
  CHECK(r.key == "stage 0");
  CHECK(r.ref.empty());
  CHECK(r.expected == "no reduction in flight");
  CHECK(r.found == "a reduction in flight");

  q.complete_reduction(StageIndex{0});
  finish(q, 1);
  q.require_quiescent();
}

// Quiescence: a checkpoint holds a step boundary and nothing else.
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

TEST_CASE("a fresh contract and one between two steps are quiescent") {
  QEffect q(one_stage(2, 2));
  q.require_quiescent();
  refresh(q);
  q.require_quiescent();
  run(q, "0F0 0F1 0B0 0B1");
  finish(q, 2);
  q.require_quiescent();
}

TEST_CASE("an action in progress withholds a checkpoint and tells of its open writes") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0");
  ActionGuard open = q.begin(parse_action("0W0"));
  const ViolationReport r = refused([&] { q.require_quiescent(); });
  CHECK(r.relation == Violation::kQuiescence);
  CHECK(r.operation == "require_quiescent");
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.expected == "no action in progress");
  CHECK(r.found == "0W0 begun and not committed, 6 gradient writes open");
  open.commit();
  finish(q, 1);
  q.require_quiescent();
}

TEST_CASE("a message in flight withholds a checkpoint, ordered or not, until the host knows it is over") {
  QEffect q(one_stage(1, 1));
  const BoundaryBuffer output{StageIndex{0}, BoundaryKind::kOutput, 0};
  refresh(q);
  run(q, "0F0");
  q.begin_use(output, parse_action("0SEND_F0"));
  run(q, "0B0");
  finish(q, 1);
  for (int ordered = 0; ordered < 2; ++ordered) {
    const ViolationReport r = refused([&] { q.require_quiescent(); });
    CHECK(r.relation == Violation::kQuiescence);
    CHECK(r.key == "stage 0, output of slot 0");
    CHECK(r.expected == "no message or copy in flight");
    CHECK(r.found == "0SEND_F0 in flight");
    q.ordered(output);
  }
  q.complete_uses();
  q.require_quiescent();
}

TEST_CASE("a step half done withholds a checkpoint although no tape is live") {
  QEffect q({{one_layer(0, 2), one_layer(1, 2)}, 2});
  refresh(q, 0);
  refresh(q, 1);
  run(q, "1F0 1I0 1W0");
  REQUIRE(q.live_tapes() == 0);
  const ViolationReport r = refused([&] { q.require_quiescent(); });
  CHECK(r.relation == Violation::kQuiescence);
  CHECK(r.key == "stage 1");
  CHECK(r.expected == "a step boundary");
  CHECK(r.found == "a step with 1 of 2 forwards done and no commit");
  run(q, "0F0 0F1 1F1 1B1 0B0 0B1");
  q.finalize_step(counters(2, 2));
  CHECK(refused([&] { q.require_quiescent(); }).found == "a step finalized and not committed");
  q.commit_step();
  q.require_quiescent();
}

TEST_CASE("an aborted epoch withholds a checkpoint until it is rebuilt") {
  QEffect q(one_stage(1, 1));
  q.abort_epoch();
  const ViolationReport r = refused([&] { q.require_quiescent(); });
  CHECK(r.relation == Violation::kQuiescence);
  CHECK(r.key == "epoch 0");
  CHECK(r.found == "an aborted epoch");
  q.rebuild();
  q.require_quiescent();
}

TEST_CASE("a load is refused unless the rank is quiescent") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0");
  const ViolationReport r = refused([&] { q.restore(7); });
  CHECK(r.relation == Violation::kQuiescence);
  CHECK(r.operation == "restore");
  CHECK(r.found == "a live tape");
  CHECK(q.epoch() == 0);
  run(q, "0B0");
  finish(q, 1);
  q.restore(7);
  CHECK(q.epoch() == 7);
  refresh(q);
  run(q, "0F0");
  CHECK(q.find(key(7, 0, 0)).generation == 2);
  run(q, "0B0");
  finish(q, 1);
  CHECK(q.epoch() == 8);
}

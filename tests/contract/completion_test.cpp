// Completion, host half: a boundary buffer is not touched before a wait for its last use was issued.
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

TEST_CASE("F does not rewrite an output that a send still reads") {
  QEffect q(one_stage(2, 1));
  refresh(q);
  run(q, "0F0");
  const BoundaryBuffer output{StageIndex{0}, BoundaryKind::kOutput, 0};
  q.begin_use(output, parse_action("0SEND_F0"));
  run(q, "0I0 0W0");

  const ViolationReport r = refused_begin(q, "0F1");
  CHECK(r.relation == Violation::kCompletion);
  CHECK(r.operation == "begin(0F1)");
  CHECK(r.key == "stage 0, output of slot 0");
  CHECK(r.ref.empty());
  CHECK(r.expected == "a wait for the buffer's last use before the next one");
  CHECK(r.found == "0SEND_F0 in flight and no wait for it");
  CHECK(q.live_tapes() == 0);

  q.ordered(output);
  run(q, "0F1 0I1 0W1");
  finish(q, 2);
}

TEST_CASE("I and B do not rewrite an input gradient that a send still reads") {
  const std::string backward = GENERATE(as<std::string>{}, "0I2", "0B2");
  QEffect q(one_stage(3, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0 0W0");
  const BoundaryBuffer gradient{StageIndex{0}, BoundaryKind::kInputGrad, 0};
  q.begin_use(gradient, parse_action("0SEND_B0"));
  run(q, "0I1 0W1 0F2");  // slot 1's input gradient is another buffer

  const ViolationReport r = refused_begin(q, backward);
  CHECK(r.relation == Violation::kCompletion);
  CHECK(r.operation == "begin(" + backward + ")");
  CHECK(r.key == "stage 0, input gradient of slot 0");
  CHECK(r.found == "0SEND_B0 in flight and no wait for it");

  q.complete_uses();
  run(q, "0B2");
  finish(q, 3);
}

TEST_CASE("a ring entry is not received into before its last copy is ordered") {
  BoundaryOwner owner;
  const BoundaryBuffer entry{StageIndex{2}, BoundaryKind::kInputRing, 1};
  const BoundaryBuffer other{StageIndex{2}, BoundaryKind::kOutputGradRing, 1};
  owner.begin_use(entry, parse_action("2RECV_F1"));
  owner.begin_use(other, parse_action("2RECV_B1"));
  CHECK(owner.in_flight() == 2);

  const ViolationReport r = refused([&] { owner.begin_use(entry, parse_action("2F1")); });
  CHECK(r.relation == Violation::kCompletion);
  CHECK(r.operation == "begin_use(2F1)");
  CHECK(r.key == "stage 2, input ring entry 1");
  CHECK(r.found == "2RECV_F1 in flight and no wait for it");

  owner.ordered(entry);
  owner.begin_use(entry, parse_action("2F1"));  // the copy out, behind the receive
  CHECK(refused([&] { owner.begin_use(entry, parse_action("2RECV_F3")); }).found == "2F1 in flight and no wait for it");
  CHECK(owner.in_flight() == 2);  // ordered is not complete
  owner.complete_all();
  CHECK(owner.in_flight() == 0);
  owner.begin_use(entry, parse_action("2RECV_F3"));
  owner.require_free(other, parse_action("2F3"));
  CHECK(to_string(other) == "stage 2, output gradient ring entry 1");
}

TEST_CASE("ordering a buffer that nobody uses is harmless") {
  BoundaryOwner owner;
  owner.ordered({StageIndex{0}, BoundaryKind::kOutput, 0});
  CHECK(owner.in_flight() == 0);
}

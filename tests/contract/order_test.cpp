// Order: scaling state moves once per F and once per I, ascending; W moves none.
#include "core/qeffect/effect_chain.h"
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

TEST_CASE("an F out of order is rejected and the right one still runs") {
  QEffect q(one_stage(3, 3));
  refresh(q);
  run(q, "0F0");

  SECTION("skipped") {
    const ViolationReport r = refused_begin(q, "0F2");
    CHECK(r.relation == Violation::kOrder);
    CHECK(r.operation == "begin(0F2)");
    CHECK(r.key == "epoch 0, stage 0, microbatch 2, unit 0, invocation 0");
    CHECK(r.ref.empty());
    CHECK(r.expected == "microbatch 1 next in the forward chain");
    CHECK(r.found == "0F2");
  }
  SECTION("repeated") {
    const ViolationReport r = refused_begin(q, "0F0");
    CHECK(r.relation == Violation::kOrder);
    CHECK(r.expected == "microbatch 1 next in the forward chain");
  }
  SECTION("beyond the step") {
    run(q, "0F1 0F2");
    const ViolationReport r = refused_begin(q, "0F3");
    CHECK(r.relation == Violation::kOrder);
    CHECK(r.expected == "no further transition of the forward chain in this step");
    CHECK(q.live_tapes() == 3);
    run(q, "0I0 0I1 0I2 0W0 0W1 0W2");
    finish(q, 3);
    return;
  }
  CHECK(q.live_tapes() == 1);
  run(q, "0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2");
  finish(q, 3);
}

TEST_CASE("an I out of order is rejected although its tape is live") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1");
  const ViolationReport r = refused_begin(q, "0I1");
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.operation == "begin(0I1)");
  CHECK(r.key == "epoch 0, stage 0, microbatch 1, unit 0, invocation 0");
  CHECK(r.expected == "microbatch 0 next in the backward chain");
  CHECK(r.found == "0I1");
  run(q, "0I0 0I1 0W0 0W1");
  finish(q, 2);
}

TEST_CASE("a W out of order is rejected, because the order of additions is observable") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0 0I1");
  const ViolationReport r = refused_begin(q, "0W1");
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.operation == "begin(0W1)");
  CHECK(r.expected == "microbatch 0 next in the stage's weight gradients");
  CHECK(r.found == "0W1");
  CHECK(q.pending_weight_grads() == 2);
  run(q, "0W0 0W1");
  finish(q, 2);
}

TEST_CASE("a B out of order is rejected and B consumes both ways at once") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1");
  const ViolationReport r = refused_begin(q, "0B1");
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.operation == "begin(0B1)");
  CHECK(r.expected == "microbatch 0 next in the backward chain");
  run(q, "0B0");
  CHECK(q.live_tapes() == 1);
  CHECK(q.pending_weight_grads() == 0);
  run(q, "0B1");
  finish(q, 2);
}

TEST_CASE("a B that would overtake a pending W is rejected") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0");
  const ViolationReport r = refused_begin(q, "0B1");
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.expected == "microbatch 0 next in the stage's weight gradients");
  CHECK(r.found == "0B1");
  run(q, "0W0 0B1");  // I and W may be one action for one microbatch and two for another
  finish(q, 2);
}

TEST_CASE("one action of a stage runs at a time, other stages go on") {
  QEffect q({{one_layer(0, 2), one_layer(3, 2)}, 1});
  refresh(q, 0);
  refresh(q, 3);
  ActionGuard open = q.begin(parse_action("0F0"));
  const ViolationReport r = refused_begin(q, "0I0");
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.operation == "begin(0I0)");
  CHECK(r.expected == "no action of the stage in progress");
  CHECK(r.found == "0F0 begun and not committed");
  run(q, "3F0");
  open.commit();
  run(q, "0I0 0W0 3I0 3W0");
  finish(q, 1, 2);
}

TEST_CASE("only W covers several microbatches") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  Action two = parse_action("0F0");
  two.count = 2;
  CHECK(refused([&] { ActionGuard g = q.begin(two); }).relation == Violation::kOrder);
  run(q, "0F0 0F1");
  two.kind = ActionKind::kInputGrad;
  CHECK(refused([&] { ActionGuard g = q.begin(two); }).relation == Violation::kOrder);
  two.kind = ActionKind::kFullBackward;
  CHECK(refused([&] { ActionGuard g = q.begin(two); }).relation == Violation::kOrder);
  run(q, "0I0 0I1");
  two.kind = ActionKind::kWeightGrad;
  two.count = 0;
  CHECK(refused([&] { ActionGuard g = q.begin(two); }).relation == Violation::kOrder);
  run(q, "0W0x2");
  finish(q, 2);
}

TEST_CASE("a device counter that differs from the host's withholds the step") {
  QEffect q({{one_layer(1, 2), one_layer(2, 2)}, 2});
  refresh(q, 1);
  refresh(q, 2);
  run(q, "1F0 1F1 1I0 1W0 1I1 1W1 2F0 2F1 2B0 2B1");

  const std::vector<std::uint64_t> backward_short{2, 2, 2, 1};
  const ViolationReport r = refused([&] { q.finalize_step(backward_short); });
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.operation == "finalize_step");
  CHECK(r.key == "stage 2, backward chain");
  CHECK(r.ref.empty());
  CHECK(r.expected == "2 transitions on host and device");
  CHECK(r.found == "2 on the host and 1 on the device");

  const std::vector<std::uint64_t> forward_twice{3, 2, 2, 2};
  CHECK(refused([&] { q.finalize_step(forward_twice); }).key == "stage 1, forward chain");
  CHECK(q.epoch() == 0);
  finish(q, 2, 2);
}

TEST_CASE("a host chain that did not move withholds the step even when no gradient is expected") {
  QEffect q({{{StageIndex{0}, 1, 0, 0}}, 1});
  refresh(q);
  const std::vector<std::uint64_t> device{1, 1};
  const ViolationReport r = refused([&] { q.finalize_step(device); });
  CHECK(r.relation == Violation::kOrder);
  CHECK(r.key == "stage 0, forward chain");
  CHECK(r.found == "0 on the host and 1 on the device");
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
}

TEST_CASE("W never advances a chain") {
  EffectChain forward(StageIndex{0}, ChainDirection::kForward, 2);
  EffectChain backward(StageIndex{0}, ChainDirection::kBackward, 2);
  for (EffectChain* chain : {&forward, &backward}) {
    const EffectToken before = chain->current();
    const ViolationReport r = refused([&] { chain->advance(parse_action("0W0"), key(0, 0, 0)); });
    CHECK(r.relation == Violation::kOrder);
    CHECK(r.operation == "begin(0W0)");
    CHECK(chain->current() == before);
  }
  CHECK(forward.advance(parse_action("0F0"), key(0, 0, 0)).position == 1);
  CHECK(backward.advance(parse_action("0I0"), key(0, 0, 0)).position == 1);
  CHECK(backward.advance(parse_action("0B1"), key(0, 0, 1)).position == 2);
  backward.require_complete(2);
  CHECK_THROWS_AS(forward.require_complete(2), ContractViolation);
}

TEST_CASE("an action that is no compute is our bug, not a violation") {
  QEffect q(one_stage(1, 1));
  CHECK_THROWS_AS(q.begin(parse_action("0SEND_F0")), std::logic_error);
  CHECK_THROWS_AS(q.begin(parse_action("0REDUCE_GRAD")), std::logic_error);
}

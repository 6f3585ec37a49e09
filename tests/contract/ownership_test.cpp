// Ownership: a tape belongs to one logical action; slots are reused, generations are not.
#include "core/qeffect/tape_pool.h"
#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

TEST_CASE("an occupied slot is never taken from its tape") {
  QEffect q(one_stage(3, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0");  // I alone does not free slot 0

  const ViolationReport r = refused_begin(q, "0F2");
  CHECK(r.relation == Violation::kOwnership);
  CHECK(r.operation == "begin(0F2)");
  CHECK(r.key == "epoch 0, stage 0, microbatch 2, unit 0, invocation 0");
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.expected == "slot 0 free");
  CHECK(r.found == "slot 0 held by epoch 0, stage 0, microbatch 0, unit 0, invocation 0 in generation 1");

  // The tape is named even while a send still reads the slot's output: the slot's owner comes first.
  q.begin_use({StageIndex{0}, BoundaryKind::kOutput, 0}, parse_action("0SEND_F0"));
  CHECK(refused_begin(q, "0F2").relation == Violation::kOwnership);
  q.complete_uses();

  CHECK(q.find(key(0, 0, 0)).generation == 1);
  run(q, "0W0 0F2 0I1 0W1 0I2 0W2");
  finish(q, 3);
}

TEST_CASE("a W before its I is rejected and both run afterwards") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0");
  const ViolationReport r = refused_begin(q, "0W0");
  CHECK(r.relation == Violation::kOwnership);
  CHECK(r.operation == "begin(0W0)");
  CHECK(r.key == "epoch 0, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.expected == "W after I, which leaves the output gradients on the tape");
  CHECK(r.found == "W before I");
  run(q, "0I0 0W0");
  finish(q, 1);
}

TEST_CASE("a B after its I is a duplicate consumer") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0");
  const ViolationReport r = refused_begin(q, "0B0");
  CHECK(r.relation == Violation::kOwnership);
  CHECK(r.operation == "begin(0B0)");
  CHECK(r.found == "a second I");
  run(q, "0W0");
  finish(q, 1);
}

TEST_CASE("a second W finds its tape gone") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0 0F1 0I0 0I1 0W0");
  const ViolationReport r = refused_begin(q, "0W0");
  CHECK(r.relation == Violation::kLookup);
  CHECK(r.ref == "slot 0, generation 1");
  CHECK(r.found == "slot 0 free, last generation 1");
  run(q, "0W1");
  finish(q, 2);
}

TEST_CASE("a pool rejects a second W while the tape is live") {
  TapePool pool(StageIndex{0}, 1);
  const TapeRef ref = pool.bind(key(0, 0, 0), parse_action("0F0"));
  pool.complete(key(0, 0, 0), ref, Consumer::kWeightGrad);
  const ViolationReport r = refused([&] { pool.check(key(0, 0, 0), ref, Consumer::kWeightGrad, parse_action("0W0")); });
  CHECK(r.relation == Violation::kOwnership);
  CHECK(r.expected == "one W per tape");
  CHECK(r.found == "a second W");
}

TEST_CASE("I and W of a microbatch that F has not reached are unknown") {
  QEffect q(one_stage(2, 2));
  refresh(q);
  run(q, "0F0");
  for (const std::string action : {"0I1", "0W1", "0B1"}) {
    const ViolationReport r = refused_begin(q, action);
    CHECK(r.relation == Violation::kLookup);
    CHECK(r.operation == "begin(" + action + ")");
    CHECK(r.key == "epoch 0, stage 0, microbatch 1, unit 0, invocation 0");
    CHECK(r.ref.empty());
    CHECK(r.expected == "a tape bound by 0F1");
    CHECK(r.found == "no such forward in this step");
  }
  CHECK(refused_begin(q, "0I7").found == "a step of 2 microbatches");
  CHECK(refused([&] { (void)q.find(key(0, 0, 1)); }).relation == Violation::kLookup);
  run(q, "0F1 0I0 0W0 0I1 0W1");
  finish(q, 2);
}

TEST_CASE("a microbatch of the last step is unknown in this one") {
  QEffect q(one_stage(1, 1));
  refresh(q);
  run(q, "0F0 0I0 0W0");
  finish(q, 1);
  const ViolationReport r = refused_begin(q, "0I0");
  CHECK(r.relation == Violation::kLookup);
  CHECK(r.key == "epoch 1, stage 0, microbatch 0, unit 0, invocation 0");
  CHECK(r.ref.empty());
  CHECK(r.found == "no such forward in this step");
  refresh(q);
  run(q, "0F0");
  CHECK(refused([&] { (void)q.find(key(0, 0, 0)); }).found == "none");
  CHECK(q.find(key(1, 0, 0)).generation == 2);
  run(q, "0I0 0W0");
  finish(q, 1);
}

TEST_CASE("a stage of another rank is unknown to every operation") {
  QEffect q({{one_layer(1, 1), one_layer(2, 1)}, 1});
  const ViolationReport r = refused_begin(q, "5F0");
  CHECK(r.relation == Violation::kLookup);
  CHECK(r.operation == "begin");
  CHECK(r.key == "stage 5");
  CHECK(r.expected == "a stage of this rank (1, 2)");
  const StageIndex other{5};
  CHECK(refused([&] { q.begin_reduction(other); }).relation == Violation::kLookup);
  CHECK(refused([&] { (void)q.needs_refresh(other); }).relation == Violation::kLookup);
  CHECK(refused([&] { q.begin_evaluate(other, MicrobatchIndex{0}); }).relation == Violation::kLookup);
  CHECK(refused([&] { q.check_reference(key(0, 5, 0), {}); }).relation == Violation::kLookup);
  refresh(q, 1);
  refresh(q, 2);
  run(q, "1F0 2F0 2B0 1B0");
  finish(q, 1, 2);
}

TEST_CASE("generations only grow, through steps, rejections and an abort") {
  QEffect q(one_stage(2, 1));
  std::uint64_t last = 0;
  for (int step = 0; step < 20; ++step) {
    refresh(q);
    for (int m = 0; m < 2; ++m) {
      const std::string n = std::to_string(m);
      run(q, "0F" + n);
      const TapeRef ref = q.find(key(q.epoch(), 0, m));
      CHECK(ref.generation > last);
      last = ref.generation;
      if (step == 7 && m == 1) {
        q.abort_epoch();
        q.rebuild();
        refresh(q);
        run(q, "0F0");
        CHECK(q.find(key(q.epoch(), 0, 0)).generation > last);
        run(q, "0I0 0W0 0F1");
        last = q.find(key(q.epoch(), 0, 1)).generation;
      }
      CHECK(refused_begin(q, "0F" + n).relation == Violation::kOrder);
      run(q, "0I" + n + " 0W" + n);
    }
    finish(q, 2);
  }
}

TEST_CASE("a guard names the slots of its microbatches and the first write of the step") {
  QEffect q(one_stage(4, 2));
  for (int step = 0; step < 2; ++step) {
    refresh(q);
    run(q, "0F0 0F1 0I0 0I1");
    {
      ActionGuard guard = q.begin(parse_action("0W0x2"));
      REQUIRE(guard.slots().size() == 2);
      CHECK(guard.slots()[0] == SlotIndex{0});
      CHECK(guard.slots()[1] == SlotIndex{1});
      CHECK(guard.first_write());
      guard.commit();
    }
    {
      ActionGuard guard = q.begin(parse_action("0F2"));
      CHECK(guard.slots()[0] == SlotIndex{0});
      CHECK_FALSE(guard.first_write());
      guard.commit();
    }
    run(q, "0F3 0I2 0I3");
    {
      ActionGuard guard = q.begin(parse_action("0W2x2"));
      CHECK_FALSE(guard.first_write());
      guard.commit();
    }
    finish(q, 4);
  }
}

TEST_CASE("B is a first write as well, once a stage and step") {
  QEffect q({{one_layer(0, 1), one_layer(1, 1)}, 2});
  refresh(q, 0);
  refresh(q, 1);
  for (const char* stage : {"0", "1"}) {
    for (int m = 0; m < 2; ++m) {
      const std::string n = std::to_string(m);
      run(q, stage + ("F" + n));
      ActionGuard guard = q.begin(parse_action(stage + ("B" + n)));
      CHECK(guard.first_write() == (m == 0));
      guard.commit();
    }
  }
  finish(q, 2, 2);
}

TEST_CASE("a W group needs every one of its tapes ready, and frees them together") {
  const int group = GENERATE(2, 4);
  QEffect q(one_stage(4, 4));
  refresh(q);
  run(q, "0F0 0F1 0F2 0F3 0I0 0I1 0I2");
  const std::string first = "0W0x" + std::to_string(group);
  if (group == 4) {
    const ViolationReport r = refused_begin(q, first);
    CHECK(r.relation == Violation::kOwnership);
    CHECK(r.operation == "begin(0W0x4)");
    CHECK(r.key == "epoch 0, stage 0, microbatch 3, unit 0, invocation 0");
    CHECK(r.ref == "slot 3, generation 1");
    CHECK(r.found == "W before I");
    CHECK(q.pending_weight_grads() == 3);
    run(q, "0I3 0W0x4");
  } else {
    run(q, first);
    CHECK(q.live_tapes() == 2);
    CHECK(refused_begin(q, "0W1x2").relation == Violation::kLookup);  // microbatch 1 is done
    CHECK(refused_begin(q, "0W2x2").relation == Violation::kOwnership);
    run(q, "0I3");
    CHECK(refused_begin(q, "0W3x2").found == "a step of 4 microbatches");
    run(q, "0W2x2");
  }
  CHECK(q.live_tapes() == 0);
  finish(q, 4);
}

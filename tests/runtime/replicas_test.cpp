// Data parallel replicas: one state on all of them at every step, and what they share with one replica that takes the
// whole batch. Level "exact in one backend" where nothing is summed in another order.
#include <cmath>

#include "core/dtype.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

const Overrides kTwoReplicas{"parallel.data=2", "training.global_batch_size=8"};
const Overrides kPipelines[] = {
    {},
    {"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"},
    {"pipeline.schedule=1f1b", "pipeline.pipeline_model_parallel_size=2", "execution.mode=graph"}};

// What a replica has by itself; everything else must be one.
bool of_one_replica(const TraceKey& key) { return key.microbatch >= 0 || key.category == "loss"; }

}  // namespace

TEST_CASE("replicas that see different data hold one state at every step, under every mapping") {
  for (const Overrides& precision : {Overrides{}, Overrides{"precision.compute=bf16"},
                                     Overrides{"fp8.scale_update=step"}, Overrides{"precision.bf16_layers=[2,3,6]"}}) {
    TraceRecords first;
    for (const Overrides& pipeline : kPipelines) {
      const RunOutcome run = run_training(test_config(kTwoReplicas + precision + pipeline), {.steps = 3});
      std::size_t compared = 0, own = 0;
      for (const auto& [key, digest] : run.replicas[0]) {
        INFO(to_string(key));
        if (of_one_replica(key)) {
          own += key.category == "layer output" && run.replicas[1].at(key) != digest;
          continue;
        }
        REQUIRE(run.replicas[1].at(key) == digest);
        ++compared;
      }
      CHECK(compared > 100);
      CHECK(own > 0);  // they did see different data
      if (first.empty()) first = run.trace;
      CHECK(differences(first, run.trace).empty());
    }
  }
}

TEST_CASE("one replica's reduction over itself changes nothing but where scales move") {
  const RunOutcome off = run_training(test_config({}), {.steps = 3});
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    for (const char* backward : {"pipeline.backward=split", "pipeline.backward=full"}) {
      const RunOutcome on = run_training(test_config({"fp8.reduce_amax=dp", mode, backward}), {.steps = 3});
      CHECK(on.counts[0].updates == 3u * 2u * 4u);  // steps, chains, microbatches
      CHECK(on.counts[0].update_graphs == (std::string(mode) == "execution.mode=graph" ? 2 : 0));
      for (const auto& [key, digest] : on.trace) {
        INFO(mode << " " << to_string(key));
        REQUIRE(off.trace.at(key) == digest);
      }
    }
  }
}

TEST_CASE("with scales that move once a step, two replicas compute what one does with the concatenated batch") {
  // Within the first step nothing but the sums over microbatches can tell the two apart: every microbatch's forward and
  // input gradients have equal bytes, so do the scales afterwards; the gradient norm differs by its summation order.
  const Overrides variant{"fp8.scale_update=step"};
  const RunOutcome one = run_training(test_config(variant + Overrides{"training.global_batch_size=8"}), {.steps = 1});
  const RunOutcome two = run_training(test_config(variant + kTwoReplicas), {.steps = 1});
  std::size_t compared = 0;
  for (int replica = 0; replica < 2; ++replica) {
    for (const auto& [key, digest] : two.replicas[static_cast<std::size_t>(replica)]) {
      TraceKey same = key;
      if (key.microbatch >= 0) same.microbatch += 4 * replica;
      const bool per_microbatch = key.category == "layer output" || key.category == "layer dX" ||
                                  key.category == "retained X^T" || key.category == "retained dY^T" ||
                                  key.category == "scale_inv";
      if (!per_microbatch) continue;
      INFO("replica " << replica << " " << to_string(key));
      REQUIRE(one.trace.at(same) == digest);
      ++compared;
    }
  }
  CHECK(compared == 2u * 4u * (8u + 8u + 33u + 33u + 66u));
  CHECK(std::abs(two.scalars[0].norm / one.scalars[0].norm - 1.0f) < 1e-5f);
  CHECK(std::abs(two.losses[0] / one.losses[0] - 1.0) < 1e-6);
}

}  // namespace qe::testing

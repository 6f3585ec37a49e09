// What a run counts, and what must leave training untouched: capture, evaluation, a skipped step, a frozen scalar.
#include <cmath>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

const std::vector<std::string> kZbv{"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2",
                                    "execution.mode=graph"};

std::vector<std::string> zbv(std::vector<std::string> more) {
  more.insert(more.begin(), kZbv.begin(), kZbv.end());
  return more;
}

// One rank without threads, for tests that look inside.
struct SingleRank {
  explicit SingleRank(const Config& c)
      : config(c),
        world(1, 1),
        ops(device),
        transport(world.connect(0, device)),
        rank(device, ops, *transport, make_rank_config(c), make_rank_plan(c), nullptr) {}
  Config config;
  ThreadWorld world;
  CpuDevice device;
  CpuOps ops;
  std::unique_ptr<Transport> transport;
  PipelineRank rank;
};

}  // namespace

TEST_CASE("peak slots: 15 compute graphs a rank, 19 in all, for every M") {
  for (const int m : {4, 8}) {
    const RunOutcome run = run_training(test_config(zbv({"training.global_batch_size=" + std::to_string(m)})),
                                        {.steps = 1, .trace = false});
    for (const ExecutionCounts& c : run.counts) {
      CHECK(c.graphs - c.first_write_graphs - c.refresh_graphs == 15);
      CHECK(c.graphs == 19);
      CHECK(c.eager_calls == 0);
      CHECK(c.replays == static_cast<std::uint64_t>(3 * m * 2 + 2));  // every F, I, W of two stages, two refreshes
    }
  }
}

TEST_CASE("per-microbatch slots: 3·M·chunks graphs beside the refreshes, 6 copies a layer and microbatch") {
  for (const int m : {2, 4, 8}) {
    const RunOutcome run = run_training(
        test_config(zbv({"training.global_batch_size=" + std::to_string(m), "gradients.placement=copied"})),
        {.steps = 1, .trace = false});
    for (const ExecutionCounts& c : run.counts) {
      CHECK(c.graphs - c.refresh_graphs == 3 * m * 2);
      CHECK(c.refresh_graphs == 2);
      CHECK(c.matrix_copies == static_cast<std::uint64_t>(6 * 4 * m));
    }
  }
}

TEST_CASE("weights are quantized once a step whatever M is") {
  for (const int m : {2, 8}) {
    const RunOutcome run =
        run_training(test_config({"training.global_batch_size=" + std::to_string(m)}), {.steps = 3, .trace = false});
    CHECK(run.counts[0].weight_quantize_launches == static_cast<std::uint64_t>(3 * (8 * 4 + 1)));
  }
}

TEST_CASE("capture changes no state") {
  SingleRank eager(test_config({"execution.mode=eager"}));
  SingleRank graph(test_config({"execution.mode=graph"}));
  CHECK(graph.rank.counts().graphs > 0);
  CHECK(graph.rank.state_digest() == eager.rank.state_digest());
}

TEST_CASE("learning-rate warm-up and decay are not frozen into graphs") {
  const std::vector<std::string> schedule{"training.train_iters=30", "training.lr_warmup_iters=5",
                                          "training.lr_schedule=cosine", "training.min_lr=1e-5"};
  auto with_mode = [&](const char* mode) {
    std::vector<std::string> o = schedule;
    o.push_back(mode);
    return run_training(test_config(o), {.steps = 30, .trace = false});
  };
  const RunOutcome eager = with_mode("execution.mode=eager");
  const RunOutcome graph = with_mode("execution.mode=graph");
  CHECK(eager.losses == graph.losses);
  const Config config = test_config(schedule);
  for (std::uint32_t step = 1; step <= 30; ++step) {
    CHECK(graph.scalars[step - 1].learning_rate == static_cast<float>(learning_rate(config.training, step)));
    CHECK(graph.scalars[step - 1].step == step);
  }
}

TEST_CASE("evaluation every two steps leaves the bits of training unchanged") {
  RunOptions with_evaluation{.steps = 6};
  const Config config = test_config(zbv({}));
  std::vector<double> evaluated;
  with_evaluation.after_step = [&](int rank, PipelineRank& pipeline, std::uint32_t step) {
    if (step % 2 != 0) return;
    const Batch batch = synthetic_batch(config, 1000);
    const double loss = pipeline.evaluate(batch.tokens, batch.targets, 3);
    if (rank == 0) evaluated.push_back(loss);
  };
  const RunOutcome with = run_training(config, with_evaluation);
  const RunOutcome without = run_training(config, {.steps = 6});
  CHECK(differences(with.trace, without.trace).empty());
  REQUIRE(evaluated.size() == 3);
  for (const double loss : evaluated) CHECK(std::fabs(loss / (3 * 32) - std::log(257.0)) < 0.3);
}

TEST_CASE("a stale transposed cache is refused before the first I that would read it") {
  SingleRank one(test_config({}));
  const Batch batch = synthetic_batch(one.config, 1);
  one.rank.train_step(batch.tokens, batch.targets, 1e-3, 1);
  const double loss = one.rank.evaluate(batch.tokens, batch.targets, 4);  // refreshes
  CHECK(std::isfinite(loss));
  one.rank.contract().invalidate(StageIndex{0}, CacheLayout::kColumnwise);
  CHECK_THROWS_AS(one.rank.train_step(batch.tokens, batch.targets, 1e-3, 2), ContractViolation);
}

TEST_CASE("a non-finite gradient skips the step: weights, moments and scaling state stay, training goes on") {
  SingleRank one(test_config({}));
  const Batch batch = synthetic_batch(one.config, 1);
  one.rank.train_step(batch.tokens, batch.targets, 1e-3, 1);
  // A norm weight of NaN poisons the activations of the step.
  const TransformerStage& stage = *one.rank.stages()[0];
  const int poisoned = stage.weights().parameters().index("layers.3.mlp_norm.weight");
  auto* weight = stage.weights().master(poisoned).as<float>();
  const float healthy = weight[5];
  weight[5] = std::nanf("");
  const std::uint64_t before = one.rank.state_digest();
  const StepResult bad = one.rank.train_step(batch.tokens, batch.targets, 1e-3, 2);
  CHECK(bad.scalars.skip == 1);
  CHECK(bad.scalars.first_bad >= 0);
  CHECK(one.rank.state_digest() == before);
  CHECK(one.rank.contract().epoch() == 2);
  weight[5] = healthy;
  const StepResult good = one.rank.train_step(batch.tokens, batch.targets, 1e-3, 3);
  CHECK(good.scalars.skip == 0);
  CHECK(std::isfinite(good.loss_sum));
}

TEST_CASE("one batch is learned by heart in graph mode") {
  SingleRank one(test_config({"execution.mode=graph", "model.num_layers=2", "training.lr=3e-3"}));
  const Batch batch = synthetic_batch(one.config, 1);
  double first = 0, last = 0;
  for (std::uint32_t step = 1; step <= 60; ++step) {
    last = one.rank.train_step(batch.tokens, batch.targets, 3e-3, step).loss_sum;
    if (step == 1) first = last;
  }
  CHECK(last < 0.1 * first);
}

}  // namespace qe::testing

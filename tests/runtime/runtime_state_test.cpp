// What a run counts, and what must leave training untouched: capture, evaluation, a skipped step, a frozen scalar.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/reference_program.h"

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

TEST_CASE("weights are quantized before the first step and then with each update, by a dynamic scale once a step") {
  for (const int m : {2, 8}) {
    const std::string batch = "training.global_batch_size=" + std::to_string(m);
    const auto launches = [](const std::vector<std::string>& overrides) {
      return run_training(test_config(overrides), {.steps = 3, .trace = false}).counts[0].weight_quantize_launches;
    };
    CHECK(launches({batch}) == 8 * 4 + 1);
    CHECK(launches({batch, "head.precision=fp8_dynamic"}) == 3 * (8 * 4 + 1));
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

TEST_CASE("evaluation computes losses and no gradient: the logits' memory still holds logits") {
  const Config config = test_config({});
  Program program(config);
  const Batch batch = synthetic_batch(config, 1);
  program.step(batch, 1e-3, 1);
  program.ops.losses.clear();
  const double loss = program.rank.evaluate(batch.tokens, batch.targets, 1);
  REQUIRE(program.ops.losses.size() == 1);
  CHECK_FALSE(program.ops.losses[0].write_gradient);
  const Matrix logits = Program::matrix_of(program.ops.losses[0].logits);
  double wanted = 0.0;
  for (int t = 0; t < logits.rows(); ++t) {
    double sum = 0.0;
    for (int v = 0; v < config.model.vocab_size; ++v) sum += std::exp(logits(t, v));
    wanted += std::log(sum) - logits(t, batch.targets[static_cast<std::size_t>(t)]);
  }
  CHECK(std::fabs(loss / wanted - 1.0) < 1e-6);
}

TEST_CASE("evaluation's losses do not depend on the order in which sends and forwards run") {
  // Every microbatch passes through slot 0, so each F rewrites an output that a send may still have to read.
  for (const char* schedule : {"gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv"}) {
    std::vector<double> losses;
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      const Config config = reference_config({"model.num_layers=4", std::string("pipeline.schedule=") + schedule,
                                              "pipeline.pipeline_model_parallel_size=2"});
      RunOptions options{.steps = 1,
                         .trace = false,
                         .policy = DrainPolicy::kAdversarial,
                         .policy_seed = seed == 0 ? 0 : 100 * (seed - 1)};
      if (seed == 0) options.policy = DrainPolicy::kImmediate;
      options.after_step = [&](int rank, PipelineRank& pipeline, std::uint32_t) {
        const Batch batch = synthetic_batch(config, 1000);
        const double loss = pipeline.evaluate(batch.tokens, batch.targets, config.microbatches());
        if (rank == 0) losses.push_back(loss);
      };
      run_training(config, options);
      INFO(schedule << ", seed " << seed);
      CHECK(losses.back() == losses.front());
    }
  }
}

namespace {

using StateBytes = std::map<std::string, std::vector<unsigned char>>;
StateBytes bytes_of(const PipelineRank& rank) {
  StateBytes all;
  for (const StateEntry& e : rank.state()) {
    const auto* data = e.view.as<unsigned char>();
    all[e.name].assign(data, data + e.view.bytes());
  }
  return all;
}
// Names whose bytes differ.
std::vector<std::string> moved(const StateBytes& a, const StateBytes& b) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : a) {
    if (b.at(name) != bytes) names.push_back(name);
  }
  return names;
}
int count_of(const std::vector<std::string>& names, const std::string& prefix, const std::string& suffix) {
  return static_cast<int>(std::count_if(
      names.begin(), names.end(), [&](const std::string& n) { return n.starts_with(prefix) && n.ends_with(suffix); }));
}

}  // namespace

TEST_CASE("a non-finite gradient skips the step: weights, moments and scaling state stay, training goes on") {
  SingleRank one(test_config({})), twin(test_config({}));
  const Batch first = synthetic_batch(one.config, 1), second = synthetic_batch(one.config, 2);
  one.rank.train_step(first.tokens, first.targets, 1e-3, 1);
  twin.rank.train_step(first.tokens, first.targets, 1e-3, 1);
  const StateBytes before = bytes_of(one.rank);
  // One sequence reads the poisoned row and the others' gradients are healthy, so that both chains' amaxes move.
  const std::int32_t token = second.tokens.back();
  const TransformerStage& stage = *one.rank.stages()[0];
  float* weight = stage.weights().master(stage.weights().parameters().index("embedding.token.weight")).as<float>() +
                  std::int64_t{token} * one.config.model.hidden_size;
  const float healthy = weight[5];
  weight[5] = std::numeric_limits<float>::infinity();
  one.rank.restore(one.rank.contract().epoch(), one.rank.applied_updates());  // cached again
  const StepResult bad = one.rank.train_step(second.tokens, second.targets, 1e-3, 2);
  CHECK(bad.scalars.skip == 1);
  CHECK(bad.scalars.first_bad >= 0);
  weight[5] = healthy;
  CHECK(moved(before, bytes_of(one.rank)) == std::vector<std::string>{});
  CHECK(one.rank.contract().epoch() == 2);

  // What a step does move, or the comparison would say nothing.
  twin.rank.train_step(second.tokens, second.targets, 1e-3, 2);
  const std::vector<std::string> names = moved(before, bytes_of(twin.rank));
  const int domains = 8 * 4 + 1;
  CHECK(count_of(names, "fp8.", ".in.amax_history") == domains);
  CHECK(count_of(names, "fp8.", ".w.amax_history") == domains);
  CHECK(count_of(names, "fp8.layers.", ".dy.amax_history") == 8 * 4);  // the head's is nearly 1 / N in every step
  CHECK(count_of(names, "fp8.", ".dy.scale") > domains / 2);

  // The step after the skip is the one that the twin made: nothing of the bad one is left.
  const StepResult good = one.rank.train_step(second.tokens, second.targets, 1e-3, 3);
  CHECK(good.scalars.skip == 0);
  CHECK(moved(bytes_of(twin.rank), bytes_of(one.rank)) == std::vector<std::string>{});
}

TEST_CASE("every entry of the state list is memory of its own") {
  const SingleRank one(test_config({}));
  std::map<const unsigned char*, const StateEntry*> by_address;
  const std::vector<StateEntry> entries = one.rank.state();
  for (const StateEntry& e : entries) {
    const auto* data = e.view.as<unsigned char>();
    INFO(e.name);
    REQUIRE(by_address.emplace(data, &e).second);
  }
  for (auto at = by_address.begin(); std::next(at) != by_address.end(); ++at) {
    INFO(at->second->name << " and " << std::next(at)->second->name);
    CHECK(at->first + at->second->view.bytes() <= std::next(at)->first);
  }
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

// Gradients, stages, padding and evaluation where users of other trainers saw them go wrong: what no other test of ours
// holds. The whole table is docs/field_reports.md.
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "app/plan.h"
#include "tests/catch.h"
#include "tests/runtime/matrix.h"
#include "tests/runtime/reference_program.h"

namespace qe::testing {

TEST_CASE("a microbatch's gradients in the arena are after the step what they were when its W had run") {
  for (const Overrides& mapping : {mappings(2)[2], mappings(2)[4]}) {
    const Config config =
        test_config(kMatrixModel + mapping + Overrides{"gradients.placement=arena", "execution.mode=graph"});
    std::mutex mutex;
    TraceRecords after;
    RunOptions options{.steps = 3};
    options.after_step = [&](int, PipelineRank& rank, std::uint32_t step) {
      const std::lock_guard lock(mutex);
      for (const TransformerStage* stage : rank.stages()) {
        for (const int matrix : stage->matrices()) {
          if (stage->gradients().views(matrix) == 0) continue;  // the head's
          for (int m = 0; m < 4; ++m) {
            const Tensor t = stage->gradients().bound(matrix, MicrobatchIndex{m});
            const std::string& name = stage->weights().parameters()[matrix].name;
            after[{step, "matrix gradient", name, m}] = XXH3_64bits(t.data, t.bytes());
          }
        }
      }
    };
    const TraceRecords trace = run_training(config, options).trace;
    CHECK(after.size() == 3u * 8u * 6u * 4u);
    for (const auto& [key, digest] : after) {
      INFO(to_string(key));
      REQUIRE(trace.at(key) == digest);
    }
  }
}

TEST_CASE("before the first step gradients are zero and counters at their start, with graphs captured and without") {
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    const Config config = four_layer_config({mode, "gradients.placement=arena"});
    Program program(config);
    for (const TransformerStage* stage : program.rank.stages()) {
      for (const ParameterKind kind : {ParameterKind::kMatrix, ParameterKind::kVector}) {
        const Tensor all = stage->gradients().all(kind);
        CHECK(std::count(all.as<unsigned char>(), all.as<unsigned char>() + all.bytes(), 0) ==
              static_cast<std::ptrdiff_t>(all.bytes()));
      }
    }
    CHECK(program.rank.contract().epoch() == 0);
    CHECK(program.rank.applied_updates() == 0);
    CHECK(program.slots().at("layers.0.fc1.in").scale == 1.0f);
  }
}

TEST_CASE("every mode and schedule writes each matrix's gradient once a microbatch and leaves none pending") {
  for (const Overrides& cell : cells({mappings(2), kModes, kBackwards})) {
    RunOptions options{.steps = 2};
    options.after_step = [](int, PipelineRank& rank, std::uint32_t) {
      if (rank.contract().pending_weight_grads() != 0 || rank.contract().live_tapes() != 0) {
        throw std::logic_error("work is left");
      }
    };
    std::map<std::string, int> writes;
    for (const auto& [key, digest] : run_training(test_config(kMatrixModel + cell), options).trace) {
      if (key.step == 2 && key.category == "matrix gradient") ++writes[key.name];
    }
    INFO(name_of(cell));
    CHECK(writes.size() == 8 * 6 + 1);
    CHECK(std::all_of(writes.begin(), writes.end(), [](const auto& w) { return w.second == 4; }));
  }
}

TEST_CASE("bias gradients are whole when I is done: a W neither makes them nor needs them") {
  // All Ws at the end, as one group. Before the first of them every vector gradient is overwritten.
  const Config config = four_layer_config({"gradients.w_group=4"});
  Program undisturbed(config);
  undisturbed.step(1);
  const TransformerStage* stage = nullptr;
  Program program(config, [&](Ops& ops, Device& device) {
    return std::make_unique<DroppingOps>(ops, [&](const OpCall& call) {
      if (stage == nullptr || call.name != "gemm") return false;
      const Tensor first = stage->gradients().main(stage->matrices().back());  // the head's W is a stage's first
      if (call.result.data != first.data) return false;
      const Tensor vectors = stage->gradients().all(ParameterKind::kVector);
      device.host_call(call.stream, [vectors] {
        std::fill(vectors.as<float>(), vectors.as<float>() + vectors.shape.elements(), 0.5f);
      });
      return false;
    });
  });
  stage = program.rank.stages()[0];
  program.step(1);
  const ReferenceParameters wanted = undisturbed.gradients();
  for (const auto& [name, gradient] : program.gradients()) {
    INFO(name);
    const bool matrix =
        program.rank.stages()[0]->weights().parameters()[stage->weights().parameters().index(name)].kind ==
        ParameterKind::kMatrix;
    if (matrix) {
      CHECK(gradient.values() == wanted.at(name).values());
    } else {
      CHECK(std::all_of(gradient.values().begin(), gradient.values().end(), [](double v) { return v == 0.5; }));
    }
  }
}

TEST_CASE("the same eight sequences in one, two, four or eight microbatches have one gradient") {
  // BF16 without clipping. Every row is computed alike; only the order of the sums over tokens differs.
  const auto gradients = [](int m) {
    Program program(
        four_layer_config({"precision.compute=bf16", "optimizer.clip_grad=0", "training.global_batch_size=8",
                           "training.micro_batch_size=" + std::to_string(8 / m)}));
    REQUIRE(program.config.microbatches() == m);
    program.step(1);
    return program.gradients();
  };
  const ReferenceParameters wanted = gradients(8);
  for (const int m : {1, 2, 4}) {
    for (const auto& [name, gradient] : gradients(m)) {
      double difference = 0.0;
      for (std::size_t i = 0; i < gradient.values().size(); ++i) {
        difference += std::pow(gradient.values()[i] - wanted.at(name).values()[i], 2);
      }
      INFO(name << " with " << m << " microbatches");
      CHECK(std::sqrt(difference) <= 1e-5 * norm(wanted.at(name)) + 1e-12);
    }
  }
}

TEST_CASE("every microbatch alone reaches the gradient: with the others' losses weighed by zero it is that one's") {
  // Powers of two: the factor 1/N of four microbatches is an exact quarter of one microbatch's.
  const Config four = four_layer_config({"precision.compute=fp32"});
  const Config one = four_layer_config({"precision.compute=fp32", "training.global_batch_size=1"});
  const Batch batch = synthetic_batch(four, 1);
  const float quarter = 1.0f / static_cast<float>(four.tokens_per_step());
  for (std::size_t j = 0; j < 4; ++j) {
    std::vector<float> factors(4, 0.0f);
    factors[j] = quarter;
    Program masked(four, [&](Ops& ops, Device&) { return std::make_unique<WeightedLosses>(ops, factors); });
    masked.step(batch, 1e-3, 1);
    Program alone(one);
    const auto from = batch.tokens.begin() + static_cast<std::ptrdiff_t>(32 * j);
    const auto targets = batch.targets.begin() + static_cast<std::ptrdiff_t>(32 * j);
    alone.step({{from, from + 32}, {targets, targets + 32}}, 1e-3, 1);
    const ReferenceParameters wanted = alone.gradients();
    for (const auto& [name, gradient] : masked.gradients()) {
      INFO("microbatch " << j << ", " << name);
      REQUIRE(norm(gradient) > 0.0);
      std::vector<double> quarters = wanted.at(name).values();
      for (double& v : quarters) v /= 4;
      REQUIRE(gradient.values() == quarters);
    }
  }
}

TEST_CASE("layers that stages do not divide are all there, once each, and the plan shows where") {
  struct Case {
    int layers, ranks;
    std::vector<int> wanted;
  };
  for (const Case& c : {Case{30, 4, {8, 8, 7, 7}}, Case{7, 2, {4, 3}}}) {
    const Config config = test_config({"model.num_layers=" + std::to_string(c.layers),
                                       "pipeline.pipeline_model_parallel_size=" + std::to_string(c.ranks)});
    const Plan plan = make_plan(config, unit_costs());
    std::vector<int> counts;
    int next = 0;
    for (const auto& stage : plan.stages) {
      CHECK(stage.range.first_layer == next);
      next += stage.range.num_layers;
      counts.push_back(stage.range.num_layers);
    }
    CHECK(next == c.layers);
    CHECK(counts == c.wanted);
    CHECK_THAT(plan_text(config, plan, unit_costs()), ContainsSubstring(std::to_string(c.layers - 1) + ", head"));
  }
}

TEST_CASE("a reduction never overtakes a W, whatever order the streams take") {
  const Config config =
      test_config(kMatrixModel + mappings(2)[4] +
                  Overrides{"parallel.data=2", "training.global_batch_size=8", "execution.mode=graph"});
  const RunOutcome reference = run_training(config, {.steps = 2});
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const RunOutcome run =
        run_training(config, {.steps = 2, .policy = DrainPolicy::kAdversarial, .policy_seed = 100 * seed});
    for (std::size_t replica = 0; replica < 2; ++replica) {
      INFO("seed " << seed << " replica " << replica);
      CHECK(differences(reference.replicas[replica], run.replicas[replica]).empty());
    }
  }
}

TEST_CASE("rows that pad the vocabulary are zero after fifty steps, in weights, moments and what a checkpoint stores") {
  const Config config = four_layer_config({"model.num_layers=1", "model.vocab_size=257"});
  Program program(config);
  for (std::uint32_t step = 1; step <= 50; ++step) program.step(step);
  int tables = 0;
  for (const StateEntry& e : program.rank.state()) {
    if (!e.name.ends_with("head.weight") && !e.name.ends_with("embedding.token.weight")) continue;
    const std::vector<unsigned char> bytes = program.rank.read(e);
    const std::size_t row = bytes.size() / static_cast<std::size_t>(e.view.shape.rows);
    INFO(e.name);
    CHECK(e.view.shape.rows == 384);
    const auto zeros = [&](std::size_t from, std::size_t to) {
      return std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(from * row),
                         bytes.begin() + static_cast<std::ptrdiff_t>(to * row), [](unsigned char b) { return b == 0; });
    };
    CHECK(zeros(257, 384));
    CHECK_FALSE(zeros(0, 257));
    ++tables;
  }
  CHECK(tables == 2 * 3);
  CHECK_THAT(dump_config(config), ContainsSubstring("\"vocab_size\": 257"));
}

TEST_CASE("an evaluation's loss is the same by ones and by fours, with a last microbatch that is not full") {
  // Seven sequences: seven microbatches of one, or two of four with one row that does not count.
  const auto loss = [](int rows) {
    Program program(
        four_layer_config({"training.micro_batch_size=" + std::to_string(rows), "training.global_batch_size=8"}));
    Batch batch = synthetic_batch(program.config, 5);
    std::fill(batch.tokens.begin() + 7 * 32, batch.tokens.end(), 0);
    std::fill(batch.targets.begin() + 7 * 32, batch.targets.end(), -1);
    return program.rank.evaluate(batch.tokens, batch.targets, (7 + rows - 1) / rows);
  };
  const double one = loss(1), four = loss(4);
  CHECK(std::isfinite(one));
  CHECK(std::fabs(four / one - 1.0) < 1e-6);
  CHECK(std::fabs(one / (7 * 32) - std::log(512.0)) < 0.3);
}

}  // namespace qe::testing

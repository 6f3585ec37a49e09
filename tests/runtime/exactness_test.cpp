// What a trace holds, and equal bytes beyond the matrix (matrix_test.cpp): any order of execution, every precision,
// recipe and type, odd models.
// Level "exact in one backend" of the exactness table in ARCHITECTURE.md: digests are compared, nothing is tolerated.
#include <cmath>

#include "tests/catch.h"
#include "tests/runtime/matrix.h"

namespace qe::testing {
namespace {

const Overrides kReference{"pipeline.backward=full", "gradients.placement=copied"};  // 1f1b, PP=1, eager
const std::vector<Overrides> kMappings{{"pipeline.schedule=interleaved_1f1b", "pipeline.pipeline_model_parallel_size=2",
                                        "pipeline.virtual_pipeline_model_parallel_size=2"},
                                       {"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"}};

TraceRecords trace_of(const Overrides& overrides, int steps, DrainPolicy policy = DrainPolicy::kImmediate,
                      std::uint64_t seed = 0) {
  return run_training(test_config(overrides), {.steps = steps, .policy = policy, .policy_seed = seed}).trace;
}

void require_equal(const TraceRecords& reference, const TraceRecords& trace, const Overrides& cell) {
  std::string text;
  for (const std::string& line : differences(reference, trace)) text += "\n  " + line;
  INFO(name_of(cell) << text);
  REQUIRE(text.empty());
}

}  // namespace

TEST_CASE("a trace covers every category, layer and microbatch") {
  const TraceRecords trace = trace_of(kReference, 2);
  std::map<std::string, int> by_category;
  for (const auto& [key, digest] : trace) by_category[key.category] += key.step == 2 ? 1 : 0;
  const int layers = 8, microbatches = 4;
  CHECK(by_category["layer output"] == layers * microbatches);
  CHECK(by_category["layer dX"] == layers * microbatches);
  CHECK(by_category["loss"] == microbatches);
  CHECK(by_category["matrix gradient"] == (layers * 6 + 1) * microbatches);
  CHECK(by_category["vector gradient"] == (layers * 10 + 4) * microbatches);
  CHECK(by_category["retained X^T"] == (layers * 4 + 1) * microbatches);
  CHECK(by_category["retained dY^T"] == (layers * 4 + 1) * microbatches);
  CHECK(by_category["scale_inv"] == 2 * (layers * 4 + 1) * microbatches);
  CHECK(by_category["main gradient"] == layers * 16 + 5);
  CHECK(by_category["weight epoch"] == layers);
}

TEST_CASE("another seed gives another trace, so equality says something") {
  CHECK_FALSE(differences(trace_of(kReference, 1), trace_of(kReference + Overrides{"training.seed=2"}, 1)).empty());
}

TEST_CASE("any order that the wait edges allow gives the same bytes, and none deadlocks") {
  const TraceRecords reference = trace_of(kReference, 2);
  const Overrides one_f_one_b{"pipeline.schedule=1f1b", "pipeline.pipeline_model_parallel_size=2"};
  for (const Overrides& mapping : {one_f_one_b, kMappings[0], kMappings[1]}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const Overrides cell = mapping + Overrides{"gradients.placement=arena", "execution.mode=graph"};
      require_equal(reference, trace_of(cell, 2, DrainPolicy::kAdversarial, 100 * seed), cell);
    }
  }
}

TEST_CASE("reused slots: any order that the wait edges allow gives the same bytes under every schedule") {
  // With peak slots a stage rewrites outputs and input gradients within a step, while their sends may still be queued.
  const Overrides small{"model.num_layers=4",       "model.hidden_size=32",   "model.num_attention_heads=2",
                        "model.ffn_hidden_size=48", "training.seq_length=16", "training.global_batch_size=8",
                        "execution.mode=graph"};
  const TraceRecords reference = trace_of(small, 2);
  const std::string two_chunks = "pipeline.virtual_pipeline_model_parallel_size=2";
  const std::vector<Overrides> schedules{{"pipeline.schedule=gpipe"},
                                         {"pipeline.schedule=1f1b"},
                                         {"pipeline.schedule=interleaved_1f1b", two_chunks},
                                         {"pipeline.schedule=zb1p"},
                                         {"pipeline.schedule=zbv"}};
  for (const Overrides& schedule : schedules) {
    for (const Overrides& backward : kBackwards) {
      for (std::uint64_t seed = 0; seed < 6; ++seed) {
        const Overrides cell = small + schedule + backward + Overrides{"pipeline.pipeline_model_parallel_size=2"};
        require_equal(reference, trace_of(cell, 2, DrainPolicy::kAdversarial, 100 * seed), cell);
      }
    }
  }
}

TEST_CASE("a W group's sums stay close to those of single Ws") {
  for (const char* precision : {"precision.compute=fp8", "precision.compute=bf16"}) {
    const RunOutcome single = run_training(test_config({precision}), {.steps = 1, .trace = false});
    for (const char* group : {"gradients.w_group=2", "gradients.w_group=4"}) {
      const RunOutcome grouped = run_training(test_config({precision, group}), {.steps = 1, .trace = false});
      CHECK(grouped.losses[0] == single.losses[0]);
      CHECK(std::abs(grouped.scalars[0].norm / single.scalars[0].norm - 1.0f) < 1e-5f);
    }
  }
}

TEST_CASE("every precision, head, format, scale update and moment type is independent of the mapping") {
  const std::vector<Overrides> variants{
      {"precision.compute=bf16"},       {"precision.compute=bf16", "gradients.w_group=2"},
      {"precision.compute=fp32"},       {"head.precision=fp8_dynamic"},
      {"head.precision=bf16"},          {"fp8.format=e4m3"},
      {"fp8.scale_update=step"},        {"fp8.amax_compute_algo=most_recent", "fp8.margin=1"},
      {"optimizer.moments_dtype=bf16"}, {"gradients.dtype=bf16"}};
  for (const Overrides& variant : variants) {
    const TraceRecords reference = trace_of(variant, 3);
    require_equal(reference, trace_of(variant + kMappings[1] + Overrides{"execution.mode=graph"}, 3), variant);
  }
}

TEST_CASE("under fp32, the oracle, views give the same bytes in every placement, mapping and mode") {
  const Overrides fp32{"precision.compute=fp32"};
  const TraceRecords reference = trace_of(fp32 + kReference, 2);
  for (const Overrides& placement : kViews) {
    for (const Overrides& mapping : kMappings) {
      for (const Overrides& mode : kModes) {
        const Overrides cell = fp32 + mapping + mode + placement;
        require_equal(reference, trace_of(cell, 2), cell);
      }
    }
  }
  // The views are not rounded, so that only the order of summation parts them from one main gradient.
  const float views = run_training(test_config(fp32 + kReference), {.steps = 1}).scalars[0].norm;
  const float one = run_training(test_config(fp32), {.steps = 1}).scalars[0].norm;
  CHECK(std::abs(views / one - 1.0f) < 1e-6f);
}

TEST_CASE("a model one wide, whose matrices have one row, trains alike under every mapping and placement") {
  const Overrides narrow{"precision.compute=bf16", "model.hidden_size=1", "model.num_attention_heads=1",
                         "model.ffn_hidden_size=1"};
  const TraceRecords reference = trace_of(narrow + kReference, 2);
  for (const Overrides& placement : kViews) {
    for (const Overrides& mapping : kMappings) {
      const Overrides cell = narrow + mapping + placement;
      require_equal(reference, trace_of(cell, 2), cell);
    }
  }
  CHECK(run_training(test_config(narrow), {.steps = 1}).losses.size() == 1);
}

}  // namespace qe::testing

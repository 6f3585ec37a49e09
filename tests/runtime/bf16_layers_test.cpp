// Layers that stay in BF16 under fp8: where the list may show, and where it may not. Level "exact in one backend".
#include <algorithm>
#include <mutex>

#include "app/checkpoint/checkpoint.h"
#include "core/error.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"
#include "tests/unit/scratch.h"

namespace qe::testing {
namespace {

// Under zbv on two ranks stage 1 is layers 2 and 3: a stage without any scaling state.
const Overrides kMixed{"precision.bf16_layers=[0,2,3,7]"};
const Overrides kAll{"precision.bf16_layers=[0,1,2,3,4,5,6,7]"};
const Overrides kMappings[] = {{},
                               {"pipeline.schedule=interleaved_1f1b", "pipeline.pipeline_model_parallel_size=2",
                                "pipeline.virtual_pipeline_model_parallel_size=2"},
                               {"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"}};
const char* const kModes[] = {"execution.mode=eager", "execution.mode=graph"};
const char* const kBackwards[] = {"pipeline.backward=split", "pipeline.backward=full"};

TraceRecords trace_of(const Overrides& overrides, int steps) {
  return run_training(test_config(overrides), {.steps = steps}).trace;
}

void require_equal(const TraceRecords& reference, const TraceRecords& trace, const Overrides& cell) {
  std::string text;
  for (const std::string& o : cell) text += o + " ";
  for (const std::string& line : differences(reference, trace)) text += "\n  " + line;
  INFO(text);
  REQUIRE(differences(reference, trace).empty());
}

// What the first step records of the forward passes of some layers.
TraceRecords forward_of(const TraceRecords& trace, int first_layer, int last_layer) {
  TraceRecords out;
  for (const auto& [key, digest] : trace) {
    const bool forward = key.category == "layer output" || key.category == "retained X^T";
    for (int layer = first_layer; forward && key.step == 1 && layer <= last_layer; ++layer) {
      const std::string name = "layers." + std::to_string(layer);
      if (key.name == name || key.name.starts_with(name + ".")) out.emplace(key, digest);
    }
  }
  return out;
}

}  // namespace

TEST_CASE("a mixed list's bytes do not depend on schedule, cut, mode or backward") {
  const TraceRecords reference = trace_of(kMixed, 3);
  for (const Overrides& mapping : kMappings) {
    for (const char* mode : kModes) {
      for (const char* backward : kBackwards) {
        const Overrides cell = kMixed + mapping + Overrides{mode, backward};
        require_equal(reference, trace_of(cell, 3), cell);
      }
    }
  }
}

TEST_CASE("a mixed list keeps that under W groups, views, scales that move once a step, and every head") {
  const Overrides variants[] = {{"gradients.w_group=2"},          {"gradients.placement=arena"},
                                {"gradients.placement=copied"},   {"fp8.scale_update=step"},
                                {"head.precision=fp8_dynamic"},   {"head.precision=bf16"},
                                {"pipeline.layers_per_stage=[8]"}};
  for (const Overrides& variant : variants) {
    const TraceRecords reference = trace_of(kMixed + variant, 2);
    Overrides cell = kMixed + variant + kMappings[2] + Overrides{"execution.mode=graph"};
    if (variant[0].starts_with("pipeline.layers")) cell.emplace_back("pipeline.layers_per_stage=[2,2,3,1]");
    require_equal(reference, trace_of(cell, 2), cell);
  }
}

TEST_CASE("with every layer listed and a head in BF16 the run is the bf16 run, to the byte") {
  for (const Overrides& mapping : kMappings) {
    require_equal(trace_of({"precision.compute=bf16"}, 3),
                  trace_of(kAll + mapping + Overrides{"head.precision=bf16"}, 3), mapping);
  }
}

TEST_CASE("with every layer listed, an FP8 head leaves the first step's layers those of the bf16 run") {
  const TraceRecords bf16 = forward_of(trace_of({"precision.compute=bf16"}, 1), 0, 7);
  CHECK(bf16.size() == 4 * 8 * 5);  // microbatches, layers, an output and four operands
  require_equal(bf16, forward_of(trace_of(kAll, 1), 0, 7), kAll);
}

TEST_CASE("up to the first listed layer the first step is the fp8 run's, and no further") {
  const TraceRecords fp8 = trace_of({}, 1), listed = trace_of({"precision.bf16_layers=[4]"}, 1);
  require_equal(forward_of(fp8, 0, 3), forward_of(listed, 0, 3), {"layers 0 to 3"});
  CHECK_FALSE(differences(forward_of(fp8, 4, 4), forward_of(listed, 4, 4)).empty());
}

TEST_CASE("scaling state and transposed weights exist for the layers that are not listed, and for no other") {
  const TraceRecords trace = trace_of(kMixed, 1);
  for (int layer = 0; layer < 8; ++layer) {
    const std::string qkv = "layers." + std::to_string(layer) + ".qkv";
    const bool fp8 = layer == 1 || (layer >= 4 && layer <= 6);
    INFO(qkv);
    const auto has = [&](const char* category, const std::string& name) {
      return std::any_of(trace.begin(), trace.end(),
                         [&](const auto& r) { return r.first.category == category && r.first.name == name; });
    };
    CHECK(has("weight cache, rowwise", qkv));
    CHECK(has("weight cache, transposed", qkv) == fp8);
    CHECK(has("scale_inv", qkv + ".in") == fp8);
    CHECK(has("retained X^T", qkv));
  }
}

TEST_CASE("a checkpoint has scaling state of the FP8 layers alone, and a run with another list cannot load it") {
  const Scratch dir;
  const auto disk = make_disk_storage();
  RunOptions none{.steps = 0, .trace = false};
  none.before_steps = [&](PipelineRank& rank, Transport& t) {
    Manifest about;
    about.config = about.environment = nlohmann::ordered_json::object();
    save_checkpoint(*disk, t, rank, dir / "c", {}, about);
  };
  run_training(test_config(kMixed + kMappings[2]), none);
  std::size_t slots = 0;
  for (const ManifestTensor& t : open_checkpoint(dir / "c/step_00000000").tensors) {
    slots += t.name.starts_with("fp8.") && t.name.ends_with(".scale");
    for (const char* listed : {"fp8.layers.0.", "fp8.layers.2.", "fp8.layers.3.", "fp8.layers.7."}) {
      CHECK_FALSE(t.name.starts_with(listed));
    }
  }
  CHECK(slots == 4 * 4 * 3 + 3);
  std::mutex mutex;
  std::vector<std::string> refusals;
  none.before_steps = [&](PipelineRank& rank, Transport& t) {
    std::string refusal;
    try {
      load_checkpoint(t, rank, *find_checkpoint(t, dir / "c", "latest"), Restored::kEverything);
    } catch (const CheckpointError& e) {
      refusal = e.what();
    }
    const std::lock_guard lock(mutex);
    refusals.push_back(refusal);
  };
  for (const char* other : {"precision.bf16_layers=[]", "precision.bf16_layers=[0,2,3]", "precision.bf16_layers=[1]"}) {
    run_training(test_config(Overrides{other} + kMappings[1]), none);
  }
  CHECK(refusals.size() == 3 * 2);
  for (const std::string& refusal : refusals) {
    CHECK_THAT(refusal, ContainsSubstring("se the config of its manifest.json."));
  }
}

}  // namespace qe::testing

// One rank on a GPU: mode, backward, placement, slots and schedule do not show in the bytes, as on the CPU.
// Level "exact in one backend" of the exactness table in ARCHITECTURE.md, and a look across the backends.
#include <cmath>

#include "core/error.h"
#include "kernels/backend.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

// The attention kernels want heads of 64.
const Overrides kShape{"model.hidden_size=512", "model.ffn_hidden_size=1024", "model.num_attention_heads=8",
                       "model.max_position_embeddings=64", "training.seq_length=64"};

Config config_on(const std::string& backend, const Overrides& cell) {
  return test_config(kShape + cell + Overrides{"execution.backend=" + backend});
}

// False, with a warning, on a machine or in a build without CUDA.
bool has_cuda() {
  try {
    (void)make_backend("cuda");
    return true;
  } catch (const Error& e) {
    WARN("skipped: " << e.what());
    return false;
  }
}

// One rank on the GPU, driven step by step.
struct GpuRank {
  explicit GpuRank(const Config& c) : config(c) {}
  const Config config;
  const Backend backend = make_backend("cuda");
  const std::unique_ptr<Transport> transport = make_transport(*backend.device, 1, 1, 60, "none");
  PipelineRank rank{*backend.device,          *backend.ops,           *transport,
                    make_rank_config(config), make_rank_plan(config), nullptr};

  [[nodiscard]] auto memory() const { return backend.device->memory_by_kind(); }
  StepResult step(std::uint32_t number) {
    const Batch batch = synthetic_batch(config, number);
    return rank.train_step(batch.tokens, batch.targets, 1e-3, number);
  }
};

TraceRecords trace_of(const Overrides& cell, int steps) {
  return run_training(config_on("cuda", cell), {.steps = steps, .after_step = nullptr}).trace;
}

void require_equal(const TraceRecords& reference, const Overrides& cell, int steps) {
  std::string name, text;
  for (const std::string& o : cell) name += o + " ";
  for (const std::string& line : differences(reference, trace_of(cell, steps))) text += "\n  " + line;
  INFO(name << text);
  REQUIRE(text.empty());
}

}  // namespace

TEST_CASE("on a GPU mode, backward, placement and schedule do not show in six steps") {
  if (!has_cuda()) return;
  const TraceRecords reference =
      trace_of({"execution.mode=eager", "pipeline.backward=full", "gradients.placement=copied"}, 6);
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    for (const char* backward : {"pipeline.backward=split", "pipeline.backward=full"}) {
      for (const char* placement : {"gradients.placement=copied", "gradients.placement=arena"}) {
        require_equal(reference, {mode, backward, placement}, 6);
      }
    }
  }
  for (const Overrides& schedule :
       {Overrides{"pipeline.schedule=interleaved_1f1b", "pipeline.virtual_pipeline_model_parallel_size=2"},
        Overrides{"pipeline.schedule=zbv"}}) {
    require_equal(reference, schedule + Overrides{"execution.mode=graph", "gradients.placement=arena"}, 6);
  }
}

TEST_CASE("on a GPU peak and per-microbatch slots accumulate the same bytes, eager and captured") {
  if (!has_cuda()) return;
  const TraceRecords reference = trace_of({"execution.mode=eager", "pipeline.tape_slots=per_microbatch"}, 3);
  require_equal(reference, {"execution.mode=graph", "pipeline.tape_slots=per_microbatch"}, 3);
  require_equal(reference, {"execution.mode=graph", "pipeline.tape_slots=peak"}, 3);
  require_equal(reference, {"execution.mode=graph", "pipeline.tape_slots=peak", "pipeline.schedule=zbv"}, 3);
}

TEST_CASE("on a GPU grouped weight gradients have the same bytes eager and captured, under any schedule") {
  if (!has_cuda()) return;
  const Overrides grouped{"gradients.w_group=2", "training.seq_length=128", "model.max_position_embeddings=128"};
  const TraceRecords reference = trace_of(grouped + Overrides{"execution.mode=eager"}, 3);
  require_equal(reference, grouped + Overrides{"execution.mode=graph"}, 3);
  require_equal(reference, grouped + Overrides{"execution.mode=graph", "pipeline.schedule=zbv"}, 3);
}

TEST_CASE("on a GPU capture changes no state, and nothing is allocated after it") {
  if (!has_cuda()) return;
  std::vector<std::uint64_t> digests;
  std::vector<std::array<std::size_t, kMemoryKinds>> memory;
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    GpuRank gpu(config_on("cuda", {mode}));
    digests.push_back(gpu.rank.state_digest());
    const auto captured = gpu.memory();
    gpu.step(1);
    memory.push_back(gpu.memory());
    if (gpu.config.execution.mode == ExecutionMode::kGraph) CHECK(memory.back() == captured);
    gpu.step(2);
    CHECK(gpu.memory() == memory.back());
  }
  CHECK(digests[0] == digests[1]);
  CHECK(memory[0] == memory[1]);
}

TEST_CASE("on a GPU 300 captured steps are 300 eager ones, in constant memory", "[slow]") {
  if (!has_cuda()) return;
  std::vector<std::vector<std::pair<double, float>>> runs;  // loss and gradient norm of each step
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    GpuRank gpu(config_on("cuda", {mode}));
    std::array<std::size_t, kMemoryKinds> at_20{};
    auto& run = runs.emplace_back();
    for (std::uint32_t step = 1; step <= 300; ++step) {
      const StepResult result = gpu.step(step);
      run.emplace_back(result.loss_sum, result.scalars.norm);
      if (step == 20) at_20 = gpu.memory();
    }
    CHECK(gpu.memory() == at_20);
  }
  CHECK(runs[0] == runs[1]);
}

TEST_CASE("the losses of a GPU follow the CPU's") {
  if (!has_cuda()) return;
  for (const char* precision : {"precision.compute=fp8", "precision.compute=bf16", "precision.bf16_layers=[1]"}) {
    INFO(precision);
    const RunOptions options{.steps = 3, .trace = false, .after_step = nullptr};
    const RunOutcome cpu = run_training(config_on("cpu", {precision}), options);
    const RunOutcome cuda = run_training(config_on("cuda", {precision, "execution.mode=graph"}), options);
    REQUIRE(cuda.losses.size() == cpu.losses.size());
    for (std::size_t i = 0; i < cpu.losses.size(); ++i) {
      INFO("step " << i + 1 << ": " << cuda.losses[i] << " against " << cpu.losses[i]);
      CHECK(std::fabs(cuda.losses[i] - cpu.losses[i]) < 5e-3 * cpu.losses[i]);
    }
    const auto norm = [](const RunOutcome& run) { return double{run.scalars.front().norm}; };
    CHECK(std::fabs(norm(cuda) - norm(cpu)) < 5e-2 * norm(cpu));
  }
}

}  // namespace qe::testing

// fp32 mode against finite differences: the oracle for every gradient of the stage program.
#include <cmath>
#include <map>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {

TEST_CASE("fp32 gradients of every parameter agree with finite differences of the loss") {
  const Config config =
      test_config({"precision.compute=fp32", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48",
                   "model.num_attention_heads=2", "training.seq_length=16", "optimizer.clip_grad=0",
                   "training.global_batch_size=2", "optimizer.weight_decay=0"});
  ThreadWorld world(1, 1);
  CpuDevice device;
  CpuOps ops(device);
  const auto transport = world.connect(0, device);
  PipelineRank rank(device, ops, *transport, make_rank_config(config), make_rank_plan(config), nullptr);
  const Batch batch = synthetic_batch(config, 1);
  const TransformerStage& stage = *rank.stages()[0];
  const ParameterList& parameters = stage.weights().parameters();
  const double tokens = static_cast<double>(config.tokens_per_step());

  // At learning rate 0 weights stay; after a step with zero moments the first moment is (1 − β₁)·g.
  rank.train_step(batch.tokens, batch.targets, 0.0, 1);
  std::map<std::string, std::vector<float>> moments;
  for (const StateEntry& e : rank.state()) {
    const float* values = e.view.as<float>();
    moments[e.name].assign(values, values + e.view.shape.elements());
  }
  for (int p = 0; p < parameters.size(); ++p) {
    const std::vector<float>& moment = moments.at("moment1." + parameters[p].name);
    float* weight = stage.weights().master(p).as<float>();
    // The element with the largest gradient: its difference stands clear of FP32's rounding of the loss.
    std::size_t at = 0;
    for (std::size_t i = 0; i < moment.size(); ++i) {
      if (std::fabs(moment[i]) > std::fabs(moment[at])) at = i;
    }
    const double gradient = static_cast<double>(moment[at]) / 0.1;
    const float original = weight[at];
    const float step = 0.01f;
    const auto loss_at = [&](float w) {
      weight[at] = w;
      // The caches are of the old weight: a zero-rate step is what makes the next evaluation refresh them.
      rank.train_step(batch.tokens, batch.targets, 0.0, 2);
      return rank.evaluate(batch.tokens, batch.targets, config.microbatches()) / tokens;
    };
    const double numeric = (loss_at(original + step) - loss_at(original - step)) / (2.0 * static_cast<double>(step));
    weight[at] = original;
    INFO(parameters[p].name << " element " << at << ": gradient " << gradient << ", difference " << numeric);
    // FP32 losses near 5.5 have a rounding of 5e-7; divided by the step's 0.02 that is 2.5e-5. Curvature adds O(step²).
    CHECK(std::fabs(numeric - gradient) < 2e-4 + 0.02 * std::fabs(gradient));
  }
}

}  // namespace qe::testing

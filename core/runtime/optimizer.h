// AdamW over every parameter of a rank in two launches, with the global-norm clip and the non-finite verdict between
// them (design.md 7). Owns moments and the step's device scalars; commits nothing: that is the contract's.
#pragma once

#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/ops.h"
#include "core/runtime/step_timeline.h"
#include "core/stage/transformer_stage.h"

namespace qe {

struct OptimizerConfig {
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.1f;  // matrices only
  float clip_grad = 1.0f;     // 0: off
  DType moments = DType::kF32;
  std::uint64_t seed = 1;
};

class Optimizer {
 public:
  // `model` is the whole model's list: a parameter's place there is its cell in the norm and its key for rounding bits.
  // `partials` [1, partials_of(model)] FP32 is the caller's, zero when a step begins; `probe` and `timeline` may be
  // null.
  Optimizer(Device&, Ops&, const OptimizerConfig&, std::vector<const TransformerStage*> stages,
            const ParameterList& model, const Tensor& partials, Probe* probe, StepTimeline* timeline);

  // A cell a parameter for its sum of squares, then one each for its verdict; every cell belongs to one rank.
  static std::int64_t partials_of(const ParameterList& model) noexcept { return 2 * std::int64_t{model.size()}; }

  // Runs the launches once as a skipped step, which leaves everything as it was, so that whatever a backend prepares at
  // an operation's first call is prepared before any graph is captured. Before the first step, gradients all zero.
  void prepare(Stream&);

  // One step on the stream, in two parts; between them the caller sums the partials over the pipeline's ranks. `step`
  // counts from 1, skipped steps included.
  void begin_step(Stream&, float learning_rate, std::uint32_t step);  // the gradients' sums of squares
  // The norm is of the whole model, its partials added in global parameter order, so that it has the same bits for
  // every cut; then the update. Caches of stages whose caches_follow_update() are then those of the new weights. On a
  // skipped step weights, caches and moments stay and vector gradients are zeroed.
  void end_step(Stream&);
  // Of the step, once, when the host has waited for the stream.
  OptimizerScalars result();

  [[nodiscard]] std::uint64_t applied_updates() const noexcept { return applied_updates_; }  // Adam's t
  void restore(std::uint64_t applied_updates) noexcept { applied_updates_ = applied_updates; }
  // Moment 1 or 2 of a parameter of a stage.
  [[nodiscard]] Tensor moment(int which, StageIndex, int parameter) const;

 private:
  struct StageMoments {
    const TransformerStage* stage;
    ParameterOffsets offsets;
    Buffer memory[2];
  };
  void add_items(const StageMoments&, const ParameterList& model);

  Device& device_;
  Ops& ops_;
  OptimizerConfig config_;
  Probe* probe_;
  StepTimeline* timeline_;
  std::vector<StageMoments> stages_;
  Buffer scalars_;
  HostMemory result_{nullptr, nullptr};
  GradientNormArgs norm_args_;
  ClipArgs clip_args_;
  AdamWArgs adamw_args_;
  std::uint64_t applied_updates_ = 0;
};

}  // namespace qe

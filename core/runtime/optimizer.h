// AdamW over every parameter of a rank in two launches, with the global-norm clip and the non-finite verdict between
// them (design.md 7). Owns moments and the step's device scalars; commits nothing: that is the contract's.
#pragma once

#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/ops.h"
#include "core/runtime/step_timeline.h"
#include "core/stage/transformer_stage.h"
#include "core/transport.h"

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
  // `probe` and `timeline` may be null.
  Optimizer(Device&, Ops&, Transport&, const OptimizerConfig&, std::vector<const TransformerStage*> stages,
            const ParameterList& model, Probe* probe, StepTimeline* timeline);

  // Runs the launches once as a skipped step, which leaves everything as it was, so that whatever a backend prepares at
  // an operation's first call is prepared before any graph is captured. Before the first step, gradients all zero.
  void prepare(Stream&);

  // One step on the stream, in two parts, so that something else may travel between the ranks while the first is at
  // work. `step` counts from 1, skipped steps included. Every rank of the pipeline must call both.
  void begin_step(Stream&, float learning_rate, std::uint32_t step);  // the gradients' sums of squares
  // The norm is of the whole model, its partials added in global parameter order, so that it has the same bits for
  // every cut; then the update. The host waits for it. Caches of stages whose caches_follow_update() are then those of
  // the new weights. On a skipped step weights, caches and moments stay and vector gradients are zeroed.
  OptimizerScalars end_step(Stream&);

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
  Transport& transport_;
  OptimizerConfig config_;
  Probe* probe_;
  StepTimeline* timeline_;
  std::vector<StageMoments> stages_;
  Buffer partials_;  // [2, model parameters]: squares, then verdicts
  Buffer scalars_;
  GradientNormArgs norm_args_;
  ClipArgs clip_args_;
  AdamWArgs adamw_args_;
  std::uint64_t applied_updates_ = 0;
};

}  // namespace qe

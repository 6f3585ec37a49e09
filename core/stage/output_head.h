// Final norm, vocabulary projection and loss: the tail of the last stage's F, the head of its I, and one matrix of its
// W.
#pragma once

#include "core/stage/linear.h"
#include "core/stage/norm.h"

namespace qe {

// Step-resident inputs and outputs of the loss, in device memory at fixed addresses.
struct LossBuffers {
  const std::int32_t* targets = nullptr;  // [M, T]; −1: does not count
  float* loss = nullptr;                  // [M]: Σ −log p of a microbatch
  const float* gradient_scale = nullptr;  // 1 / N, N the step's target tokens
};

class OutputHead {
 public:
  static constexpr const char* kMatrixName = "head.weight";
  static void declare(ParameterList&, const ModelConfig&);
  OutputHead(StageParts&, const LossBuffers&);

  void refresh(Ops&, Stream&, const Fp8State& forward_state) const;
  // In training the logits become dlogits on the tape; in evaluation only the loss is computed.
  void forward(const StageRun&, const Tensor& x) const;
  void input_grad(const StageRun&, const Tensor& x, const Tensor& dx, const Linear* producer) const;  // as in Norm
  void weight_grad(const StageRun&, int count, MicrobatchIndex first, bool first_write) const;

  [[nodiscard]] const Linear& projection() const noexcept { return projection_; }
  [[nodiscard]] const Norm& norm() const noexcept { return norm_; }
  [[nodiscard]] const LossBuffers& loss() const noexcept { return loss_; }

 private:
  LossBuffers loss_;
  std::int64_t vocab_size_;
  Norm norm_;
  Linear projection_;
  FieldId logits_;  // [T, V]: dlogits from the end of F
  FieldId d_norm_;  // scratch
};

}  // namespace qe

// Ops on the CPU reference backend: each call enqueues one function of kernels/cpu/kernels.h on a lazy stream.
#pragma once

#include "core/ops.h"
#include "kernels/cpu/device.h"

namespace qe {

class CpuOps final : public Ops {
 public:
  explicit CpuOps(CpuDevice& device) : device_(device) {}

  void embedding_forward(Stream&, const EmbeddingForwardArgs&) override;
  void embedding_backward(Stream&, const EmbeddingBackwardArgs&) override;
  void layernorm_quantize(Stream&, const LayerNormArgs&) override;
  void layernorm_backward_residual(Stream&, const LayerNormBackwardArgs&) override;
  void quantize(Stream&, const QuantizeArgs&) override;
  void quantize_weight(Stream&, const QuantizeWeightArgs&) override;
  void dynamic_scale(Stream&, const DynamicScaleArgs&) override;
  void cast(Stream&, const Tensor& from, const Tensor& to) override;
  void gemm(Stream&, const GemmArgs&) override;
  void gelu_quantize(Stream&, const GeluArgs&) override;
  void gelu_backward_quantize_bias(Stream&, const GeluBackwardArgs&) override;
  void attention_forward(Stream&, const AttentionArgs&) override;
  void attention_backward(Stream&, const AttentionBackwardArgs&) override;
  void cross_entropy(Stream&, const CrossEntropyArgs&) override;
  void update_scales(Stream&, const UpdateScalesArgs&) override;
  void gradient_norm(Stream&, const GradientNormArgs&) override;
  void clip_factor(Stream&, const ClipArgs&) override;
  void adamw(Stream&, const AdamWArgs&) override;

 private:
  CpuDevice& device_;
};

}  // namespace qe

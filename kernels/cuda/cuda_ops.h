// The CUDA backend's Ops: hands every operation its stream's launch data. Owns the GEMM plans; the arithmetic is in the
// kernels of this folder.
#pragma once

#include "core/ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm_plan.h"
#include "kernels/gemm_chooser.h"

namespace qe {

class CudaOps final : public Ops, public GemmChooser {
 public:
  explicit CudaOps(CudaDevice& device) : device_(device) {}

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

  [[nodiscard]] GemmPlatform gemm_platform() const override;
  [[nodiscard]] std::string gemm_product(const GemmArgs&) const override;
  void use_gemms(std::span<const GemmChoice>, const std::string& source) override;
  std::vector<GemmChoice> choose_gemms(std::span<const GemmArgs>) override;
  std::vector<std::string> gemm_candidates(const GemmArgs&) override;

 private:
  CudaDevice& device_;
  cuda::GemmPlans gemms_;
};

}  // namespace qe

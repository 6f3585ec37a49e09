// The CUDA backend's own kernels, one host function an operation: checks its arguments, then launches. CudaOps calls
// them; the GEMMs are kernels/cuda/gemm_plan.h.
//
// Sums have a fixed order in every launch: the same arguments give the same bits, eager and captured, whatever runs
// beside them. An atomic is used only where order cannot matter (the maximum that an amax is).
#pragma once

#include "core/ops_args.h"
#include "kernels/cuda/launch.h"

namespace qe::cuda {

void embedding_forward(const Launch&, const EmbeddingForwardArgs&);
void embedding_backward(const Launch&, const EmbeddingBackwardArgs&);
void layernorm_quantize(const Launch&, const LayerNormArgs&);
void layernorm_backward_residual(const Launch&, const LayerNormBackwardArgs&);
void quantize(const Launch&, const QuantizeArgs&);
void quantize_weight(const Launch&, const QuantizeWeightArgs&);
void dynamic_scale(const Launch&, const DynamicScaleArgs&);
void cast(const Launch&, const Tensor& from, const Tensor& to);
void gelu_quantize(const Launch&, const GeluArgs&);
void gelu_backward_quantize_bias(const Launch&, const GeluBackwardArgs&);
void attention_forward(const Launch&, const AttentionArgs&);
void attention_backward(const Launch&, const AttentionBackwardArgs&);
void cross_entropy(const Launch&, const CrossEntropyArgs&);
void update_scales(const Launch&, const UpdateScalesArgs&);
void gradient_norm(const Launch&, const GradientNormArgs&);
void clip_factor(const Launch&, const ClipArgs&);
void adamw(const Launch&, const AdamWArgs&);

}  // namespace qe::cuda

// The CPU backend's arithmetic: plain functions that run at once, single-threaded. CpuOps enqueues them.
// Every sum has one fixed order, over indices or over fixed lanes, with explicit std::fma where a product is added, so
// that any machine gives the same bits.
#pragma once

#include "core/ops_args.h"

namespace qe::cpu {

void embedding_forward(const EmbeddingForwardArgs&);
void embedding_backward(const EmbeddingBackwardArgs&);
void layernorm_quantize(const LayerNormArgs&);
void layernorm_backward_residual(const LayerNormBackwardArgs&);
void quantize(const QuantizeArgs&);
void quantize_weight(const QuantizeWeightArgs&);
void dynamic_scale(const DynamicScaleArgs&);
void cast(const Tensor& from, const Tensor& to);
void gemm(const GemmArgs&);
void gelu_quantize(const GeluArgs&);
void gelu_backward_quantize_bias(const GeluBackwardArgs&);
void attention_forward(const AttentionArgs&);
void attention_backward(const AttentionBackwardArgs&);
void cross_entropy(const CrossEntropyArgs&);
void update_scales(const UpdateScalesArgs&);
void gradient_norm(const GradientNormArgs&);
void clip_factor(const ClipArgs&);
void adamw(const AdamWArgs&);

}  // namespace qe::cpu

// The arithmetic seam: the fused units of the stage program and the optimizer (semantics.md section 2, design.md 3 and
// 7).
//
// All pure virtual, no defaults: a backend has every operation. Every call enqueues on the stream and returns; all of
// them can be captured. Shapes, types and addition rules stand beside the fields in core/ops_args.h. Sums have a fixed
// order in each backend: the same inputs give the same bits in every call.
#pragma once

#include <cstdint>
#include <string>

#include "core/device.h"
#include "core/ops_args.h"

namespace qe {

class Ops {
 public:
  virtual ~Ops() = default;

  virtual void embedding_forward(Stream&, const EmbeddingForwardArgs&) = 0;
  virtual void embedding_backward(Stream&, const EmbeddingBackwardArgs&) = 0;

  virtual void layernorm_quantize(Stream&, const LayerNormArgs&) = 0;
  virtual void layernorm_backward_residual(Stream&, const LayerNormBackwardArgs&) = 0;

  virtual void quantize(Stream&, const QuantizeArgs&) = 0;
  virtual void quantize_weight(Stream&, const QuantizeWeightArgs&) = 0;
  virtual void dynamic_scale(Stream&, const DynamicScaleArgs&) = 0;
  virtual void cast(Stream&, const Tensor& from, const Tensor& to) = 0;  // FP32 → FP32 or BF16, same shape

  virtual void gemm(Stream&, const GemmArgs&) = 0;

  virtual void gelu_quantize(Stream&, const GeluArgs&) = 0;
  virtual void gelu_backward_quantize_bias(Stream&, const GeluBackwardArgs&) = 0;

  virtual void attention_forward(Stream&, const AttentionArgs&) = 0;
  virtual void attention_backward(Stream&, const AttentionBackwardArgs&) = 0;

  virtual void cross_entropy(Stream&, const CrossEntropyArgs&) = 0;

  virtual void update_scales(Stream&, const UpdateScalesArgs&) = 0;

  virtual void gradient_norm(Stream&, const GradientNormArgs&) = 0;
  virtual void clip_factor(Stream&, const ClipArgs&) = 0;
  virtual void adamw(Stream&, const AdamWArgs&) = 0;
};

}  // namespace qe

// Attention half of a layer: x → x + proj(attention(qkv(norm(x)))), as F, I and W (semantics.md 2.2 to 2.4).
#pragma once

#include "core/stage/linear.h"
#include "core/stage/norm.h"

namespace qe {

class AttentionBlock {
 public:
  static void declare(ParameterList&, const ModelConfig&, int layer);
  AttentionBlock(StageParts&, int layer);

  void refresh(Ops&, Stream&, const Fp8State& forward_state) const;
  void forward(const StageRun&, const Tensor& x, const Tensor& out) const;  // [T, h] each
  // d_out is in proj's tape and bias gradient already; it and dx may not be the same memory.
  void input_grad(const StageRun&, const Tensor& x, const Tensor& d_out, const Tensor& dx) const;
  void weight_grad(const StageRun&, int count, MicrobatchIndex first, bool first_write) const;

  [[nodiscard]] const Linear& qkv() const noexcept { return qkv_; }
  [[nodiscard]] const Linear& proj() const noexcept { return proj_; }
  [[nodiscard]] const Norm& norm() const noexcept { return norm_; }

 private:
  [[nodiscard]] AttentionArgs attention(const StageRun&) const;
  const ModelConfig model_;
  int sequences_, sequence_length_;
  Norm norm_;
  Linear qkv_, proj_;
  FieldId qkv_out_;                              // [T, 3h]
  FieldId lse_;                                  // [heads, T]
  FieldId attended_{};                           // [T, h]: kept only where proj's own operand is FP8
  FieldId d_attended_, d_qkv_, d_norm_, delta_;  // scratch
};

}  // namespace qe

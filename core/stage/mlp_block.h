// MLP half of a layer: x → x + fc2(gelu(fc1(norm(x)))), as F, I and W (semantics.md 2.2 to 2.4).
#pragma once

#include "core/stage/linear.h"
#include "core/stage/norm.h"

namespace qe {

class MlpBlock {
 public:
  static void declare(ParameterList&, const ModelConfig&, int layer);
  MlpBlock(StageParts&, int layer);

  void refresh(Ops&, Stream&, const Fp8State& forward_state) const;
  void forward(const StageRun&, const Tensor& x, const Tensor& out) const;  // [T, h] each
  // d_out is in fc2's tape and bias gradient already; it and dx may not be the same memory. `producer` as in Norm.
  void input_grad(const StageRun&, const Tensor& x, const Tensor& d_out, const Tensor& dx,
                  const Linear* producer) const;
  void weight_grad(const StageRun&, int count, MicrobatchIndex first, bool first_write) const;

  [[nodiscard]] const Linear& fc1() const noexcept { return fc1_; }
  [[nodiscard]] const Linear& fc2() const noexcept { return fc2_; }
  [[nodiscard]] const Norm& norm() const noexcept { return norm_; }

 private:
  Norm norm_;
  Linear fc1_, fc2_;
  FieldId u_;                // [T, f], before GELU
  FieldId d_gelu_, d_norm_;  // scratch
};

}  // namespace qe

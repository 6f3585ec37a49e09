// Norm: one LayerNorm site: its parameters (read from the FP32 masters), its statistics on the tape.
#pragma once

#include <string>

#include "core/stage/stage_run.h"

namespace qe {

class Linear;

class Norm {
 public:
  // Declares name.weight and name.bias.
  static void declare(ParameterList&, const std::string& name, int width);
  Norm(StageParts&, const std::string& name);

  // x [T, h] → out, quantized as `quantizer` says.
  void forward(const StageRun&, const Tensor& x, const Operand& out, const Quantizer&) const;
  // dx = backward(dy) + residual (empty: none); adds the parameters' gradients. `producer` is the Linear whose Y x is:
  // dx goes into its tape and bias gradient as by quantize_output_grad. Null, and so always for the Linear of another
  // layer: dx alone, for the sums' order would show where the model is cut.
  void backward(const StageRun&, const Tensor& dy, const Tensor& x, const Tensor& residual, const Tensor& dx,
                const Linear* producer) const;
  void record_vector_grads(const StageRun&) const;

 private:
  const StageWeights* weights_;
  const GradMemory* gradients_;
  int weight_, bias_;
  FieldId mean_, rstd_;  // [1, T] FP32
};

}  // namespace qe

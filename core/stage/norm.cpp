#include "core/stage/norm.h"

#include "core/stage/linear.h"

namespace qe {

namespace {
constexpr float kEpsilon = 1e-5f;
}

void Norm::declare(ParameterList& list, const std::string& name, int width) {
  list.add({.name = name + ".weight",
            .kind = ParameterKind::kVector,
            .shape = {1, width},
            .real_rows = 1,
            .init = Init::kOnes});
  list.add({.name = name + ".bias", .kind = ParameterKind::kVector, .shape = {1, width}, .real_rows = 1});
}

Norm::Norm(StageParts& parts, const std::string& name)
    : weights_(&parts.weights),
      gradients_(&parts.gradients),
      weight_(parts.weights.parameters().index(name + ".weight")),
      bias_(parts.weights.parameters().index(name + ".bias")),
      mean_(parts.tape.add(name + ".mean", DType::kF32, {1, parts.config.tokens()})),
      rstd_(parts.tape.add(name + ".rstd", DType::kF32, {1, parts.config.tokens()})) {}

void Norm::forward(const StageRun& run, const Tensor& x, const Operand& out, const Quantizer& quantizer) const {
  run.ops.layernorm_quantize(run.stream, {x, weights_->master(weight_), weights_->master(bias_), kEpsilon, out,
                                          quantizer, run.at(mean_), run.at(rstd_)});
}

void Norm::backward(const StageRun& run, const Tensor& dy, const Tensor& x, const Tensor& residual, const Tensor& dx,
                    const Linear* producer) const {
  LayerNormBackwardArgs a{dy,
                          x,
                          run.at(mean_),
                          run.at(rstd_),
                          weights_->master(weight_),
                          residual,
                          dx,
                          gradients_->main(weight_),
                          gradients_->main(bias_)};
  if (producer != nullptr) {
    a.quantized = producer->output_grad(run);
    a.quantizer = producer->output_grad_quantizer(run);
    a.grad_bias = producer->bias_grad();
  }
  run.ops.layernorm_backward_residual(run.stream, a);
}

void Norm::record_vector_grads(const StageRun& run) const {
  for (const int p : {weight_, bias_}) {
    run.record(ProbeCategory::kVectorGrad, weights_->parameters()[p].name, gradients_->main(p));
  }
}

}  // namespace qe

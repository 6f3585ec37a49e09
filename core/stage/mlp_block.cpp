#include "core/stage/mlp_block.h"

namespace qe {

void MlpBlock::declare(ParameterList& list, const ModelConfig& model, int layer) {
  const std::string name = layer_name(layer);
  const std::int64_t h = model.hidden_size;
  const std::int64_t f = model.ffn_hidden_size;
  Norm::declare(list, name + ".mlp_norm", model.hidden_size);
  list.add({.name = name + ".mlp.fc1.weight",
            .kind = ParameterKind::kMatrix,
            .shape = {f, h},
            .real_rows = f,
            .init = Init::kNormal,
            .init_std = kInitStd});
  list.add({.name = name + ".mlp.fc1.bias", .kind = ParameterKind::kVector, .shape = {1, f}, .real_rows = 1});
  list.add({.name = name + ".mlp.fc2.weight",
            .kind = ParameterKind::kMatrix,
            .shape = {h, f},
            .real_rows = h,
            .init = Init::kNormal,
            .init_std = output_init_std(model)});
  list.add({.name = name + ".mlp.fc2.bias", .kind = ParameterKind::kVector, .shape = {1, h}, .real_rows = 1});
}

MlpBlock::MlpBlock(StageParts& parts, int layer)
    : norm_(parts, layer_name(layer) + ".mlp_norm"),
      fc1_(parts, {layer_name(layer) + ".fc1", layer_name(layer) + ".mlp.fc1.weight", 1,
                   layer_name(layer) + ".mlp.fc1.bias", layer_precision(parts.config, layer)}),
      fc2_(parts, {layer_name(layer) + ".fc2", layer_name(layer) + ".mlp.fc2.weight", 1,
                   layer_name(layer) + ".mlp.fc2.bias", layer_precision(parts.config, layer)}) {
  const std::int64_t tokens = parts.config.tokens();
  const std::int64_t h = parts.config.model.hidden_size;
  const std::int64_t f = parts.config.model.ffn_hidden_size;
  const DType activation = parts.config.activation_type();
  u_ = parts.tape.add(layer_name(layer) + ".u", activation, {tokens, f});
  d_gelu_ = parts.tape.scratch("d_gelu", activation, {tokens, f});
  d_norm_ = parts.tape.scratch("d_norm", activation, {tokens, h});
}

void MlpBlock::refresh(Ops& ops, Stream& stream, const Fp8State& forward_state) const {
  fc1_.refresh(ops, stream, forward_state);
  fc2_.refresh(ops, stream, forward_state);
}

void MlpBlock::forward(const StageRun& run, const Tensor& x, const Tensor& out) const {
  norm_.forward(run, x, fc1_.input(run), fc1_.input_quantizer(run));
  fc1_.forward(run, {}, run.at(u_));
  run.ops.gelu_quantize(run.stream, {run.at(u_), fc2_.input(run), fc2_.input_quantizer(run)});
  fc2_.forward(run, x, out);
}

void MlpBlock::input_grad(const StageRun& run, const Tensor& x, const Tensor& d_out, const Tensor& dx,
                          const Linear* producer) const {
  const Tensor d_gelu = run.at(d_gelu_);
  fc2_.input_grad(run, d_gelu);
  run.ops.gelu_backward_quantize_bias(
      run.stream, {run.at(u_), d_gelu, fc1_.output_grad(run), fc1_.output_grad_quantizer(run), fc1_.bias_grad()});
  const Tensor d_norm = run.at(d_norm_);
  fc1_.input_grad(run, d_norm);
  norm_.backward(run, d_norm, x, d_out, dx, producer);
}

void MlpBlock::weight_grad(const StageRun& run, int count, MicrobatchIndex first, bool first_write) const {
  fc1_.weight_grad(run, count, first, first_write);
  fc2_.weight_grad(run, count, first, first_write);
}

}  // namespace qe

#include "core/stage/attention_block.h"

#include <cmath>

namespace qe {

void AttentionBlock::declare(ParameterList& list, const ModelConfig& model, int layer) {
  const std::string name = layer_name(layer);
  const std::int64_t h = model.hidden_size;
  Norm::declare(list, name + ".attention_norm", model.hidden_size);
  bool adjacent = false;
  for (const char* part : {"query", "key", "value"}) {
    list.add({.name = name + ".attention." + part + ".weight",
              .kind = ParameterKind::kMatrix,
              .shape = {h, h},
              .real_rows = h,
              .init = Init::kNormal,
              .init_std = kInitStd,
              .adjacent = adjacent});
    adjacent = true;
  }
  adjacent = false;
  for (const char* part : {"query", "key", "value"}) {
    list.add({.name = name + ".attention." + part + ".bias",
              .kind = ParameterKind::kVector,
              .shape = {1, h},
              .real_rows = 1,
              .adjacent = adjacent});
    adjacent = true;
  }
  list.add({.name = name + ".attention.proj.weight",
            .kind = ParameterKind::kMatrix,
            .shape = {h, h},
            .real_rows = h,
            .init = Init::kNormal,
            .init_std = output_init_std(model)});
  list.add({.name = name + ".attention.proj.bias", .kind = ParameterKind::kVector, .shape = {1, h}, .real_rows = 1});
}

AttentionBlock::AttentionBlock(StageParts& parts, int layer)
    : model_(parts.config.model),
      sequences_(parts.config.micro_batch_size),
      sequence_length_(parts.config.seq_length),
      norm_(parts, layer_name(layer) + ".attention_norm"),
      qkv_(parts, {layer_name(layer) + ".qkv", layer_name(layer) + ".attention.query.weight", 3,
                   layer_name(layer) + ".attention.query.bias", layer_precision(parts.config, layer)}),
      proj_(parts, {layer_name(layer) + ".proj", layer_name(layer) + ".attention.proj.weight", 1,
                    layer_name(layer) + ".attention.proj.bias", layer_precision(parts.config, layer)}) {
  const std::int64_t tokens = parts.config.tokens();
  const std::int64_t h = model_.hidden_size;
  const DType activation = parts.config.activation_type();
  qkv_out_ = parts.tape.add(layer_name(layer) + ".qkv.out", activation, {tokens, 3 * h});
  lse_ = parts.tape.add(layer_name(layer) + ".lse", DType::kF32, {model_.num_attention_heads, tokens});
  if (proj_.fp8()) attended_ = parts.tape.add(layer_name(layer) + ".attended", activation, {tokens, h});
  d_attended_ = parts.tape.scratch("d_attended", activation, {tokens, h});
  d_qkv_ = parts.tape.scratch("d_qkv", activation, {tokens, 3 * h});
  d_norm_ = parts.tape.scratch("d_norm", activation, {tokens, h});
  delta_ = parts.tape.scratch("attention_delta", DType::kF32, {model_.num_attention_heads, tokens});
}

AttentionArgs AttentionBlock::attention(const StageRun& run) const {
  const Tensor qkv = run.at(qkv_out_);
  const std::int64_t h = model_.hidden_size;
  return {.sequences = sequences_,
          .sequence_length = sequence_length_,
          .num_heads = model_.num_attention_heads,
          .num_kv_heads = model_.num_attention_heads,
          .head_dim = model_.head_dim(),
          .scale = 1.0f / std::sqrt(static_cast<float>(model_.head_dim())),
          .q = qkv.cols(0, h),
          .k = qkv.cols(h, h),
          .v = qkv.cols(2 * h, h),
          .out = proj_.fp8() ? run.at(attended_) : proj_.input(run).rowwise,
          .lse = run.at(lse_)};
}

void AttentionBlock::refresh(Ops& ops, Stream& stream, const Fp8State& forward_state) const {
  qkv_.refresh(ops, stream, forward_state);
  proj_.refresh(ops, stream, forward_state);
}

void AttentionBlock::forward(const StageRun& run, const Tensor& x, const Tensor& out) const {
  norm_.forward(run, x, qkv_.input(run), qkv_.input_quantizer(run));
  qkv_.forward(run, {}, run.at(qkv_out_));
  AttentionArgs a = attention(run);
  if (proj_.fp8()) {
    a.quantized = proj_.input(run);
    a.quantizer = proj_.input_quantizer(run);
  }
  run.ops.attention_forward(run.stream, a);
  proj_.forward(run, x, out);
}

void AttentionBlock::input_grad(const StageRun& run, const Tensor& x, const Tensor& d_out, const Tensor& dx) const {
  const Tensor d_attended = run.at(d_attended_);
  proj_.input_grad(run, d_attended);

  const Tensor d_qkv = run.at(d_qkv_);
  const std::int64_t h = model_.hidden_size;
  run.ops.attention_backward(run.stream, {attention(run), d_attended, d_qkv.cols(0, h), d_qkv.cols(h, h),
                                          d_qkv.cols(2 * h, h), run.at(delta_)});
  qkv_.quantize_output_grad(run, d_qkv);
  const Tensor d_norm = run.at(d_norm_);
  qkv_.input_grad(run, d_norm);
  norm_.backward(run, d_norm, x, d_out, dx, nullptr);
}

void AttentionBlock::weight_grad(const StageRun& run, int count, MicrobatchIndex first, bool first_write) const {
  qkv_.weight_grad(run, count, first, first_write);
  proj_.weight_grad(run, count, first, first_write);
}

}  // namespace qe

#include "core/stage/linear.h"

#include "core/error.h"

namespace qe {

namespace {
enum DynamicScale { kScaleX, kScaleW, kScaleDy };

int add_slot(std::vector<std::string>& slots, std::string name) {
  slots.push_back(std::move(name));
  return static_cast<int>(slots.size()) - 1;
}
std::int64_t padded(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }
}  // namespace

LinearPrecision layer_precision(const StageConfig& config, int layer) {
  return config.fp8_layer(layer) ? LinearPrecision::kFp8Delayed : LinearPrecision::kPlain;
}

Linear::Linear(StageParts& parts, LinearSpec spec)
    : spec_(std::move(spec)),
      weights_(&parts.weights),
      gradients_(&parts.gradients),
      activation_(parts.config.activation_type()),
      forward_type_(fp8() ? parts.config.fp8.forward_type() : activation_),
      backward_type_(fp8() ? parts.config.fp8.backward_type() : activation_),
      matrix_(parts.weights.parameters().index(spec_.first_matrix)),
      bias_(spec_.first_bias.empty() ? -1 : parts.weights.parameters().index(spec_.first_bias)) {
  const Shape w = weights_->master_group(matrix_, spec_.matrices).shape;
  const std::int64_t tokens = parts.config.tokens();
  x_ = add_operand(parts.tape, spec_.name + ".in", forward_type_, {tokens, w.cols});
  dy_ = add_operand(parts.tape, spec_.name + ".dy", backward_type_, {tokens, w.rows});
  if (dynamic()) staged_x_ = parts.tape.scratch(spec_.name + ".staged", activation_, {tokens, w.cols});
  if (spec_.precision == LinearPrecision::kFp8Delayed) {
    input_slot_ = add_slot(parts.forward_slots, spec_.name + ".in");
    weight_slot_ = add_slot(parts.forward_slots, spec_.name + kWeightSlot);
    output_grad_slot_ = add_slot(parts.backward_slots, spec_.name + ".dy");
  }

  const auto element = static_cast<std::int64_t>(size_of(forward_type_));
  const std::int64_t weight_bytes = padded(w.elements() * element);
  const std::int64_t layouts = fp8() ? 2 : 1;
  const std::int64_t bias_bytes = bias_ < 0 ? 0 : padded(w.rows * static_cast<std::int64_t>(size_of(activation_)));
  const std::int64_t scalar_bytes = 256;  // scale_inv, then the dynamic scales
  cache_memory_ = parts.device.allocate(static_cast<std::size_t>(layouts * weight_bytes + bias_bytes + scalar_bytes),
                                        MemoryKind::kWeightCache);
  unsigned char* base = cache_memory_.as<unsigned char>();
  weight_.rowwise = make_tensor(base, forward_type_, w);
  if (bias_ >= 0) bias_copy_ = make_tensor(base + layouts * weight_bytes, activation_, {1, w.rows});
  float* scalars = reinterpret_cast<float*>(base + layouts * weight_bytes + bias_bytes);
  if (fp8()) {
    weight_.columnwise = make_tensor(base + weight_bytes, forward_type_, {w.cols, w.rows});
    weight_.scale_inv = {scalars, DType::kF32, {1, 1}, kScalePitch};
    dynamic_scales_ = scalars + kScalePitch;
  }
}

void Linear::refresh(Ops& ops, Stream& stream, const Fp8State& forward_state) const {
  const Tensor master = weights_->master_group(matrix_, spec_.matrices);
  Quantizer quantizer;
  if (weight_slot_ >= 0) quantizer = forward_state.quantizer(weight_slot_, true);
  if (dynamic()) {
    quantizer.scale = dynamic_scales_ + kScaleW;
    ops.dynamic_scale(stream, {master, forward_type_, dynamic_scales_ + kScaleW, true});
  }
  ops.quantize_weight(stream, {master, weight_, quantizer});
  if (bias_ >= 0) ops.cast(stream, weights_->master_group(bias_, spec_.matrices), bias_copy_);
}

void Linear::add_copies(WeightCopies& copies, const Fp8State& forward_state) const {
  QE_EXPECTS(!dynamic(), "a dynamic scale is known only after the update");
  const Quantizer quantizer = weight_slot_ < 0 ? Quantizer{} : forward_state.quantizer(weight_slot_, true);
  std::int64_t row = 0;
  for (int i = 0; i < spec_.matrices; ++i) {
    const std::int64_t rows = weights_->parameters()[matrix_ + i].shape.rows;
    Operand part{weight_.rowwise.rows(row, rows), {}, {}};
    if (fp8()) part.columnwise = weight_.columnwise.cols(row, rows);
    if (i == 0) part.scale_inv = weight_.scale_inv;
    copies.at(static_cast<std::size_t>(matrix_ + i)) = {part, quantizer};
    if (bias_ >= 0) copies.at(static_cast<std::size_t>(bias_ + i)) = {{bias_copy_.cols(row, rows), {}, {}}, {}};
    row += rows;
  }
}

Operand Linear::input(const StageRun& run) const {
  if (dynamic()) return {run.at(staged_x_), {}, {}};
  return run.at(x_);
}

Quantizer Linear::input_quantizer(const StageRun& run) const { return run.forward_quantizer(input_slot_); }

void Linear::forward(const StageRun& run, const Tensor& residual, const Tensor& y) const {
  const Operand x = run.at(x_);
  if (dynamic()) {
    run.ops.dynamic_scale(run.stream, {run.at(staged_x_), forward_type_, dynamic_scales_ + kScaleX, false});
    run.ops.quantize(run.stream, {run.at(staged_x_), x, {dynamic_scales_ + kScaleX, nullptr}, {}});
  }
  GemmArgs g;
  g.a = x.rowwise;
  g.b = weight_.rowwise;
  g.a_scale_inv = x.scale_inv;
  g.b_scale_inv = weight_.scale_inv;
  g.bias = bias_copy_;
  g.residual = residual;
  g.d = y;
  g.fast_accumulation = true;
  run.ops.gemm(run.stream, g);
}

void Linear::quantize_output_grad(const StageRun& run, const Tensor& dy) const {
  Quantizer quantizer = output_grad_quantizer(run);
  if (dynamic()) {
    quantizer.scale = dynamic_scales_ + kScaleDy;
    run.ops.dynamic_scale(run.stream, {dy, backward_type_, dynamic_scales_ + kScaleDy, false});
  }
  run.ops.quantize(run.stream, {dy, run.at(dy_), quantizer, bias_grad()});
}

Operand Linear::output_grad(const StageRun& run) const {
  QE_EXPECTS(!dynamic(), "a fused op cannot quantize with a scale that depends on its own result");
  return run.at(dy_);
}
Quantizer Linear::output_grad_quantizer(const StageRun& run) const { return run.backward_quantizer(output_grad_slot_); }

Tensor Linear::bias_grad() const { return bias_ < 0 ? Tensor{} : gradients_->main_group(bias_, spec_.matrices); }

void Linear::input_grad(const StageRun& run, const Tensor& dx) const {
  const Operand dy = run.at(dy_);
  GemmArgs g;
  g.a = dy.rowwise;
  g.b = fp8() ? weight_.columnwise : weight_.rowwise;
  g.b_transposed = !fp8();
  g.a_scale_inv = dy.scale_inv;
  g.b_scale_inv = weight_.scale_inv;
  g.d = dx;
  run.ops.gemm(run.stream, g);
}

void Linear::weight_grad(const StageRun& run, int count, MicrobatchIndex first, bool first_write) const {
  const Operand x = run.tape.group(x_, run.slot, count);
  const Operand dy = run.tape.group(dy_, run.slot, count);
  const GradMemory::Destination to = gradients_->destination(matrix_, spec_.matrices, first, first_write);
  GemmArgs g;
  g.a = fp8() ? dy.columnwise : dy.rowwise;
  g.b = fp8() ? x.columnwise : x.rowwise;
  g.a_transposed = g.b_transposed = !fp8();
  g.a_scale_inv = dy.scale_inv;
  g.b_scale_inv = x.scale_inv;
  g.d = to.d;
  g.accumulate = to.accumulate;
  run.ops.gemm(run.stream, g);
  gradients_->deliver(run.device, run.stream, matrix_, spec_.matrices, first);
}

void Linear::record_input(const StageRun& run) const {
  const Operand x = run.at(x_);
  run.record(ProbeCategory::kRetainedInput, spec_.name, fp8() ? x.columnwise : x.rowwise);
  if (fp8()) run.record(ProbeCategory::kScaleInv, spec_.name + ".in", x.scale_inv);
}

void Linear::record_output_grad(const StageRun& run) const {
  const Operand dy = run.at(dy_);
  run.record(ProbeCategory::kRetainedOutputGrad, spec_.name, fp8() ? dy.columnwise : dy.rowwise);
  if (fp8()) run.record(ProbeCategory::kScaleInv, spec_.name + ".dy", dy.scale_inv);
}

void Linear::record_matrix_grads(const StageRun& run, MicrobatchIndex m) const {
  for (int p = matrix_; p < matrix_ + spec_.matrices; ++p) {
    run.record(ProbeCategory::kMatrixGrad, weights_->parameters()[p].name, gradients_->bound(p, m));
  }
}

void Linear::record_vector_grads(const StageRun& run) const {
  for (int p = bias_; bias_ >= 0 && p < bias_ + spec_.matrices; ++p) {
    run.record(ProbeCategory::kVectorGrad, weights_->parameters()[p].name, gradients_->main(p));
  }
}

}  // namespace qe

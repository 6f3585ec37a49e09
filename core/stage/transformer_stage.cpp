#include "core/stage/transformer_stage.h"

#include "core/error.h"

namespace qe {

bool has_scaling_state(const StageConfig& config, const StageRange& range) {
  if (range.head && config.head == HeadPrecision::kFp8Delayed) return true;
  for (int layer = range.first_layer; layer < range.first_layer + range.num_layers; ++layer) {
    if (config.fp8_layer(layer)) return true;
  }
  return false;
}

bool scales_apart(const StageConfig& config, const StageRange& range) {
  return has_scaling_state(config, range) &&
         (config.fp8.scale_update == ScaleUpdate::kStep || config.fp8.reduce_amax == ReduceAmax::kData);
}

bool caches_follow_update(const StageConfig& config) { return config.head != HeadPrecision::kFp8Dynamic; }

TransformerStage::TransformerStage(Device& device, Ops& ops, Stream& setup, const StageConfig& config, StageIndex index,
                                   const StageRange& range, int slots, const StageBuffers& buffers, Probe* probe)
    : device_(device),
      ops_(ops),
      index_(index),
      range_(range),
      microbatches_(config.microbatches),
      update_per_microbatch_(config.fp8.scale_update == ScaleUpdate::kMicrobatch),
      scales_apart_(qe::scales_apart(config, range)),
      reduces_amaxes_(has_scaling_state(config, range) && config.fp8.reduce_amax == ReduceAmax::kData),
      caches_follow_update_(qe::caches_follow_update(config)),
      buffers_(buffers),
      probe_(probe),
      weights_(device, stage_parameters(config, range)),
      gradients_(device, config, weights_.parameters()) {
  StageParts parts{device, config, weights_, gradients_, {}, {}, {}};
  const DType activation = config.activation_type();
  const Shape shape{config.tokens(), config.model.hidden_size};
  input_ = parts.tape.add("input", activation, shape);
  input_grad_ = parts.tape.add("input_grad", activation, shape);
  output_grad_ = parts.tape.scratch("output_grad", activation, shape);
  d_layer_ = parts.tape.scratch("d_layer", activation, shape);
  d_middle_ = parts.tape.scratch("d_middle", activation, shape);

  if (range.embedding) embedding_.emplace(parts, buffers.tokens);
  layers_.reserve(static_cast<std::size_t>(range.num_layers));
  for (int layer = range.first_layer; layer < range.first_layer + range.num_layers; ++layer) {
    layers_.push_back({layer, AttentionBlock(parts, layer), MlpBlock(parts, layer),
                       parts.tape.add(layer_name(layer) + ".middle", activation, shape),
                       parts.tape.add(layer_name(layer) + ".out", activation, shape)});
  }
  if (range.head) head_.emplace(parts, buffers.loss);

  tape_ = std::make_unique<Tape>(device, parts.tape, slots, config.gradients.w_group);
  const auto cells = static_cast<std::size_t>(slots) + 1;
  microbatch_cells_ = device.allocate(cells * sizeof(std::int32_t), MemoryKind::kStep);
  for (int slot = 0; slot < slots; ++slot) write_cell(setup, slot, MicrobatchIndex{slot});
  const auto recipe = [&](DType format) {
    return ScalingRecipe{format, config.fp8.amax_history_len, config.fp8.margin, config.fp8.amax_compute_algo};
  };
  const ScalingRecipe forward = recipe(config.fp8.forward_type()), backward = recipe(config.fp8.backward_type());
  const std::size_t forward_bytes = Fp8State::state_bytes(parts.forward_slots.size(), forward);
  const std::size_t bytes = forward_bytes + Fp8State::state_bytes(parts.backward_slots.size(), backward);
  scaling_ = device.allocate(bytes, MemoryKind::kScalingState);
  scaling_at_start_ = device.allocate(bytes, MemoryKind::kScalingState);
  auto* state = scaling_.as<float>();
  forward_state_ = Fp8State(device, setup, parts.forward_slots, forward, state);
  backward_state_ = Fp8State(device, setup, parts.backward_slots, backward, state + forward_bytes / sizeof(float));
}

StageRun TransformerStage::run(Stream& stream, SlotIndex slot, Pass pass) const {
  const int cell = pass == Pass::kEvaluate ? slots() : to_int(slot);
  return {ops_,   device_,        stream,
          *tape_, forward_state_, backward_state_,
          pass,   slot,           microbatch_cells_.as<std::int32_t>() + cell,
          probe_};
}

void TransformerStage::save_scaling(Stream& stream) const {
  device_.copy(stream, scaling_at_start_.data(), scaling_.data(), scaling_.bytes());
}
void TransformerStage::restore_scaling(Stream& stream) const {
  device_.copy(stream, scaling_.data(), scaling_at_start_.data(), scaling_.bytes());
}

void TransformerStage::refresh(Stream& stream) const {
  if (embedding_) embedding_->refresh(ops_, stream);
  for (const Layer& l : layers_) {
    l.attention.refresh(ops_, stream, forward_state_);
    l.mlp.refresh(ops_, stream, forward_state_);
  }
  if (head_) head_->refresh(ops_, stream, forward_state_);
}

WeightCopies TransformerStage::weight_copies() const {
  WeightCopies copies(static_cast<std::size_t>(weights_.parameters().size()));
  if (embedding_) embedding_->add_copies(copies);
  for (const Linear* linear : linears()) linear->add_copies(copies, forward_state_);
  return copies;
}

Tensor TransformerStage::layer_input(const StageRun& r, std::size_t layer) const {
  return layer == 0 ? r.at(input_) : r.at(layers_[layer - 1].out);
}

void TransformerStage::forward_pass(const StageRun& r) const {
  if (embedding_) embedding_->forward(r, r.at(input_));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& l = layers_[i];
    l.attention.forward(r, layer_input(r, i), r.at(l.middle));
    l.mlp.forward(r, r.at(l.middle), r.at(l.out));
  }
  if (head_) head_->forward(r, r.at(layers_.back().out));
}

void TransformerStage::forward(Stream& stream, SlotIndex slot) const {
  StageRun r = run(stream, slot, Pass::kTrain);
  forward_pass(r);
  for (const Layer& l : layers_) record_forward(r, l);
  if (head_ && probe_ != nullptr) {
    head_->projection().record_input(r);
    r.record(ProbeCategory::kLoss, "loss", make_tensor(buffers_.loss.loss, DType::kF32, {1, microbatches_}));
  }
  finish_chain(r, Chain::kForward);
}

void TransformerStage::evaluate(Stream& stream, SlotIndex slot) const {
  StageRun r = run(stream, slot, Pass::kEvaluate);
  r.probe = nullptr;
  forward_pass(r);
}

void TransformerStage::input_grad(Stream& stream, SlotIndex slot) const {
  const StageRun r = run(stream, slot, Pass::kTrain);
  Tensor d = r.at(output_grad_);
  if (head_) {
    d = r.at(d_layer_);
    head_->input_grad(r, r.at(layers_.back().out), d, &layers_.back().mlp.fc2());
    head_->norm().record_vector_grads(r);
    if (probe_ != nullptr) head_->projection().record_output_grad(r);
  }
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& l = layers_[i];
    const Tensor middle = r.at(d_middle_);
    if (!head_ || i + 1 < layers_.size()) l.mlp.fc2().quantize_output_grad(r, d);
    l.mlp.input_grad(r, r.at(l.middle), d, middle, &l.attention.proj());
    d = i == 0 && !embedding_ ? r.at(input_grad_) : r.at(d_layer_);
    l.attention.input_grad(r, layer_input(r, i), middle, d);
    record_input_grad(r, l, d);
  }
  if (embedding_) {
    embedding_->input_grad(r, d);
    embedding_->record_vector_grads(r);
  }
  finish_chain(r, Chain::kBackward);
}

void TransformerStage::weight_grad(Stream& stream, std::span<const SlotIndex> slots, bool first_write) const {
  QE_EXPECTS(!slots.empty(), "a W covers at least one slot");
  const StageRun r = run(stream, slots.front(), Pass::kTrain);
  const int count = static_cast<int>(slots.size());
  // With microbatch views slots are per microbatch (design.md 4), so the slot names the view.
  const MicrobatchIndex m{to_int(slots.front())};
  for (const Layer& l : layers_) {
    l.attention.weight_grad(r, count, m, first_write);
    l.mlp.weight_grad(r, count, m, first_write);
  }
  if (head_) head_->weight_grad(r, count, m, first_write);
  if (probe_ == nullptr) return;
  for (const Linear* linear : linears()) linear->record_matrix_grads(r, m);
}

void TransformerStage::gather_amaxes(Stream& stream, Chain chain) const { scaling(chain).gather(ops_, stream); }

void TransformerStage::update_scales(Stream& stream, Chain chain) const {
  if (reduces_amaxes_) scaling(chain).scatter(ops_, stream);
  scaling(chain).update(ops_, stream, update_per_microbatch_ ? token(chain) : nullptr);
}

std::uint64_t* TransformerStage::token(Chain chain) const {
  return chain == Chain::kForward ? buffers_.forward_counter : buffers_.backward_counter;
}

void TransformerStage::finish_chain(const StageRun& r, Chain chain) const {
  if (reduces_amaxes_ && update_per_microbatch_) return gather_amaxes(r.stream, chain);
  if (update_per_microbatch_) {
    update_scales(r.stream, chain);
  } else {
    ops_.update_scales(r.stream, {.token = token(chain)});
  }
  if (probe_ == nullptr) return;
  const Fp8State& state = scaling(chain);
  for (int s = 0; s < state.slots(); ++s) {
    r.record(ProbeCategory::kAmaxHistory, state.name(s), state.history(s, 1));
    r.record(ProbeCategory::kScale, state.name(s), state.scale(s, 1));
  }
}

void TransformerStage::record_forward(const StageRun& r, const Layer& l) const {
  if (probe_ == nullptr) return;
  r.record(ProbeCategory::kLayerOutput, layer_name(l.index), r.at(l.out));
  for (const Linear* linear : {&l.attention.qkv(), &l.attention.proj(), &l.mlp.fc1(), &l.mlp.fc2()}) {
    linear->record_input(r);
  }
}

void TransformerStage::record_input_grad(const StageRun& r, const Layer& l, const Tensor& dx) const {
  if (probe_ == nullptr) return;
  r.record(ProbeCategory::kLayerInputGrad, layer_name(l.index), dx);
  for (const Linear* linear : {&l.attention.qkv(), &l.attention.proj(), &l.mlp.fc1(), &l.mlp.fc2()}) {
    linear->record_output_grad(r);
    linear->record_vector_grads(r);
  }
  l.attention.norm().record_vector_grads(r);
  l.mlp.norm().record_vector_grads(r);
}

Tensor TransformerStage::input(SlotIndex s) const { return tape_->at(input_, s); }
Tensor TransformerStage::output(SlotIndex s) const { return tape_->at(layers_.back().out, s); }
Tensor TransformerStage::output_grad() const { return tape_->at(output_grad_, SlotIndex{0}); }
Tensor TransformerStage::input_grad(SlotIndex s) const { return tape_->at(input_grad_, s); }
void TransformerStage::write_cell(Stream& stream, int cell, MicrobatchIndex m) const {
  const std::int32_t microbatch = to_int(m);
  device_.upload(stream, microbatch_cells_.as<std::int32_t>() + cell, &microbatch, sizeof microbatch);
}

void TransformerStage::set_microbatch(Stream& stream, SlotIndex slot, MicrobatchIndex m) const {
  if (slots() < microbatches_) write_cell(stream, to_int(slot), m);
}

void TransformerStage::set_evaluated(Stream& stream, MicrobatchIndex m) const { write_cell(stream, slots(), m); }

std::vector<const Linear*> TransformerStage::linears() const {
  std::vector<const Linear*> all;
  for (const Layer& l : layers_) {
    for (const Linear* linear : {&l.attention.qkv(), &l.attention.proj(), &l.mlp.fc1(), &l.mlp.fc2()}) {
      all.push_back(linear);
    }
  }
  if (head_) all.push_back(&head_->projection());
  return all;
}

std::vector<int> TransformerStage::matrices() const {
  std::vector<int> indices;
  for (int p = 0; p < weights_.parameters().size(); ++p) {
    if (weights_.parameters()[p].kind == ParameterKind::kMatrix) indices.push_back(p);
  }
  return indices;
}

int TransformerStage::weight_quantize_launches() const noexcept {
  int launches = 0;
  for (const Linear* linear : linears()) launches += linear->fp8() ? 1 : 0;
  return launches;
}

const TransformerStage* stage_of(std::span<const TransformerStage* const> stages, StageIndex index) {
  for (const TransformerStage* s : stages) {
    if (s->index() == index) return s;
  }
  QE_EXPECTS(false, "the stage is of this rank");
}

}  // namespace qe

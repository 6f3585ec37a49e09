#include "core/fp8/fp8_state.h"

#include "core/error.h"

namespace qe {

Fp8State::Fp8State(Device& device, Stream& stream, std::vector<std::string> slot_names, const ScalingRecipe& recipe,
                   float* state)
    : names_(std::move(slot_names)), recipe_(recipe), state_(state) {
  if (names_.empty()) return;
  amaxes_ = device.allocate(names_.size() * sizeof(float), MemoryKind::kScalingState);
  const std::vector<float> ones(names_.size(), 1.0f);
  device.upload(stream, scale(0, slots()).data, ones.data(), ones.size() * sizeof(float));
}

std::size_t Fp8State::state_bytes(std::size_t slots, const ScalingRecipe& recipe) noexcept {
  return slots * static_cast<std::size_t>(recipe.history_length + 1) * sizeof(float);
}

Quantizer Fp8State::quantizer(int slot, bool gather_amax) const {
  return {scale(slot, 1).as<float>(), gather_amax ? history(slot, 1).as<float>() : nullptr};
}

void Fp8State::update(Ops& ops, Stream& stream, std::uint64_t* token) const {
  if (names_.empty()) return ops.update_scales(stream, {.token = token});
  ops.update_scales(stream, {history(0, slots()).as<float>(), scale(0, slots()).as<float>(), slots(),
                             recipe_.history_length, recipe_.format, recipe_.margin, recipe_.algorithm, token});
}

Tensor Fp8State::current() const { return {state_, DType::kF32, {slots(), 1}, recipe_.history_length}; }
void Fp8State::gather(Ops& ops, Stream& stream) const {
  if (!names_.empty()) ops.cast(stream, current(), make_tensor(amaxes_.data(), DType::kF32, {slots(), 1}));
}
void Fp8State::scatter(Ops& ops, Stream& stream) const {
  if (!names_.empty()) ops.cast(stream, make_tensor(amaxes_.data(), DType::kF32, {slots(), 1}), current());
}

Tensor Fp8State::history(int first, int count) const {
  QE_EXPECTS(first >= 0 && first + count <= slots(), "the slots exist");
  return make_tensor(state_ + std::int64_t{first} * recipe_.history_length, DType::kF32,
                     {count, recipe_.history_length});
}

Tensor Fp8State::scale(int first, int count) const {
  QE_EXPECTS(first >= 0 && first + count <= slots(), "the slots exist");
  float* scales = state_ + std::int64_t{slots()} * recipe_.history_length;
  return make_tensor(scales + first, DType::kF32, {1, count});
}

}  // namespace qe

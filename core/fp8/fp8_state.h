// Scaling state of one chain (forward or backward) of a stage: amax histories and scales (semantics.md 1.1 and 1.4).
// scale_inv is not here: it lives with each quantized tensor.
#pragma once

#include <string>
#include <vector>

#include "core/device.h"
#include "core/ops.h"

namespace qe {

struct ScalingRecipe {
  DType format = DType::kE4M3;
  int history_length = 1024;
  int margin = 0;
  AmaxAlgorithm algorithm = AmaxAlgorithm::kMax;
};

class Fp8State {
 public:
  Fp8State() = default;  // no slots: every call does nothing
  // In `state`, memory of state_bytes() that is zero: the stage keeps its chains side by side. Scales start at 1,
  // histories at 0.
  Fp8State(Device&, Stream&, std::vector<std::string> slot_names, const ScalingRecipe&, float* state);
  static std::size_t state_bytes(std::size_t slots, const ScalingRecipe&) noexcept;

  [[nodiscard]] int slots() const noexcept { return static_cast<int>(names_.size()); }
  [[nodiscard]] const std::string& name(int slot) const { return names_[static_cast<std::size_t>(slot)]; }

  // How an op quantizes into the slot; without amax for evaluation.
  [[nodiscard]] Quantizer quantizer(int slot, bool gather_amax) const;
  // The rule of core/fp8/scale_rule.h, every slot, one launch, in which *token += 1; null: no token.
  void update(Ops&, Stream&, std::uint64_t* token) const;

  // [count, history_length] FP32; column 0 is the current amax. [1, count] FP32.
  [[nodiscard]] Tensor history(int first, int count) const;
  [[nodiscard]] Tensor scale(int first, int count) const;

  // Current amaxes on their way over the replicas: gather() copies them out of the histories into amaxes() [slots],
  // FP32 and contiguous; scatter() puts them back. Each one launch.
  void gather(Ops&, Stream&) const;
  void scatter(Ops&, Stream&) const;
  [[nodiscard]] float* amaxes() const noexcept { return amaxes_.as<float>(); }

 private:
  [[nodiscard]] Tensor current() const;  // [slots, 1]: element 0 of each history
  std::vector<std::string> names_;
  ScalingRecipe recipe_;
  float* state_ = nullptr;  // histories, then scales
  Buffer amaxes_;
};

}  // namespace qe

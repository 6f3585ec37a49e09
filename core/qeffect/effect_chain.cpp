// Order: positions only; the scaling state itself lives with the arithmetic.
#include "core/qeffect/effect_chain.h"

#include "core/qeffect/violation.h"

namespace qe {

const char* name_of(ChainDirection d) noexcept { return d == ChainDirection::kForward ? "forward" : "backward"; }

EffectChain::EffectChain(StageIndex stage, ChainDirection direction, int microbatches)
    : stage_(stage), direction_(direction), microbatches_(static_cast<std::uint64_t>(microbatches)) {}

bool EffectChain::moves(ActionKind kind) const noexcept {
  if (direction_ == ChainDirection::kForward) return kind == ActionKind::kForward;
  return kind == ActionKind::kInputGrad || kind == ActionKind::kFullBackward;
}

void EffectChain::check(const Action& action, const TapeKey& key) const {
  const bool next = position_ < microbatches_ && to_int(key.microbatch) == static_cast<int>(position_);
  if (moves(action.kind) && action.count == 1 && next) return;
  const std::string chain = std::string(name_of(direction_)) + " chain";
  throw ContractViolation({Violation::kOrder, operation_begin(action), to_string(key), "",
                           position_ < microbatches_
                               ? "microbatch " + std::to_string(position_) + " next in the " + chain
                               : "no further transition of the " + chain + " in this step",
                           to_string(action)});
}

EffectToken EffectChain::advance(const Action& action, const TapeKey& key) {
  check(action, key);
  ++position_;
  return current();
}

void EffectChain::require_complete(std::uint64_t device_counter) const {
  if (position_ == microbatches_ && device_counter == microbatches_) return;
  throw ContractViolation(
      {Violation::kOrder, "finalize_step",
       "stage " + std::to_string(to_int(stage_)) + ", " + name_of(direction_) + " chain", "",
       std::to_string(microbatches_) + " transitions on host and device",
       std::to_string(position_) + " on the host and " + std::to_string(device_counter) + " on the device"});
}

}  // namespace qe

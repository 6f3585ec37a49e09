// Order: the sequence of scaling-state transitions of one stage and direction within a step (design.md section 2).
// Host half; its twin is a device counter that the last node of F or I increments. W belongs to no chain.
#pragma once

#include <cstdint>

#include "core/action.h"
#include "core/ids.h"
#include "core/qeffect/tape_key.h"

namespace qe {

enum class ChainDirection : std::uint8_t { kForward, kBackward };
const char* name_of(ChainDirection) noexcept;

// A chain's position: how many transitions the step has made. Carries no numbers.
struct EffectToken {
  ChainDirection direction{};
  std::uint64_t position = 0;
  bool operator==(const EffectToken&) const = default;
};

class EffectChain {
 public:
  EffectChain(StageIndex, ChainDirection, int microbatches);

  [[nodiscard]] EffectToken current() const noexcept { return {direction_, position_}; }
  // The action must be the chain's next transition: F (forward), I or B (backward) of microbatch `position`. Else
  // kOrder.
  void check(const Action&, const TapeKey&) const;
  // The action has run. Checks again, then moves.
  EffectToken advance(const Action&, const TapeKey&);
  // kOrder unless the host and the device counted one transition per microbatch.
  void require_complete(std::uint64_t device_counter) const;
  void restart() noexcept { position_ = 0; }

 private:
  [[nodiscard]] bool moves(ActionKind) const noexcept;

  StageIndex stage_;
  ChainDirection direction_;
  std::uint64_t microbatches_;
  std::uint64_t position_ = 0;
};

}  // namespace qe

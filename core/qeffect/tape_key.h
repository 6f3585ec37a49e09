// Names of retained work: who owns it (TapeKey) and where it lies (TapeRef). Paper section III, ownership.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "core/ids.h"

namespace qe {

// One logical action's retained work. unit and invocation are 0 while a stage action keeps one tape.
struct TapeKey {
  Epoch epoch = 0;
  StageIndex stage{};
  MicrobatchIndex microbatch{};
  int unit = 0;
  int invocation = 0;
  auto operator<=>(const TapeKey&) const = default;
};

// A slot as it was bound; a slot's generation grows with every bind, so an old ref never matches again.
struct TapeRef {
  SlotIndex slot{};
  std::uint64_t generation = 0;
  auto operator<=>(const TapeRef&) const = default;
};

enum class Consumer : std::uint8_t { kInputGrad = 1, kWeightGrad = 2 };

std::string to_string(const TapeKey&);  // "epoch 3, stage 1, microbatch 2, unit 0, invocation 0"
std::string to_string(const TapeRef&);  // "slot 2, generation 7"

}  // namespace qe

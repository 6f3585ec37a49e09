// Dense peaks of known cards, which a step's rate is held against.
#pragma once

#include <optional>
#include <string>

namespace qe {

// TFLOP/s without sparsity, from the cards' data sheets. An FP8 run computes in both: attention and a BF16 head in
// BF16.
struct CardPeaks {
  double bf16 = 0;
  double fp8 = 0;
};

// Of a device as Device::description() names it; nothing for a CPU or a card that is not known here.
std::optional<CardPeaks> peaks_of(const std::string& device);

}  // namespace qe

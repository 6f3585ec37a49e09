// How a backend computes one kind of matrix product, as text that ranks and checkpoints compare.
#pragma once

#include <string>

namespace qe {

struct GemmChoice {
  std::string product;    // shape, types, pitches and what is added
  std::string algorithm;  // the library's own words for it
  bool operator==(const GemmChoice&) const = default;
};

}  // namespace qe

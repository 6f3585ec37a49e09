// How a backend computes one kind of matrix product, as text that ranks, checkpoints and tune files compare.
#pragma once

#include <string>

namespace qe {

struct GemmChoice {
  std::string product;    // shape, types, pitches and what is added
  std::string algorithm;  // the library's own words for it
  bool operator==(const GemmChoice&) const = default;
};

// What those words are good for: they were timed on one kind of card, and another library reads them otherwise.
struct GemmPlatform {
  std::string device;
  int multiprocessors = 0;  // fewer in a slice of a card
  std::string library;      // with its version
  bool operator==(const GemmPlatform&) const = default;
};

}  // namespace qe

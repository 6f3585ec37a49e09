// Golden losses: what a stored config gives on the CPU backend, whose bits are the same on every machine
// (ARCHITECTURE.md). The files lie in tests/golden/losses; scripts/make_goldens.py writes their results anew.
#pragma once

#include <string>
#include <vector>

#include "app/config.h"

namespace qe::testing {

struct LossResults {
  std::vector<std::string> losses;          // C hex floats, one a step: Σ −log p
  std::vector<std::string> gradient_norms;  // before clipping
  bool operator==(const LossResults&) const = default;
};

struct GoldenLosses {
  Config config;
  LossResults results;  // as stored
};

// {"config": …, "losses": […], "gradient_norms": […]}. Throws ConfigError or a parse error when the file is not that.
GoldenLosses read_golden_losses(const std::string& path);
// config.training.train_iters steps on synthetic tokens, in this process.
LossResults compute_losses(const Config&);

}  // namespace qe::testing

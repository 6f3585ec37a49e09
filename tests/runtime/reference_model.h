// One training step of the GPT model up to its main gradients, in double precision, as plain loops from the definitions
// of semantics.md sections 1 and 2 and design.md 3. It rounds where the definitions round (BF16 activations, FP8
// operands) and nowhere else, and shares no arithmetic with the product, so what the two disagree in is an error of one
// of them. Owns no optimizer and knows no stages, tapes or schedules.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "app/config.h"
#include "tests/runtime/reference_fp8.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {

using ReferenceParameters = std::map<std::string, Matrix>;  // by global name

struct ReferenceStep {
  double loss_sum = 0.0;          // Σ −log p over the step's targets
  ReferenceParameters gradients;  // summed over the microbatches, of the mean loss
  ReferenceSlots slots;           // scaling state after the step
};

// Parameters and scaling state as the step finds them. One replica.
ReferenceStep reference_step(const Config&, const ReferenceParameters&, const ReferenceSlots&, const Batch&);

}  // namespace qe::testing

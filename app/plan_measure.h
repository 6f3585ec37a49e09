// Measures what the parts of a stage cost on this machine's backend, in this process alone. Owns the method; the file
// that the numbers go to is plan_costs's.
#pragma once

#include "app/plan_costs.h"

namespace qe {

// Times every F, I, W and, where a step has it, refresh of steps of three one-layer stages (with embedding, plain, with
// head), in the step's order; then the optimizer, a boundary copy and what a whole step takes besides. Medians of
// repetitions, the device synchronized around each. Runs in the config's mode, precision, placement and W group on
// execution.backend, with random weights and tokens.
PlanCosts measure_costs(const Config&);

}  // namespace qe

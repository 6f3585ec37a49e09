// Measures what the parts of a stage cost on this machine's backend, in this process alone. Owns the method; the file
// that the numbers go to is plan_costs's.
#pragma once

#include "app/plan_costs.h"

namespace qe {

// Times F, I, W and the refresh of three one-layer stages (with embedding, plain, with head), the optimizer, a boundary
// copy and what a whole step takes besides: medians of repetitions, device synchronized around each. Runs in the
// config's mode, precision, placement and W group on execution.backend, with random weights and tokens.
PlanCosts measure_costs(const Config&);

}  // namespace qe

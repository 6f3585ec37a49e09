// Evaluation: forward passes at a step boundary, eager in both modes, in slot 0 of every stage (design.md 6).
#pragma once

#include <vector>

#include "core/qeffect/qeffect.h"
#include "core/runtime/boundary.h"
#include "core/runtime/graph_executor.h"

namespace qe {

// Enqueues stage s's pass over microbatch t − s in every time step t, so that ranks overlap as in a pipeline. Messages
// of an edge match because both of its ends walk (t, s) in the same order. The losses are in their cells once the
// device is synchronized; the caller completes the contract's uses.
void enqueue_evaluation(Device&, Stream& graph, QEffect&, Boundary&, GraphExecutor&,
                        const std::vector<const TransformerStage*>& stages, const std::vector<int>& rank_of_stage,
                        int microbatches);

}  // namespace qe

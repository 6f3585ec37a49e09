// What must hold before the first tensor is allocated: every rank can compute what the config asks for, all in the same
// way, and what they hold will fit.
#pragma once

#include <cstddef>
#include <vector>

#include "core/runtime/pipeline_rank.h"
#include "kernels/backend.h"

namespace qe {

struct StartCheck {
  std::size_t planned_bytes = 0;  // that this rank will hold
  std::vector<GemmChoice> gemms;  // of every product of the model, on whichever rank it runs; empty on the CPU
};

// Collective. Throws AgreedError, the same on every rank, when a rank lacks a matrix product (named with types and
// library), when ranks would compute one with different algorithms, or when memory is short: the rank, what it needs by
// kind, what is free and the keys that lower it. Ranks that share a card, or a host's memory, are taken together.
StartCheck check_start(const RankConfig&, const RankPlan&, Backend&, Transport&);

// Its part about algorithms. Collective.
void expect_same_gemms(const std::vector<GemmChoice>& mine, Transport&);

}  // namespace qe

// Trains a few steps on synthetic tokens and returns everything that two runs can be compared by. On the CPU one thread
// a rank; on another backend one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "app/config.h"
#include "app/pipeline_plan.h"
#include "core/runtime/trace.h"
#include "kernels/cpu/device.h"

namespace qe::testing {

struct RunOptions {
  int steps = 6;
  bool trace = true;
  DrainPolicy policy = DrainPolicy::kImmediate;  // of the CPU
  std::uint64_t policy_seed = 0;
  // Called on each rank (world rank) after each step.
  std::function<void(int rank, PipelineRank&, std::uint32_t step)> after_step;
  // A part of a run: steps first_step … steps, after before_steps has put the rank where the run stood. at_boundary is
  // after_step with the transport.
  std::uint32_t first_step = 1;
  std::function<void(PipelineRank&, Transport&)> before_steps;
  std::function<void(PipelineRank&, Transport&, std::uint32_t step)> at_boundary;
  // What a rank (world rank) is built on instead of its operations or its messages (tests/runtime/faults.h); null:
  // those themselves. And the lists that it is given.
  std::function<std::unique_ptr<Ops>(int rank, Ops&, Device&)> wrap_ops;
  std::function<std::unique_ptr<Transport>(int rank, Transport&, Device&)> wrap_transport;
  std::function<void(RankPlan&)> change_plan;
  double timeout_s = 60;  // after which a rank that waits says so
};

struct RunOutcome {
  TraceRecords trace;                  // union over the ranks of the first replica
  std::vector<TraceRecords> replicas;  // the same of each replica
  std::vector<double> losses;          // Σ −log p of each step
  std::vector<OptimizerScalars> scalars;
  std::vector<ExecutionCounts> counts;  // by rank
};

// Tokens of one step, of all replicas: below the vocabulary, a function of the step alone.
struct Batch {
  std::vector<std::int32_t> tokens, targets;
};
Batch synthetic_batch(const Config&, std::uint32_t step);

// The learning rate follows the config's schedule. Throws as make_backend does when execution.backend is not here.
RunOutcome run_training(const Config&, const RunOptions& = {});

using Overrides = std::vector<std::string>;  // as on the command line
inline Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A config from JSON; `overrides` as on the command line.
Config test_config(const Overrides&);

}  // namespace qe::testing

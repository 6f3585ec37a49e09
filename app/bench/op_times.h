// Times every operation of the stage program and the optimizer alone, at the shapes of a config, on its backend.
// Owns no kernel; complete steps are bench's other half (app/commands/bench.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/stage/layer_config.h"
#include "kernels/backend.h"

namespace qe {

struct OpTime {
  std::string name;         // "gemm W fc1"
  std::string shape;        // "[11008, 4096] K=256"
  double microseconds = 0;  // one call: median over samples of a recorded sequence of calls, divided by its length
  std::int64_t bytes = 0;   // least traffic: every input read once, every output written once
  std::int64_t flops = 0;   // of matrix products; 0: none
};

// One layer, the embedding, the head and the optimizer on one layer's parameters. Every call of an operation reuses its
// buffers, so what fits in the device's cache is found there, as it mostly is within a microbatch.
std::vector<OpTime> time_ops(Backend&, const StageConfig&);

}  // namespace qe

// Probe: sees values of a stage as the stream produces them, for traces and fault drills. The stage program calls it
// after each layer's part; outside tests there is none. A probe enqueues, so that streams stay lazy and graphs carry it
// along.
#pragma once

#include <string>

#include "core/device.h"
#include "core/ops_args.h"
#include "core/tensor.h"

namespace qe {

// Categories of semantics.md 1.11 that the stage program produces per microbatch.
enum class ProbeCategory : std::uint8_t {
  kLayerOutput,
  kLoss,  // the cells of all microbatches, [1, M]: only the one named by `microbatch` is new
  kLayerInputGrad,
  kVectorGrad,
  kMatrixGrad,
  kRetainedInput,
  kRetainedOutputGrad,
  kScaleInv,
  kAmaxHistory,
  kScale,
  kMainGrad,  // once a step, before the update clears vectors: the microbatch is null
};

class Probe {
 public:
  virtual ~Probe() = default;
  // `name` is a layer or parameter; `microbatch` is read when the stream gets there.
  virtual void record(Stream&, ProbeCategory, const std::string& name, MicrobatchCell microbatch, const Tensor&) = 0;
};

}  // namespace qe

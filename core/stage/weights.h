// FP32 master parameters of one stage, contiguous in parameter order. Moments belong to the optimizer, gradients to
// GradMemory, cached copies to the blocks.
#pragma once

#include "core/device.h"
#include "core/stage/parameters.h"

namespace qe {

class StageWeights {
 public:
  StageWeights(Device&, ParameterList);

  [[nodiscard]] const ParameterList& parameters() const noexcept { return parameters_; }
  [[nodiscard]] Tensor master(int parameter) const;
  // `count` parameters from `first`, adjacent and of equal width, as one tensor.
  [[nodiscard]] Tensor master_group(int first, int count) const;

  void initialize(Device&, Stream&, std::uint64_t seed) const;

 private:
  ParameterList parameters_;
  ParameterOffsets offsets_;
  Buffer memory_;
};

}  // namespace qe

// Which stage a step of a looped schedule (interleaved 1F1B, zb1p) works on: rounds of G microbatches, chunk after
// chunk. Owns the arithmetic of semantics.md 3.2 only; how steps are mixed is the maker's business.
#pragma once

#include <algorithm>

#include "core/schedule.h"

namespace qe {

class LoopedSteps {
 public:
  // The shape's M must divide into equal rounds (why_not).
  LoopedSteps(const PipelineShape& shape, int rank)
      : shape_(shape), rank_(rank), group_(shape.microbatches / std::max(1, shape.microbatches / shape.ranks)) {}

  [[nodiscard]] int count() const { return shape_.microbatches * shape_.chunks_per_rank; }
  // Forwards before the first backward; each later rank needs slope fewer.
  [[nodiscard]] int warm_up(int slope) const {
    return std::min((shape_.chunks_per_rank - 1) * group_ + slope * (shape_.ranks - 1 - rank_), count());
  }
  [[nodiscard]] int forward_stage(int step) const { return chunk(step) * shape_.ranks + rank_; }
  [[nodiscard]] int backward_stage(int step) const {
    return (shape_.chunks_per_rank - 1 - chunk(step)) * shape_.ranks + rank_;
  }

 private:
  [[nodiscard]] int chunk(int step) const { return step / group_ % shape_.chunks_per_rank; }

  PipelineShape shape_;
  int rank_, group_;
};

}  // namespace qe

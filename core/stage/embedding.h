// Token and position embedding: the head of the first stage's F and the tail of its I.
#pragma once

#include "core/stage/stage_run.h"

namespace qe {

class Embedding {
 public:
  static void declare(ParameterList&, const ModelConfig&);
  // tokens: [M, T] int32 in device memory, at a fixed address.
  Embedding(StageParts&, const std::int32_t* tokens);

  void refresh(Ops&, Stream&) const;                       // the token table's copy in the activation type
  void add_copies(WeightCopies&) const;                    // that copy
  void forward(const StageRun&, const Tensor& out) const;  // [T, h]
  void input_grad(const StageRun&, const Tensor& d_out) const;
  void record_vector_grads(const StageRun&) const;

 private:
  const StageWeights* weights_;
  const GradMemory* gradients_;
  const std::int32_t* tokens_;
  int sequence_length_;
  int token_, position_;
  Buffer cache_memory_;
  Tensor token_copy_;  // [V, h] activation type
};

}  // namespace qe

// Where the gradients of a stage go (design.md 4): one main gradient a parameter and, with copied and arena, one view a
// counted matrix and microbatch. Whether a write is allowed is the ledger's business (core/qeffect/grad_ledger.h).
#pragma once

#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/ids.h"
#include "core/stage/parameters.h"

namespace qe {

class GradMemory {
 public:
  // The head's matrix has no microbatch views in any placement.
  GradMemory(Device&, const StageConfig&, const ParameterList&);

  // Vectors: FP32. Matrices: FP32, or gradients.dtype with accumulate.
  [[nodiscard]] Tensor main(int parameter) const;
  [[nodiscard]] Tensor main_group(int first, int count) const;

  // How often each row of a parameter got a gradient in this step, [1, rows] FP32: behind the vectors' gradients, so
  // that replicas sum it with them. Empty where rows are not counted.
  [[nodiscard]] Tensor touched(int parameter) const;

  // All main gradients of one kind, padding and counts included, [1, n]: what replicas sum.
  [[nodiscard]] Tensor all(ParameterKind) const;

  [[nodiscard]] int views(int parameter) const noexcept;            // M, or 0
  [[nodiscard]] Tensor view(int parameter, MicrobatchIndex) const;  // activation type

  // What the GEMM of a W writes: `count` adjacent matrices from `first` as one tensor.
  struct Destination {
    Tensor d;
    bool accumulate;
  };
  [[nodiscard]] Destination destination(int first, int count, MicrobatchIndex, bool first_write) const;
  // After that GEMM: with `copied`, one copy per matrix from staging into its view.
  void deliver(Device&, Stream&, int first, int count, MicrobatchIndex) const;

  // The place where the contract expects a matrix's gradient of a microbatch.
  [[nodiscard]] Tensor bound(int parameter, MicrobatchIndex) const;
  [[nodiscard]] int copies_per_weight_grad() const noexcept;  // matrix copies of one W of the stage

 private:
  [[nodiscard]] Tensor group(unsigned char* base, const ParameterOffsets&, DType, int first, int count) const;
  [[nodiscard]] bool has_views(int parameter) const noexcept {
    return views_.offset[static_cast<std::size_t>(parameter)] >= 0;
  }
  const ParameterList* parameters_;
  int microbatches_;
  Placement placement_;
  DType matrix_type_;
  DType view_type_;
  ParameterOffsets matrices_;  // all matrices, in the main buffer
  ParameterOffsets vectors_;
  std::vector<std::int64_t> counts_;  // of rows, behind the vectors: offset by parameter, −1 where not counted
  ParameterOffsets views_;            // counted matrices, within one microbatch of the arena
  Buffer matrix_memory_;
  Buffer vector_memory_;
  Buffer arena_;    // [M][views_.total]
  Buffer staging_;  // one GEMM's result
};

}  // namespace qe

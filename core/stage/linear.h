// Linear: one GEMM domain of a layer (qkv, proj, fc1, fc2, head): its cached weight, its operands on the tape, its
// three GEMMs (semantics.md 2.1). What surrounds the GEMMs is the block's business.
#pragma once

#include <string>

#include "core/stage/stage_run.h"

namespace qe {

enum class LinearPrecision : std::uint8_t { kFp8Delayed, kFp8Dynamic, kPlain };  // kPlain: the activation type

// What the four domains of a layer compute in.
LinearPrecision layer_precision(const StageConfig&, int layer);

struct LinearSpec {
  std::string name;          // "layers.3.qkv"
  std::string first_matrix;  // parameter name; `matrices` adjacent ones are used as one weight [out, in]
  int matrices = 1;
  std::string first_bias;  // empty: none; as many adjacent vectors as matrices
  LinearPrecision precision = LinearPrecision::kPlain;
};

class Linear {
 public:
  static constexpr const char* kWeightSlot = ".w";  // ends the name of its weight's scaling slot
  Linear(StageParts&, LinearSpec);

  // Weight caches from the masters; gathers the weight's amax under delayed scaling.
  void refresh(Ops&, Stream&, const Fp8State& forward_state) const;

  // The same caches by parameter, for an update that writes them with the masters. Not under dynamic scaling, where the
  // scale depends on the whole new weight.
  void add_copies(WeightCopies&, const Fp8State& forward_state) const;

  // F. Where the op before writes X [T, in] and how it quantizes; then Y [T, out] = X·Wᵀ (+ residual) (+ bias).
  [[nodiscard]] Operand input(const StageRun&) const;
  [[nodiscard]] Quantizer input_quantizer(const StageRun&) const;
  void forward(const StageRun&, const Tensor& residual, const Tensor& y) const;

  // I. dY into the tape from a plain tensor, adding the bias gradient; or by a fused op through output_grad.
  void quantize_output_grad(const StageRun&, const Tensor& dy) const;
  [[nodiscard]] Operand output_grad(const StageRun&) const;
  [[nodiscard]] Quantizer output_grad_quantizer(const StageRun&) const;
  [[nodiscard]] Tensor bias_grad() const;                    // [1, out] FP32; empty without bias
  void input_grad(const StageRun&, const Tensor& dx) const;  // dX [T, in] = dY·W

  // W over `count` adjacent slots: dW [out, in] = dYᵀ·X into the gradient memory.
  void weight_grad(const StageRun&, int count, MicrobatchIndex first, bool first_write) const;

  // Retained operands and their scales, for the trace.
  void record_input(const StageRun&) const;
  void record_output_grad(const StageRun&) const;
  void record_matrix_grads(const StageRun&, MicrobatchIndex) const;
  void record_vector_grads(const StageRun&) const;

  // The parameter indices of its matrices: first, count.
  [[nodiscard]] int first_matrix() const noexcept { return matrix_; }
  [[nodiscard]] int matrices() const noexcept { return spec_.matrices; }
  [[nodiscard]] const Operand& weight_cache() const noexcept { return weight_; }
  [[nodiscard]] const std::string& name() const noexcept { return spec_.name; }
  [[nodiscard]] bool fp8() const noexcept { return spec_.precision != LinearPrecision::kPlain; }

 private:
  [[nodiscard]] bool dynamic() const noexcept { return spec_.precision == LinearPrecision::kFp8Dynamic; }
  LinearSpec spec_;
  const StageWeights* weights_;
  const GradMemory* gradients_;
  DType activation_;
  DType forward_type_;
  DType backward_type_;
  int matrix_;
  int bias_;  // −1: none
  OperandField x_, dy_;
  FieldId staged_x_{};                                              // dynamic: the BF16 value before its scale is known
  int input_slot_ = -1, weight_slot_ = -1, output_grad_slot_ = -1;  // −1: no delayed scaling
  Buffer cache_memory_;
  Operand weight_;                   // rowwise [out, in]; FP8: columnwise [in, out], scale_inv
  Tensor bias_copy_;                 // [1, out] activation type
  float* dynamic_scales_ = nullptr;  // x, w, dy
};

}  // namespace qe

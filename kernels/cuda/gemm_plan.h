// Matrix products through cuBLASLt: its descriptors and the algorithm, made once for each kind of product and kept.
//
// The algorithm is the one that a tune file has for the product, else the first result of the heuristic, asked with
// fixed alignments and a fixed workspace; never chosen by a clock or by an address here: the same product has the same
// bits on every tape slot, eager and captured, in every process on the same card and library version. Owns no device
// memory; the stream's workspace comes with each call.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/ops_args.h"
#include "kernels/cuda/launch.h"
#include "kernels/gemm_choice.h"

namespace qe::cuda {

// What an algorithm may depend on. Pitches in elements.
struct GemmKey {
  explicit GemmKey(const GemmArgs&);
  auto operator<=>(const GemmKey&) const = default;

  std::int64_t m, n, k;
  DType a, b, d;
  bool a_transposed, b_transposed;
  std::int64_t a_pitch, b_pitch, c_pitch, d_pitch;  // C is what beta adds: the residual, or D itself
  bool has_bias;
  DType bias;
  bool fast_accumulation;
  std::int64_t scale_blocks;  // microbatches along K with scales of their own
};
std::string to_string(const GemmKey&);

class GemmPlans {
 public:
  GemmPlans();
  ~GemmPlans();
  GemmPlans(const GemmPlans&) = delete;
  GemmPlans& operator=(const GemmPlans&) = delete;

  // As use_gemms() of kernels/gemm_chooser.h.
  void use(std::span<const GemmChoice> entries, const std::string& source);

  // Enqueues args.d = epilogue(A·Bᵀ). Pointers on 16 bytes. `workspace` is of one size in all calls and on 256 bytes.
  // Throws DeviceError, naming the product, where cuBLASLt has no algorithm for it.
  void run(const Launch&, const Scratch& workspace, const GemmArgs& args);

  // Makes the plans before they are needed: reads shapes, types, pitches and additions, no memory. `workspace_bytes` as
  // in run(). Throws DeviceError that lists every product that cuBLASLt has no algorithm for.
  void prepare(std::span<const GemmArgs>, std::size_t workspace_bytes);

  // The choices so far, sorted by product.
  [[nodiscard]] std::vector<GemmChoice> choices() const;

  // What the heuristic proposes under the same rules, its first result first; up to 32. `workspace_bytes` as in run().
  // Throws DeviceError, naming the product, where there is none.
  [[nodiscard]] std::vector<std::string> candidates(const GemmArgs&, std::size_t workspace_bytes) const;

 private:
  struct Plan;
  Plan& plan_for(const GemmKey&, std::size_t workspace_bytes);

  cublasLtHandle_t handle_ = nullptr;
  std::map<GemmKey, std::unique_ptr<Plan>> plans_;
  std::map<std::string, std::string> entries_;  // algorithm by product
  std::string source_;                          // of the entries
};

}  // namespace qe::cuda

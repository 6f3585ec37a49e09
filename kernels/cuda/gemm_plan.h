// Matrix products through cuBLASLt: its descriptors and the algorithm, made once for each kind of product and kept.
//
// The algorithm is the first result of the heuristic, asked with fixed alignments and a fixed workspace, never chosen
// by timing or by an address: the same product has the same bits on every tape slot, eager and captured, in every
// process on the same card and library version. Owns no device memory; the stream's workspace comes with each call.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "core/ops_args.h"
#include "kernels/cuda/launch.h"

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

  // Enqueues args.d = epilogue(A·Bᵀ). Pointers on 16 bytes. `workspace` is of one size in all calls and on 256 bytes.
  // Throws DeviceError, naming the product, where cuBLASLt has no algorithm for it.
  void run(const Launch&, const Scratch& workspace, const GemmArgs& args);

  // The choices so far, one line a product, sorted; ranks and runs compare the digest.
  [[nodiscard]] std::string table() const;
  [[nodiscard]] std::uint64_t digest() const;

 private:
  struct Plan;
  Plan& plan_for(const GemmKey&, const Scratch& workspace);

  cublasLtHandle_t handle_ = nullptr;
  std::map<GemmKey, std::unique_ptr<Plan>> plans_;
};

}  // namespace qe::cuda

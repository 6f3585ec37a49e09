// Arguments of the fused operations in core/ops.h. Plain views and scalars; every pointer is device memory.
//
// Names used in shapes: T tokens of a microbatch, L tokens of a sequence, h hidden, f ffn width, V vocabulary padded.
// "adds" means += into FP32; an operand's type decides what a fused op writes (see Operand in core/tensor.h).
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace qe {

// How a fused op quantizes its FP8 result: q = saturate(value · *scale), *amax = max(*amax, |value| before any
// rounding), scale_inv = 1 / *scale rounded to nearest. amax may be null (evaluation). Unused when the result is BF16
// or FP32.
struct Quantizer {
  const float* scale = nullptr;
  float* amax = nullptr;
};

// A value of the step that differs by microbatch is found through *microbatch at run time, never baked into a graph.
using MicrobatchCell = const std::int32_t*;

struct EmbeddingForwardArgs {
  const std::int32_t* tokens;  // [M, T]
  MicrobatchCell microbatch;
  int sequence_length;    // L divides T; positions restart each L
  Tensor token_table;     // [V, h] activation type
  Tensor position_table;  // [>= L, h] FP32
  Tensor out;             // [T, h] activation type: token + position summed in FP32, one rounding
};

struct EmbeddingBackwardArgs {
  const std::int32_t* tokens;  // [M, T]
  MicrobatchCell microbatch;
  int sequence_length;
  Tensor grad_out;       // [T, h] activation type
  Tensor grad_token;     // [V, h] FP32, adds; per microbatch the rows of one id are summed first, in token order
  Tensor grad_position;  // [>= L, h] FP32, adds; sequences in order
  Tensor touched;        // [1, V] FP32: 1 is added for each id of the microbatch; empty: not counted
};

struct LayerNormArgs {
  Tensor x;      // [T, h] activation type
  Tensor gamma;  // [1, h] FP32
  Tensor beta;   // [1, h] FP32
  float epsilon;
  Operand out;  // [T, h]; amax of the FP32 result
  Quantizer quantizer;
  Tensor mean;  // [1, T] FP32
  Tensor rstd;  // [1, T] FP32
};

// dx = rounded(LayerNorm backward + residual), one rounding.
struct LayerNormBackwardArgs {
  Tensor grad_out;  // [T, h] activation type
  Tensor x;         // [T, h] activation type
  Tensor mean, rstd;
  Tensor gamma;       // [1, h] FP32
  Tensor residual;    // [T, h] activation type; empty: none
  Tensor grad_x;      // [T, h] activation type; may be the residual's memory
  Tensor grad_gamma;  // [1, h] FP32, adds
  Tensor grad_beta;   // [1, h] FP32, adds
  // grad_x as quantize would write it, from the stored values, whose amax and column sums they are; empty: nothing.
  Operand quantized;  // [T, h]
  Quantizer quantizer;
  Tensor grad_bias;  // [1, h] FP32, adds
};

struct QuantizeArgs {
  Tensor x;     // [T, n] BF16 or FP32
  Operand out;  // [T, n]; amax of x. For BF16 or FP32 results a plain copy or cast
  Quantizer quantizer;
  Tensor grad_bias;  // [1, n] FP32, adds the column sums of x; empty: none
};

// A weight's caches from its FP32 master: the quantized value is bf16(master), amax is of that value (design.md 3).
struct QuantizeWeightArgs {
  Tensor master;  // [out, in] FP32
  Operand out;
  Quantizer quantizer;
};

// Dynamic scaling (semantics.md 1.10): *scale = qmax / max(amax |x|, 1e-12).
struct DynamicScaleArgs {
  Tensor x;  // BF16 or FP32
  DType format;
  float* scale;
  bool round_to_bf16;  // x is an FP32 master whose bf16 value will be quantized
};

// D[m, n] = epilogue(Σ_k A[m, k] · B[n, k]). FP8 operands are always given K-contiguous (TN form).
// BF16 and FP32 operands may be stored transposed: A as [K, m], B as [K, n].
struct GemmArgs {
  Tensor a;
  Tensor b;
  bool a_transposed = false;
  bool b_transposed = false;
  Tensor a_scale_inv;  // [G, 1] FP32; block g of K uses row g. Empty for BF16 and FP32
  Tensor b_scale_inv;
  Tensor bias;                     // [1, n] activation type; empty: none
  Tensor residual;                 // [m, n] activation type; empty: none
  Tensor d;                        // [m, n] FP32 or BF16
  bool accumulate = false;         // D += result, with D's own rounding; without bias and residual
  bool fast_accumulation = false;  // F only (semantics.md 2.1); the CPU backend always sums in FP32
};

struct GeluArgs {
  Tensor u;     // [T, f] activation type
  Operand out;  // tanh form; amax of the FP32 result
  Quantizer quantizer;
};

struct GeluBackwardArgs {
  Tensor u;         // [T, f]
  Tensor grad_out;  // [T, f]
  Operand grad_u;   // amax of the FP32 result
  Quantizer quantizer;
  Tensor grad_bias;  // [1, f] FP32, adds the column sums of the FP32 result
};

struct AttentionArgs {
  int sequences;        // T / L
  int sequence_length;  // L
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float scale;  // 1 / sqrt(head_dim)
  Tensor q;     // [T, num_heads · head_dim]: column ranges of the fused projection
  Tensor k;     // [T, num_kv_heads · head_dim]
  Tensor v;
  Tensor out;  // [T, num_heads · head_dim]
  Tensor lse;  // [num_heads, T] FP32: log Σ exp of the scaled scores
  // Forward: `out` as quantize would write it, from the stored values, whose amax it is; empty: nothing.
  Operand quantized;  // [T, num_heads · head_dim]
  Quantizer quantizer;
};

struct AttentionBackwardArgs {
  AttentionArgs forward;  // q, k, v, out and lse as the forward left them; without an operand
  Tensor grad_out;        // [T, num_heads · head_dim]
  Tensor grad_q, grad_k, grad_v;
  Tensor delta;  // [num_heads, T] FP32, scratch: Σ out · grad_out of a row
};

struct CrossEntropyArgs {
  Tensor logits;  // [T, V] activation type; columns >= vocab_size never enter the softmax
  std::int64_t vocab_size;
  const std::int32_t* targets;  // [M, T]; -1: the row does not count
  MicrobatchCell microbatch;
  float* loss;                  // [M]; cell *microbatch = Σ −log p of the counted rows
  bool write_gradient;          // overwrite the logits by (softmax − onehot) · *gradient_scale; padding columns 0
  const float* gradient_scale;  // 1 / N
};

enum class AmaxAlgorithm : std::uint8_t { kMax, kMostRecent };

// The delayed-scaling update of one chain of a stage (semantics.md 1.1), all slots in one launch.
struct UpdateScalesArgs {
  float* history = nullptr;  // [slots, history_length]; element 0 of a slot is its current amax
  float* scale = nullptr;    // [slots]
  int slots = 0;             // none: the token alone
  int history_length = 1;
  DType format = DType::kE4M3;
  int margin = 0;
  AmaxAlgorithm algorithm = AmaxAlgorithm::kMax;
  std::uint64_t* token = nullptr;  // += 1; null: none
};

// One parameter in the optimizer's two launches.
struct GradientItem {
  Tensor gradient;  // [rows, cols] FP32 or BF16, the main gradient
  // Views in microbatch order, BF16 (on the CPU FP32 as well), whose FP32 sum is stored in `gradient` first; or empty.
  std::vector<Tensor> microbatch;
  std::int64_t global_index;  // cell of this parameter in the norm's partials
  Tensor touched;  // [1, rows] FP32: rows whose count is 0 are zero, whatever memory says; empty: no such rows
};

struct GradientNormArgs {
  std::vector<GradientItem> items;
  float* partial_squares;  // [global parameters]: fixed-tree Σ g² of each item goes into its cell
  float* partial_bad;      // [global parameters]: 1 when the item has a non-finite element, else 0
};

// Scalars of one optimizer step, in device memory. The host writes the first four, the clip op the rest.
struct OptimizerScalars {
  float learning_rate;
  float step_size;         // learning_rate / (1 − β₁^t), t counting this update too if it is applied
  float root_scale;        // 1 / √(1 − β₂^t)
  std::uint32_t step;      // optimizer steps so far, skipped ones included, this one included: from 1
  float norm;              // global gradient norm before clipping
  float clip;              // factor on every gradient
  std::int32_t skip;       // 1: a gradient is not finite; the update leaves weights and moments
  std::int32_t first_bad;  // global index of the first non-finite parameter, or −1
};

struct ClipArgs {
  const float* partial_squares;  // [count], summed in index order
  const float* partial_bad;
  std::int64_t count;
  float max_norm;  // 0: no clipping
  OptimizerScalars* scalars;
};

struct AdamWItem {
  Tensor master;    // [rows, cols] FP32
  Tensor gradient;  // [rows, cols] FP32 or BF16
  Tensor moment1;   // [rows, cols] FP32 or BF16
  Tensor moment2;
  std::int64_t global_index;
  bool decay;          // matrices only
  bool zero_gradient;  // vectors: cleared in every step, a skipped one too, and so are the counts
  Tensor touched;      // as in GradientItem
  // What forward and backward read instead of the master, as quantize_weight writes it from the new master; empty:
  // nothing. Untouched in a skipped step.
  Operand copy;
  Quantizer quantizer;
};

struct AdamWArgs {
  std::vector<AdamWItem> items;
  const OptimizerScalars* scalars;
  float beta1, beta2, epsilon, weight_decay;
  std::uint64_t seed;  // of the stochastic rounding of BF16 moments
};

}  // namespace qe

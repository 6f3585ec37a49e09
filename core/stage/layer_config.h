// What a model and its numerics are, as every room below app/ sees them. Filled by app/config, already validated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/ops_args.h"

namespace qe {

struct ModelConfig {
  int num_layers = 4;
  int hidden_size = 128;
  int ffn_hidden_size = 512;
  int num_attention_heads = 2;
  int vocab_size = 257;
  int max_position_embeddings = 256;

  [[nodiscard]] int head_dim() const noexcept { return hidden_size / num_attention_heads; }
  [[nodiscard]] int padded_vocab() const noexcept { return (vocab_size + 127) / 128 * 128; }
};

enum class Compute : std::uint8_t { kFp8, kBf16, kFp32 };
enum class HeadPrecision : std::uint8_t { kFp8Delayed, kFp8Dynamic, kBf16 };  // kBf16 under fp32 compute means FP32
enum class ScaleUpdate : std::uint8_t { kMicrobatch, kStep };
// Whose amaxes an update sees: this replica's, or the largest over all replicas.
enum class ReduceAmax : std::uint8_t { kOff, kData };
enum class Fp8Format : std::uint8_t { kHybrid, kE4M3 };

// The delayed recipe (semantics.md section 1).
struct Fp8Recipe {
  Fp8Format format = Fp8Format::kHybrid;
  int amax_history_len = 1024;
  AmaxAlgorithm amax_compute_algo = AmaxAlgorithm::kMax;
  int margin = 0;
  ScaleUpdate scale_update = ScaleUpdate::kMicrobatch;
  ReduceAmax reduce_amax = ReduceAmax::kOff;

  [[nodiscard]] DType forward_type() const noexcept { return DType::kE4M3; }
  [[nodiscard]] DType backward_type() const noexcept {
    return format == Fp8Format::kHybrid ? DType::kE5M2 : DType::kE4M3;
  }
};

enum class Placement : std::uint8_t { kCopied, kArena, kAccumulate };
enum class TapeSlots : std::uint8_t { kPerMicrobatch, kPeak };

struct GradientConfig {
  Placement placement = Placement::kAccumulate;
  DType dtype = DType::kF32;  // of the matrices' main gradient under accumulate; always FP32 otherwise
  int w_group = 1;            // G: microbatches of one W; divides M
};

// Everything the stage program needs to know.
struct StageConfig {
  ModelConfig model;
  Compute compute = Compute::kFp8;
  std::vector<int> bf16_layers;  // global indices, ascending: under fp8 their matrices stay in BF16
  HeadPrecision head = HeadPrecision::kFp8Delayed;
  Fp8Recipe fp8;
  GradientConfig gradients;
  int micro_batch_size = 1;
  int seq_length = 64;
  int microbatches = 4;
  std::uint64_t seed = 1;

  [[nodiscard]] int tokens() const noexcept { return micro_batch_size * seq_length; }  // T
  [[nodiscard]] DType activation_type() const noexcept {
    return compute == Compute::kFp32 ? DType::kF32 : DType::kBF16;
  }
  [[nodiscard]] bool fp8_layer(int layer) const noexcept {
    return compute == Compute::kFp8 && !std::binary_search(bf16_layers.begin(), bf16_layers.end(), layer);
  }
};

}  // namespace qe

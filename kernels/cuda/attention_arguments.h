// What the attention kernels take, and the checks that both directions share.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "core/error.h"
#include "core/ops_args.h"

namespace qe::cuda {

// The rows of one head: a [tokens, head_dim] column range. Pitch in elements, a multiple of 8.
template <class T>
struct HeadRows {
  T* data;
  std::int64_t pitch;
};

template <class T>
HeadRows<T> head_rows(const Tensor& t) {
  return {t.as<T>(), t.row_pitch};
}

struct AttentionShape {
  explicit AttentionShape(const AttentionArgs& args)
      : sequences(args.sequences),
        length(args.sequence_length),
        num_heads(args.num_heads),
        num_kv_heads(args.num_kv_heads),
        group(args.num_heads / args.num_kv_heads),
        scale(args.scale),
        scale_log2(args.scale * std::numbers::log2e_v<float>) {}
  int sequences;
  int length;  // tokens of a sequence
  int num_heads;
  int num_kv_heads;
  int group;  // query heads of a key head
  float scale;
  float scale_log2;  // exp(scale · s) = 2^(scale_log2 · s)
};

inline void check_rows(const Tensor& t, const Shape& shape, const char* name) {
  if (t.dtype != DType::kBF16) {
    throw DeviceError(std::string("attention on CUDA found ") + name + " in " + name_of(t.dtype) +
                      ", but it computes in bf16 only: set precision.compute to bf16 or fp8, or use the cpu backend");
  }
  QE_EXPECTS(t.shape == shape,
             "q, out and their gradients are [tokens, heads · head_dim], keys' [tokens, kv heads · "
             "head_dim]");
  QE_EXPECTS(t.row_pitch % 8 == 0 && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0,
             "attention on CUDA reads and writes rows that begin on 16 bytes");
}
inline Shape query_shape(const AttentionArgs& a) {
  return {std::int64_t{a.sequences} * a.sequence_length, std::int64_t{a.num_heads} * a.head_dim};
}
inline Shape key_shape(const AttentionArgs& a) {
  return {std::int64_t{a.sequences} * a.sequence_length, std::int64_t{a.num_kv_heads} * a.head_dim};
}
inline void check_row_sums(const Tensor& t, const AttentionArgs& a) {
  QE_EXPECTS(t.dtype == DType::kF32 && t.shape == (Shape{a.num_heads, query_shape(a).rows}),
             "lse and delta are [heads, tokens] in f32");
}

// Throws DeviceError for a type or head dimension that has no kernel.
inline void check_attention(const AttentionArgs& a) {
  if (a.head_dim != 64 && a.head_dim != 128) {
    throw DeviceError("attention on CUDA found heads of " + std::to_string(a.head_dim) +
                      ", but has kernels for 64 and 128 only: choose model.num_attention_heads so that "
                      "model.hidden_size divided by it is 64 or 128, or use the cpu backend");
  }
  QE_EXPECTS(a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "key heads must divide the query heads");
  QE_EXPECTS(a.sequence_length > 0 && a.sequences > 0, "attention needs a token");
  QE_EXPECTS(a.scale > 0, "the largest score is the largest scaled one only for a positive scale");
  check_rows(a.q, query_shape(a), "q");
  check_rows(a.k, key_shape(a), "k");
  check_rows(a.v, key_shape(a), "v");
  check_rows(a.out, query_shape(a), "out");
  check_row_sums(a.lse, a);
}

}  // namespace qe::cuda

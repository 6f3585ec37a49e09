// Causal attention of the CPU backend, forward and backward, one (sequence, key head) after the other.
//
// All products run in FP32 on packed panels (tile.h); probabilities and score gradients stay FP32, also when
// activations are BF16: only out, grad_q, grad_k and grad_v are rounded. Query rows are taken in blocks of kPanel and
// see the key panels up to their own; masked probabilities inside it are exact zeros. The query heads of a key head add
// into grad_k and grad_v in head order, queries ascending, in one running FP32 sum.
#include <algorithm>

#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/operand_writer.h"
#include "kernels/cpu/tile.h"

namespace qe::cpu {
namespace {

std::int64_t round_up(std::int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

// Sizes of one head of one sequence; `keys` and `width` are the length and head dimension in whole panels.
struct Sizes {
  explicit Sizes(const AttentionArgs& args)
      : length(args.sequence_length), dim(args.head_dim), keys(round_up(length)), width(round_up(dim)) {}
  std::int64_t length, dim, keys, width;
};

// One head of one sequence of an activation matrix.
Tensor slice(const Tensor& t, const AttentionArgs& args, int sequence, int head) {
  return t.rows(std::int64_t{sequence} * args.sequence_length, args.sequence_length)
      .cols(std::int64_t{head} * args.head_dim, args.head_dim);
}

// to [length, width] FP32, columns beyond the head dimension zero.
QE_CPU_CLONES void unpack_rows(const Tensor& from, const Sizes& s, float* to) {
  for (std::int64_t i = 0; i < s.length; ++i) {
    load_row(from, i, to + i * s.width);
    std::fill(to + i * s.width + s.dim, to + (i + 1) * s.width, 0.0f);
  }
}
// rows [length, width] → panels of columns [width / kPanel][length][kPanel]: summed over tokens.
QE_CPU_CLONES void pack_columns(const float* rows, const Sizes& s, float* to) {
  for (std::int64_t c = 0; c < s.width; c += kPanel) {
    for (std::int64_t i = 0; i < s.length; ++i) {
      for (int j = 0; j < kPanel; ++j) to[c * s.length + i * kPanel + j] = rows[i * s.width + c + j];
    }
  }
}
// rows [length, width] → panels of tokens [keys / kPanel][dim][kPanel]: summed over the head dimension.
QE_CPU_CLONES void pack_tokens(const float* __restrict rows, const Sizes& s, float* __restrict to) {
  std::fill(to + (s.keys - kPanel) * s.dim, to + s.keys * s.dim, 0.0f);
  for (std::int64_t i = 0; i < s.length; ++i) {
    float* panel = to + i / kPanel * kPanel * s.dim + i % kPanel;
    for (std::int64_t d = 0; d < s.dim; ++d) panel[d * kPanel] = rows[i * s.width + d];
  }
}

// A block of query rows [first, first + rows) and the keys it sees.
struct Block {
  std::int64_t first, rows, keys;
};
template <class Body>
void for_each_block(const Sizes& s, const Body& body) {
  for (std::int64_t first = 0; first < s.length; first += kPanel) {
    body(Block{first, std::min<std::int64_t>(kPanel, s.length - first), first + kPanel});
  }
}

// to[rows, block.keys] (row pitch keys) = queries of the block · token panels.
void multiply_tokens(const Block& block, const Sizes& s, const float* queries, const float* panels, float* to) {
  std::fill(to, to + block.rows * s.keys, 0.0f);
  for (std::int64_t key = 0; key < block.keys; key += kPanel) {
    multiply_panel({queries + block.first * s.width, s.width, 1}, block.rows, panels + key * s.dim, s.dim, to + key,
                   s.keys);
  }
}
// to[rows, width] = weights[rows, block.keys] · column panels.
void multiply_columns(const Block& block, const Sizes& s, const float* weights, const float* panels, float* to) {
  std::fill(to, to + block.rows * s.width, 0.0f);
  const std::int64_t depth = std::min(block.keys, s.length);
  for (std::int64_t c = 0; c < s.width; c += kPanel) {
    multiply_panel({weights, s.keys, 1}, block.rows, panels + c * s.length, depth, to + c, s.width);
  }
}
// to[keys, width] += weights[rows, keys]^T · rows of the block, taken from column panels.
void add_transposed(const Block& block, const Sizes& s, const float* weights, const float* panels, float* to) {
  const std::int64_t keys = std::min(block.keys, s.length);
  for (std::int64_t c = 0; c < s.width; c += kPanel) {
    multiply_panel({weights, 1, s.keys}, keys, panels + c * s.length + block.first * kPanel, block.rows, to + c,
                   s.width);
  }
}

// Scores of one row → exp(score · scale − max), zeros behind the row's own key. Returns {max, Σ}.
struct RowSum {
  float max, sum;
};
QE_CPU_INLINE RowSum exponentiate_row(float* __restrict row, std::int64_t visible, std::int64_t keys, float scale) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  std::fill(row + visible, row + keys, -std::numeric_limits<float>::infinity());
  for (std::int64_t j = 0; j < keys; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      row[j + l] *= scale;
      lanes[l] = row[j + l] > lanes[l] ? row[j + l] : lanes[l];
    }
  }
  const float max = *std::max_element(lanes, lanes + kLanes);
  for (std::int64_t j = 0; j < keys; ++j) row[j] = exp(row[j] - max);
  std::fill(row + visible, row + keys, 0.0f);
  return {max, sum_over(visible, [row](std::int64_t j) { return row[j]; })};
}

QE_CPU_CLONES void softmax_block(const Block& block, const Sizes& s, float scale, float* scores, float* sums,
                                 float* lse) {
  for (std::int64_t i = 0; i < block.rows; ++i) {
    const RowSum r = exponentiate_row(scores + i * s.keys, block.first + i + 1, block.keys, scale);
    sums[i] = r.sum;
    lse[block.first + i] = r.max + log(r.sum);
  }
}

QE_CPU_CLONES void store_block(const Block& block, const Sizes& s, float* values, const float* divisors,
                               const Tensor& to) {
  for (std::int64_t i = 0; i < block.rows; ++i) {
    float* row = values + i * s.width;
    if (divisors != nullptr) {
      for (std::int64_t d = 0; d < s.width; ++d) row[d] /= divisors[i];
    }
    store_row(to, block.first + i, row);
  }
}

// scores → probabilities; grad (of the probabilities) → scale · gradient of the scores.
QE_CPU_CLONES void score_gradients(const Block& block, const Sizes& s, float scale, const float* lse,
                                   const float* delta, float* scores, float* grad) {
  for (std::int64_t i = 0; i < block.rows; ++i) {
    const std::int64_t visible = block.first + i + 1;
    float* __restrict p = scores + i * s.keys;
    float* __restrict g = grad + i * s.keys;
    const float row_lse = lse[block.first + i];
    const float row_delta = delta[block.first + i];
    for (std::int64_t j = 0; j < block.keys; ++j) {
      p[j] = exp(std::fma(p[j], scale, -row_lse));
      g[j] = p[j] * (g[j] - row_delta) * scale;
    }
    std::fill(p + visible, p + block.keys, 0.0f);
    std::fill(g + visible, g + block.keys, 0.0f);
  }
}

QE_CPU_CLONES void row_products(const float* a, const float* b, const Sizes& s, float* out) {
  for (std::int64_t i = 0; i < s.length; ++i) out[i] = dot(a + i * s.width, b + i * s.width, s.dim);
}

void check(const AttentionArgs& args) {
  const std::int64_t tokens = std::int64_t{args.sequences} * args.sequence_length;
  const Shape query{tokens, std::int64_t{args.num_heads} * args.head_dim};
  const Shape key{tokens, std::int64_t{args.num_kv_heads} * args.head_dim};
  QE_EXPECTS(args.num_kv_heads > 0 && args.num_heads % args.num_kv_heads == 0, "key heads must divide the query heads");
  QE_EXPECTS(args.q.shape == query && args.out.shape == query, "q and out are [tokens, heads · head_dim]");
  QE_EXPECTS(args.k.shape == key && args.v.shape == key, "k and v are [tokens, kv heads · head_dim]");
}

float* row_of(const Tensor& t, const AttentionArgs& args, int sequence, int head) {
  return t.as<float>() + head * t.row_pitch + std::int64_t{sequence} * args.sequence_length;
}

// Working memory of one (sequence, key head); grad parts are used by the backward only.
struct Work {
  explicit Work(const Sizes& s)
      : rows(make_scratch(s.length * s.width)),
        query(make_scratch(s.length * s.width)),
        key_tokens(make_scratch(s.keys * s.dim)),
        value_columns(make_scratch(s.length * s.width)),
        scores(make_scratch(kPanel * s.keys)),
        result(make_scratch(kPanel * s.width)) {}
  Scratch rows, query, key_tokens, value_columns, scores, result;
};

void forward_head(const AttentionArgs& args, const Sizes& s, Work& w, int sequence, int head) {
  unpack_rows(slice(args.q, args, sequence, head), s, w.query.get());
  const Tensor out = slice(args.out, args, sequence, head);
  float* lse = row_of(args.lse, args, sequence, head);
  for_each_block(s, [&](const Block& block) {
    float sums[kPanel];
    multiply_tokens(block, s, w.query.get(), w.key_tokens.get(), w.scores.get());
    softmax_block(block, s, args.scale, w.scores.get(), sums, lse);
    multiply_columns(block, s, w.scores.get(), w.value_columns.get(), w.result.get());
    store_block(block, s, w.result.get(), sums, out);
  });
}

struct BackwardWork {
  explicit BackwardWork(const Sizes& s)
      : key_columns(make_scratch(s.length * s.width)),
        value_tokens(make_scratch(s.keys * s.dim)),
        query_columns(make_scratch(s.length * s.width)),
        grad_out(make_scratch(s.length * s.width)),
        grad_out_columns(make_scratch(s.length * s.width)),
        score_grads(make_scratch(kPanel * s.keys)),
        grad_key(make_scratch(s.length * s.width)),
        grad_value(make_scratch(s.length * s.width)) {}
  Scratch key_columns, value_tokens, query_columns, grad_out, grad_out_columns, score_grads, grad_key, grad_value;
};

void backward_head(const AttentionBackwardArgs& args, const Sizes& s, Work& w, BackwardWork& b, int sequence,
                   int head) {
  const AttentionArgs& f = args.forward;
  unpack_rows(slice(f.q, f, sequence, head), s, w.query.get());
  pack_columns(w.query.get(), s, b.query_columns.get());
  unpack_rows(slice(args.grad_out, f, sequence, head), s, b.grad_out.get());
  pack_columns(b.grad_out.get(), s, b.grad_out_columns.get());
  unpack_rows(slice(f.out, f, sequence, head), s, w.rows.get());
  float* delta = row_of(args.delta, f, sequence, head);
  row_products(w.rows.get(), b.grad_out.get(), s, delta);
  const float* lse = row_of(f.lse, f, sequence, head);
  const Tensor grad_q = slice(args.grad_q, f, sequence, head);
  for_each_block(s, [&](const Block& block) {
    multiply_tokens(block, s, w.query.get(), w.key_tokens.get(), w.scores.get());
    multiply_tokens(block, s, b.grad_out.get(), b.value_tokens.get(), b.score_grads.get());
    score_gradients(block, s, f.scale, lse, delta, w.scores.get(), b.score_grads.get());
    multiply_columns(block, s, b.score_grads.get(), b.key_columns.get(), w.result.get());
    store_block(block, s, w.result.get(), nullptr, grad_q);
    add_transposed(block, s, b.score_grads.get(), b.query_columns.get(), b.grad_key.get());
    add_transposed(block, s, w.scores.get(), b.grad_out_columns.get(), b.grad_value.get());
  });
}

}  // namespace

void attention_forward(const AttentionArgs& args) {
  check(args);
  const Sizes s(args);
  Work w(s);
  const int group = args.num_heads / args.num_kv_heads;
  for (int sequence = 0; sequence < args.sequences; ++sequence) {
    for (int kv = 0; kv < args.num_kv_heads; ++kv) {
      unpack_rows(slice(args.k, args, sequence, kv), s, w.rows.get());
      pack_tokens(w.rows.get(), s, w.key_tokens.get());
      unpack_rows(slice(args.v, args, sequence, kv), s, w.rows.get());
      pack_columns(w.rows.get(), s, w.value_columns.get());
      for (int i = 0; i < group; ++i) forward_head(args, s, w, sequence, kv * group + i);
    }
  }
  if (!args.quantized.empty()) quantize({args.out, args.quantized, args.quantizer, {}});
}

void attention_backward(const AttentionBackwardArgs& args) {
  const AttentionArgs& f = args.forward;
  check(f);
  QE_EXPECTS(args.grad_out.shape == f.q.shape && args.grad_q.shape == f.q.shape, "grad_out and grad_q have q's shape");
  QE_EXPECTS(args.grad_k.shape == f.k.shape && args.grad_v.shape == f.k.shape, "grad_k and grad_v have k's shape");
  const Sizes s(f);
  Work w(s);
  BackwardWork b(s);
  const int group = f.num_heads / f.num_kv_heads;
  const Block all{0, s.length, s.length};
  for (int sequence = 0; sequence < f.sequences; ++sequence) {
    for (int kv = 0; kv < f.num_kv_heads; ++kv) {
      unpack_rows(slice(f.k, f, sequence, kv), s, w.rows.get());
      pack_tokens(w.rows.get(), s, w.key_tokens.get());
      pack_columns(w.rows.get(), s, b.key_columns.get());
      unpack_rows(slice(f.v, f, sequence, kv), s, w.rows.get());
      pack_tokens(w.rows.get(), s, b.value_tokens.get());
      std::fill(b.grad_key.get(), b.grad_key.get() + s.length * s.width, 0.0f);
      std::fill(b.grad_value.get(), b.grad_value.get() + s.length * s.width, 0.0f);
      for (int i = 0; i < group; ++i) backward_head(args, s, w, b, sequence, kv * group + i);
      store_block(all, s, b.grad_key.get(), nullptr, slice(args.grad_k, f, sequence, kv));
      store_block(all, s, b.grad_value.get(), nullptr, slice(args.grad_v, f, sequence, kv));
    }
  }
}

}  // namespace qe::cpu

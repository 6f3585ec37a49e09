// Softmax cross-entropy over the logits of a microbatch, and its gradient in the logits' own memory.
// Whatever padding columns hold enters neither maximum nor sum.
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/operand_writer.h"

namespace qe::cpu {
namespace {

// NaN is skipped here; it comes back through the exponentials.
QE_CPU_INLINE float max_of(const float* values, std::int64_t n) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = -std::numeric_limits<float>::infinity();
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
  }
  for (int j = 0; i + j < n; ++j) lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
  float m = lanes[0];
  for (const float lane : lanes) m = lane > m ? lane : m;
  return m;
}

// values = exp(values − maximum); returns their sum.
QE_CPU_INLINE float exponentials(float* values, std::int64_t n, float maximum) {
  for (std::int64_t i = 0; i < n; ++i) values[i] = exp(values[i] - maximum);
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += values[i + j];
  }
  for (int j = 0; i + j < n; ++j) lanes[j] += values[i + j];
  return sum_lanes(lanes);
}

// −log p of the target; leaves the exponentials in `values` and their sum in *sum.
QE_CPU_CLONES float row_loss(float* values, std::int64_t n, std::int32_t target, float* sum) {
  const float target_logit = values[target];
  const float maximum = max_of(values, n);
  *sum = exponentials(values, n, maximum);
  return log(*sum) - (target_logit - maximum);
}

QE_CPU_CLONES void row_gradient(const Tensor& logits, std::int64_t row, float* values, std::int64_t vocabulary,
                                std::int32_t target, float sum, float scale) {
  const float hit = values[target] / sum - 1.0f;
  for (std::int64_t i = 0; i < vocabulary; ++i) values[i] = values[i] / sum * scale;
  values[target] = hit * scale;
  for (std::int64_t i = vocabulary; i < logits.shape.cols; ++i) values[i] = 0.0f;
  store_row(logits, row, values);
}

QE_CPU_CLONES void load(const Tensor& from, std::int64_t row, float* values) { load_row(from, row, values); }
QE_CPU_CLONES void store(const Tensor& to, std::int64_t row, const float* values) { store_row(to, row, values); }

}  // namespace

// p of a column is exp(x − max) / Σ; the gradient (p − onehot) · *gradient_scale is computed in FP32 and rounded once.
void cross_entropy(const CrossEntropyArgs& a) {
  QE_EXPECTS(a.vocab_size > 0 && a.vocab_size <= a.logits.shape.cols, "the vocabulary fits into the logits' columns");
  const std::int32_t* targets = a.targets + *a.microbatch * a.logits.shape.rows;
  const std::vector<float> zeros(static_cast<std::size_t>(a.logits.shape.cols), 0.0f);
  std::vector<float> values(zeros);
  float loss = 0.0f;
  for (std::int64_t row = 0; row < a.logits.shape.rows; ++row) {
    const std::int32_t target = targets[row];
    QE_EXPECTS(target >= -1 && target < a.vocab_size, "a target is a token of the vocabulary or -1");
    if (target < 0) {
      if (a.write_gradient) store(a.logits, row, zeros.data());
      continue;
    }
    float sum = 0.0f;
    load(a.logits, row, values.data());
    loss += row_loss(values.data(), a.vocab_size, target, &sum);
    if (a.write_gradient) row_gradient(a.logits, row, values.data(), a.vocab_size, target, sum, *a.gradient_scale);
  }
  a.loss[*a.microbatch] = loss;
}

}  // namespace qe::cpu

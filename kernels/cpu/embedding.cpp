// Token and learned position embedding. Does not own token checks: ids are checked when the data is read.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/operand_writer.h"

namespace qe::cpu {
namespace {

QE_CPU_CLONES void add_rows(const EmbeddingForwardArgs& a, const std::int32_t* tokens, float* sum, float* position) {
  for (std::int64_t t = 0; t < a.out.shape.rows; ++t) {
    load_row(a.token_table, tokens[t], sum);
    load_row(a.position_table, t % a.sequence_length, position);
    for (std::int64_t c = 0; c < a.out.shape.cols; ++c) sum[c] += position[c];
    store_row(a.out, t, sum);
  }
}

QE_CPU_CLONES void add_to(float* __restrict to, const float* __restrict values, std::int64_t n) {
  for (std::int64_t c = 0; c < n; ++c) to[c] += values[c];
}
QE_CPU_CLONES void load(const Tensor& from, std::int64_t row, float* values) { load_row(from, row, values); }

float* row_of(const Tensor& t, std::int64_t row) { return t.as<float>() + row * t.row_pitch; }

}  // namespace

void embedding_forward(const EmbeddingForwardArgs& a) {
  QE_EXPECTS(a.sequence_length > 0 && a.out.shape.rows % a.sequence_length == 0,
             "a microbatch is a whole number of sequences");
  QE_EXPECTS(a.position_table.shape.rows >= a.sequence_length, "the position table has a row for every position");
  const auto cols = static_cast<std::size_t>(a.out.shape.cols);
  std::vector<float> sum(cols), position(cols);
  add_rows(a, a.tokens + *a.microbatch * a.out.shape.rows, sum.data(), position.data());
}

// Token rows: positions sorted by id, equal ids in token order; an id's rows are summed in FP32, then added once.
// Position rows: the sequences' rows are added in order.
void embedding_backward(const EmbeddingBackwardArgs& a) {
  const std::int64_t tokens = a.grad_out.shape.rows;
  const std::int64_t cols = a.grad_out.shape.cols;
  QE_EXPECTS(a.grad_token.dtype == DType::kF32 && a.grad_position.dtype == DType::kF32,
             "embedding gradients are FP32 main gradients");
  const std::int32_t* ids = a.tokens + *a.microbatch * tokens;
  std::vector<std::int64_t> order(static_cast<std::size_t>(tokens));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [ids](std::int64_t x, std::int64_t y) { return ids[x] < ids[y]; });

  QE_EXPECTS(a.touched.empty() || (a.touched.dtype == DType::kF32 && a.touched.shape.cols == a.grad_token.shape.rows),
             "an FP32 count for every id");
  std::vector<float> values(static_cast<std::size_t>(cols)), sum(static_cast<std::size_t>(cols));
  for (std::size_t first = 0; first < order.size();) {
    const std::int32_t id = ids[order[first]];
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (; first < order.size() && ids[order[first]] == id; ++first) {
      load(a.grad_out, order[first], values.data());
      add_to(sum.data(), values.data(), cols);
    }
    add_to(row_of(a.grad_token, id), sum.data(), cols);
    if (!a.touched.empty()) a.touched.as<float>()[id] += 1.0f;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    load(a.grad_out, t, values.data());
    add_to(row_of(a.grad_position, t % a.sequence_length), values.data(), cols);
  }
}

}  // namespace qe::cpu

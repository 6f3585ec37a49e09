// Matrices into GEMM operands: activations and output gradients, weights, plain casts.
// The codes, their transpose, amax and scale_inv are OperandWriter's; slots and their update are scaling.cpp's.
#include <vector>

#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/operand_writer.h"

namespace qe::cpu {
namespace {

QE_CPU_CLONES void quantize_rows(const Tensor& x, OperandWriter* writer, float* column_sums, float* values) {
  for (std::int64_t row = 0; row < x.shape.rows; ++row) {
    load_row(x, row, values);
    if (writer != nullptr) writer->write_row(row, values);
    if (column_sums == nullptr) continue;
    for (std::int64_t c = 0; c < x.shape.cols; ++c) column_sums[c] += values[c];
  }
}

QE_CPU_CLONES void quantize_weight_rows(const Tensor& master, bool round, OperandWriter& writer, float* values) {
  for (std::int64_t row = 0; row < master.shape.rows; ++row) {
    load_row(master, row, values);
    if (round) {
      for (std::int64_t c = 0; c < master.shape.cols; ++c) values[c] = round_bf16(values[c]);
    }
    writer.write_row(row, values);
  }
}

QE_CPU_CLONES void cast_rows(const Tensor& from, const Tensor& to, float* values) {
  for (std::int64_t row = 0; row < from.shape.rows; ++row) {
    load_row(from, row, values);
    store_row(to, row, values);
  }
}

bool is_wide(DType type) { return type == DType::kF32 || type == DType::kBF16; }

std::vector<float> row_buffer(const Tensor& t) { return std::vector<float>(static_cast<std::size_t>(t.shape.cols)); }

void require_same_shape(const Tensor& x, const OperandWriter& writer) {
  QE_EXPECTS(writer.rows() == x.shape.rows && writer.cols() == x.shape.cols,
             "a quantized operand has the shape of its source");
}

}  // namespace

// Column sums start at zero, run over the rows in order and are added to grad_bias once.
void quantize(const QuantizeArgs& a) {
  QE_EXPECTS(is_wide(a.x.dtype), "quantize takes an FP32 or BF16 matrix");
  std::vector<float> values = row_buffer(a.x);
  std::vector<float> sums;
  if (!a.grad_bias.empty()) sums.assign(values.size(), 0.0f);
  float* column_sums = sums.empty() ? nullptr : sums.data();
  if (a.out.rowwise.empty() && a.out.columnwise.empty()) {  // the column sums alone
    quantize_rows(a.x, nullptr, column_sums, values.data());
  } else {
    OperandWriter writer(a.out, a.quantizer);
    require_same_shape(a.x, writer);
    quantize_rows(a.x, &writer, column_sums, values.data());
    writer.finish();
  }
  for (std::size_t c = 0; c < sums.size(); ++c) a.grad_bias.as<float>()[c] += sums[c];
}

void quantize_weight(const QuantizeWeightArgs& a) {
  QE_EXPECTS(a.master.dtype == DType::kF32, "quantize_weight takes an FP32 master");
  std::vector<float> values = row_buffer(a.master);
  OperandWriter writer(a.out, a.quantizer);
  require_same_shape(a.master, writer);
  const DType type = a.out.rowwise.empty() ? a.out.columnwise.dtype : a.out.rowwise.dtype;
  quantize_weight_rows(a.master, type != DType::kF32, writer, values.data());
  writer.finish();
}

void cast(const Tensor& from, const Tensor& to) {
  QE_EXPECTS(from.dtype == DType::kF32 && is_wide(to.dtype) && from.shape == to.shape,
             "cast takes an FP32 matrix and an FP32 or BF16 one of its shape");
  std::vector<float> values = row_buffer(from);
  cast_rows(from, to, values.data());
}

}  // namespace qe::cpu

// GELU (tanh form) of the CPU backend, forward and backward, with the fused quantize tail and bias gradient.
//   gelu(u) = u/2 · (1 + tanh z),  z = sqrt(2/pi) · (u + 0.044715 u³)
#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/operand_writer.h"
#include "kernels/cpu/tile.h"

namespace qe::cpu {
namespace {

constexpr float kLinear = 0.797884561f;  // sqrt(2/pi)
constexpr float kCubic = 0.0356774081f;  // sqrt(2/pi) · 0.044715
constexpr float kCubicDerivative = 3.0f * kCubic;

QE_CPU_INLINE float tanh_of_z(float u) noexcept { return tanh(u * std::fma(kCubic, u * u, kLinear)); }

QE_CPU_INLINE float gelu(float u) noexcept {
  const float half = 0.5f * u;
  return std::fma(half, tanh_of_z(u), half);
}
// d gelu / du = (1 + tanh z)/2 + u/2 · (1 − tanh² z) · dz/du
QE_CPU_INLINE float gelu_derivative(float u) noexcept {
  const float t = tanh_of_z(u);
  const float dz = std::fma(kCubicDerivative, u * u, kLinear);
  return std::fma(0.5f * u * std::fma(-t, t, 1.0f), dz, std::fma(0.5f, t, 0.5f));
}

QE_CPU_CLONES void forward_rows(const Tensor& u, OperandWriter& writer, float* __restrict values) {
  const std::int64_t f = u.shape.cols;
  for (std::int64_t row = 0; row < u.shape.rows; ++row) {
    load_row(u, row, values);
    for (std::int64_t i = 0; i < f; ++i) values[i] = gelu(values[i]);
    writer.write_row(row, values);
  }
}

QE_CPU_CLONES void backward_rows(const GeluBackwardArgs& args, OperandWriter& writer, float* __restrict u,
                                 float* __restrict grad, float* __restrict column_sums) {
  const std::int64_t f = args.u.shape.cols;
  for (std::int64_t row = 0; row < args.u.shape.rows; ++row) {
    load_row(args.u, row, u);
    load_row(args.grad_out, row, grad);
    for (std::int64_t i = 0; i < f; ++i) grad[i] *= gelu_derivative(u[i]);
    for (std::int64_t i = 0; i < f; ++i) column_sums[i] += grad[i];
    writer.write_row(row, grad);
  }
  for (std::int64_t i = 0; i < f; ++i) args.grad_bias.as<float>()[i] += column_sums[i];
}

}  // namespace

void gelu_quantize(const GeluArgs& args) {
  OperandWriter writer(args.out, args.quantizer);
  QE_EXPECTS(writer.rows() == args.u.shape.rows && writer.cols() == args.u.shape.cols, "out has the shape of u");
  const Scratch values = make_scratch(args.u.shape.cols);
  forward_rows(args.u, writer, values.get());
  writer.finish();
}

void gelu_backward_quantize_bias(const GeluBackwardArgs& args) {
  OperandWriter writer(args.grad_u, args.quantizer);
  QE_EXPECTS(writer.rows() == args.u.shape.rows && writer.cols() == args.u.shape.cols, "grad_u has the shape of u");
  QE_EXPECTS(args.grad_out.shape == args.u.shape, "grad_out has the shape of u");
  const std::int64_t f = args.u.shape.cols;
  const Scratch scratch = make_scratch(3 * f);
  float* column_sums = scratch.get() + 2 * f;
  std::fill(column_sums, column_sums + f, 0.0f);
  backward_rows(args, writer, scratch.get(), scratch.get() + f, column_sums);
  writer.finish();
}

}  // namespace qe::cpu

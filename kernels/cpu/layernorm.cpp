// LayerNorm of the CPU backend: forward with the fused quantize tail, backward with the residual added, then quantized.
// Row sums use the lanes of math.h; column sums (gamma, beta) add rows ascending and reach the gradient in one
// addition.
#include "core/error.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/operand_writer.h"
#include "kernels/cpu/tile.h"

namespace qe::cpu {
namespace {

QE_CPU_CLONES void forward_rows(const LayerNormArgs& args, OperandWriter& writer, float* x, float* y) {
  const std::int64_t h = args.x.shape.cols;
  const float count = static_cast<float>(h);
  const float* gamma = args.gamma.as<float>();
  const float* beta = args.beta.as<float>();
  for (std::int64_t row = 0; row < args.x.shape.rows; ++row) {
    load_row(args.x, row, x);
    const float mean = sum_over(h, [x](std::int64_t i) { return x[i]; }) / count;
    for (std::int64_t i = 0; i < h; ++i) x[i] -= mean;
    const float variance = dot(x, x, h) / count;
    const float r = rsqrt(variance + args.epsilon);
    for (std::int64_t i = 0; i < h; ++i) y[i] = std::fma(x[i] * r, gamma[i], beta[i]);
    args.mean.as<float>()[row] = mean;
    args.rstd.as<float>()[row] = r;
    writer.write_row(row, y);
  }
}

// Working rows of one backward call, each h long.
struct BackwardRows {
  float* __restrict normalized;  // (x − mean) · rstd
  float* __restrict grad;        // dy, then dy · gamma
  float* __restrict residual;
  float* __restrict sum_gamma;  // Σ over rows of dy · normalized
  float* __restrict sum_beta;   // Σ over rows of dy
};

QE_CPU_CLONES void backward_rows(const LayerNormBackwardArgs& args, const BackwardRows& w) {
  const std::int64_t h = args.x.shape.cols;
  const float count = static_cast<float>(h);
  const float* gamma = args.gamma.as<float>();
  for (std::int64_t row = 0; row < args.x.shape.rows; ++row) {
    const float mean = args.mean.as<float>()[row];
    const float r = args.rstd.as<float>()[row];
    load_row(args.x, row, w.normalized);
    load_row(args.grad_out, row, w.grad);
    for (std::int64_t i = 0; i < h; ++i) {
      w.normalized[i] = (w.normalized[i] - mean) * r;
      w.sum_gamma[i] = std::fma(w.grad[i], w.normalized[i], w.sum_gamma[i]);
      w.sum_beta[i] += w.grad[i];
      w.grad[i] *= gamma[i];
    }
    const float mean_grad = sum_over(h, [&w](std::int64_t i) { return w.grad[i]; }) / count;
    const float mean_product = dot(w.grad, w.normalized, h) / count;
    for (std::int64_t i = 0; i < h; ++i) {
      w.grad[i] = r * std::fma(-mean_product, w.normalized[i], w.grad[i] - mean_grad);
    }
    if (!args.residual.empty()) {
      load_row(args.residual, row, w.residual);
      for (std::int64_t i = 0; i < h; ++i) w.grad[i] += w.residual[i];
    }
    store_row(args.grad_x, row, w.grad);
  }
  for (std::int64_t i = 0; i < h; ++i) args.grad_gamma.as<float>()[i] += w.sum_gamma[i];
  for (std::int64_t i = 0; i < h; ++i) args.grad_beta.as<float>()[i] += w.sum_beta[i];
}

}  // namespace

void layernorm_quantize(const LayerNormArgs& args) {
  OperandWriter writer(args.out, args.quantizer);
  QE_EXPECTS(writer.rows() == args.x.shape.rows && writer.cols() == args.x.shape.cols, "out has the shape of x");
  const std::int64_t h = args.x.shape.cols;
  const Scratch scratch = make_scratch(2 * h);
  forward_rows(args, writer, scratch.get(), scratch.get() + h);
  writer.finish();
}

void layernorm_backward_residual(const LayerNormBackwardArgs& args) {
  QE_EXPECTS(args.grad_out.shape == args.x.shape && args.grad_x.shape == args.x.shape, "gradients have the shape of x");
  QE_EXPECTS(args.residual.empty() || args.residual.shape == args.x.shape, "the residual has the shape of x");
  const std::int64_t h = args.x.shape.cols;
  const Scratch scratch = make_scratch(5 * h);
  float* base = scratch.get();
  const BackwardRows rows{base, base + h, base + 2 * h, base + 3 * h, base + 4 * h};
  std::fill(rows.sum_gamma, rows.sum_gamma + 2 * h, 0.0f);
  backward_rows(args, rows);
  if (!args.quantized.empty() || !args.grad_bias.empty()) {
    quantize({args.grad_x, args.quantized, args.quantizer, args.grad_bias});
  }
}

}  // namespace qe::cpu

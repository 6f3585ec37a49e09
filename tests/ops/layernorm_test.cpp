// LayerNorm forward and backward against a double-precision oracle.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "tests/ops/ops_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {

constexpr double kEpsilon = 1e-5;

struct Oracle {
  std::vector<double> y, mean, rstd;
};
Oracle normalize(const std::vector<float>& x, const std::vector<float>& gamma, const std::vector<float>& beta) {
  const std::size_t h = gamma.size();
  Oracle o;
  for (std::size_t row = 0; row < x.size() / h; ++row) {
    const float* v = x.data() + row * h;
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < h; ++i) mean += v[i] / static_cast<double>(h);
    for (std::size_t i = 0; i < h; ++i) variance += (v[i] - mean) * (v[i] - mean) / static_cast<double>(h);
    o.mean.push_back(mean);
    o.rstd.push_back(1 / std::sqrt(variance + kEpsilon));
    for (std::size_t i = 0; i < h; ++i) o.y.push_back((v[i] - mean) * o.rstd.back() * gamma[i] + beta[i]);
  }
  return o;
}

struct Case {
  DType activation, result;
  std::int64_t rows, cols, pad;
};

void require_forward(DeviceArrays& d, const Case& c, float offset) {
  INFO(name_of(c.activation) << " to " << name_of(c.result) << " " << c.rows << "x" << c.cols << " offset " << offset);
  std::vector<float> x = uniform(c.rows * c.cols, 1, -3.0f, 3.0f);
  for (float& v : x) v += offset;
  x = stored_as(c.activation, x);
  const std::vector<float> gamma = uniform(c.cols, 2, 0.5f, 1.5f), beta = uniform(c.cols, 3);
  OperandUnderTest out(d, c.result, c.rows, c.cols, 37.5f, c.pad == 0 ? 0.25f : 100.0f, c.pad);
  LayerNormArgs args{d.matrix(c.activation, c.rows, c.cols, x, c.pad == 0 ? 0 : c.cols + c.pad),
                     d.matrix(DType::kF32, 1, c.cols, gamma),
                     d.matrix(DType::kF32, 1, c.cols, beta),
                     static_cast<float>(kEpsilon),
                     out.operand,
                     out.quantizer,
                     d.matrix(DType::kF32, 1, c.rows, filled(c.rows, kNaN)),
                     d.matrix(DType::kF32, 1, c.rows, filled(c.rows, kNaN))};
  d.ops().layernorm_quantize(d.stream(), args);
  const Oracle want = normalize(x, gamma, beta);
  // FP32 sums of h values: a few units of the last place, and the mean's error relative to the deviation.
  const double tolerance = 4e-6 * (1 + std::abs(offset));
  out.require(d, want.y, tolerance, 4e-6);
  require_close(d.get(args.mean), want.mean, 1e-6, 1e-6);
  require_close(d.get(args.rstd), want.rstd, 0, tolerance);
  if (c.pad != 0) REQUIRE(d.padding_intact(out.operand.rowwise));
  if (c.pad != 0 && is_fp8(c.result)) REQUIRE(d.padding_intact(out.operand.columnwise));
}

struct Gradients {
  std::vector<double> x, gamma, beta;
};
Gradients differentiate(const std::vector<float>& dy, const std::vector<float>& x, const std::vector<float>& gamma,
                        const std::vector<float>& residual) {
  const std::size_t h = gamma.size();
  const Oracle o = normalize(x, gamma, gamma);
  Gradients g{{}, std::vector<double>(h, 0), std::vector<double>(h, 0)};
  for (std::size_t at = 0; at < x.size(); at += h) {
    const double mean = o.mean[at / h], rstd = o.rstd[at / h];
    double s1 = 0, s2 = 0;
    for (std::size_t i = 0; i < h; ++i) {
      const double xhat = (x[at + i] - mean) * rstd;
      s1 += dy[at + i] * double{gamma[i]} / static_cast<double>(h);
      s2 += dy[at + i] * double{gamma[i]} * xhat / static_cast<double>(h);
      g.gamma[i] += dy[at + i] * xhat;
      g.beta[i] += dy[at + i];
    }
    for (std::size_t i = 0; i < h; ++i) {
      const double xhat = (x[at + i] - mean) * rstd;
      const double r = residual.empty() ? 0.0 : residual[at + i];
      g.x.push_back(rstd * (dy[at + i] * double{gamma[i]} - s1 - xhat * s2) + r);
    }
  }
  return g;
}

void require_backward(DeviceArrays& d, const Case& c, bool with_residual, bool in_place) {
  INFO(name_of(c.activation) << " " << c.rows << "x" << c.cols << " residual " << with_residual << in_place);
  const std::int64_t n = c.rows * c.cols, pitch = c.pad == 0 ? 0 : c.cols + c.pad;
  const auto activation = [&](std::uint64_t seed) { return stored_as(c.activation, uniform(n, seed, -2.0f, 2.0f)); };
  const std::vector<float> x = activation(4), dy = activation(5), gamma = uniform(c.cols, 6, 0.5f, 1.5f);
  const std::vector<float> residual = with_residual ? activation(7) : std::vector<float>{};
  const std::vector<float> before = uniform(c.cols, 8);
  const Oracle o = normalize(x, gamma, gamma);
  LayerNormBackwardArgs args;
  args.x = d.matrix(c.activation, c.rows, c.cols, x, pitch);
  args.grad_out = d.matrix(c.activation, c.rows, c.cols, dy, pitch);
  args.mean = d.matrix(DType::kF32, 1, c.rows, {o.mean.begin(), o.mean.end()});
  args.rstd = d.matrix(DType::kF32, 1, c.rows, {o.rstd.begin(), o.rstd.end()});
  args.gamma = d.matrix(DType::kF32, 1, c.cols, gamma);
  if (with_residual) args.residual = d.matrix(c.activation, c.rows, c.cols, residual, pitch);
  args.grad_x = in_place ? args.residual : d.matrix(c.activation, c.rows, c.cols, filled(n, kNaN), pitch);
  args.grad_gamma = d.matrix(DType::kF32, 1, c.cols, before);
  args.grad_beta = d.matrix(DType::kF32, 1, c.cols, before);
  d.ops().layernorm_backward_residual(d.stream(), args);
  Gradients want = differentiate(dy, x, gamma, residual);
  for (std::size_t i = 0; i < before.size(); ++i) {
    want.gamma[i] += before[i];
    want.beta[i] += before[i];
  }
  // mean and rstd arrive rounded to FP32; sums of h (rows) terms of size 4.
  require_close(d.get(args.grad_x), want.x, 1e-5, 1e-5 + rounding_of(c.activation));
  require_close(d.get(args.grad_gamma), want.gamma, 1e-6 * static_cast<double>(c.rows), 1e-5);
  require_close(d.get(args.grad_beta), want.beta, 1e-6 * static_cast<double>(c.rows), 1e-5);
  if (pitch != 0) REQUIRE(d.padding_intact(args.grad_x));
}

// What one backward leaves, with the operand of its result.
struct Written {
  LayerNormBackwardArgs args;
  OperandUnderTest out;
};
// Fused, against the operation without an operand and quantize behind it. Exact: x is its mean and a row of dy adds up
// to zero, so that dx is dy + residual, small integers, and column sums have one value in any order.
void require_operand(DeviceArrays& d, const Case& c, bool with_residual, bool exact) {
  INFO(name_of(c.activation) << " to " << name_of(c.result) << " " << c.rows << "x" << c.cols << " padded by " << c.pad
                             << " residual " << with_residual << " exact " << exact);
  const std::int64_t n = c.rows * c.cols, pitch = c.pad == 0 ? 0 : c.cols + c.pad;
  const auto activation = [&](std::uint64_t seed) {
    return exact ? integers(n, seed, 8) : stored_as(c.activation, uniform(n, seed, -2.0f, 2.0f));
  };
  std::vector<float> x = activation(4), dy = activation(5), gamma = uniform(c.cols, 6, 0.5f, 1.5f);
  std::vector<float> mean(static_cast<std::size_t>(c.rows)), rstd = filled(c.rows, 1.0f);
  if (exact) {
    x = filled(n, 0.0f);
    gamma = filled(c.cols, 1.0f);
    for (std::size_t at = 0; at < dy.size(); ++at) {
      const std::size_t col = at % gamma.size();
      if (col % 2 == 1) dy[at] = -dy[at - 1];
      if (col % 2 == 0 && col + 1 == gamma.size()) dy[at] = 0.0f;
    }
  } else {
    const Oracle o = normalize(x, gamma, gamma);
    mean.assign(o.mean.begin(), o.mean.end());
    rstd.assign(o.rstd.begin(), o.rstd.end());
  }
  const std::vector<float> residual = with_residual ? activation(7) : std::vector<float>{};
  const auto run = [&](bool fused, float amax) {
    Written w{{}, OperandUnderTest(d, c.result, c.rows, c.cols, 600.0f, amax, c.pad)};
    LayerNormBackwardArgs& a = w.args;
    a.x = d.matrix(c.activation, c.rows, c.cols, x, pitch);
    a.grad_out = d.matrix(c.activation, c.rows, c.cols, dy, pitch);
    a.mean = d.matrix(DType::kF32, 1, c.rows, mean);
    a.rstd = d.matrix(DType::kF32, 1, c.rows, rstd);
    a.gamma = d.matrix(DType::kF32, 1, c.cols, gamma);
    if (with_residual) a.residual = d.matrix(c.activation, c.rows, c.cols, residual, pitch);
    a.grad_x = with_residual ? a.residual : d.matrix(c.activation, c.rows, c.cols, filled(n, kNaN), pitch);
    a.grad_gamma = d.matrix(DType::kF32, 1, c.cols, integers(c.cols, 8, 4));
    a.grad_beta = d.matrix(DType::kF32, 1, c.cols, integers(c.cols, 9, 4));
    const Tensor grad_bias = d.matrix(DType::kF32, 1, c.cols, integers(c.cols, 10, 4));
    if (fused) {
      a.quantized = w.out.operand;
      a.quantizer = w.out.quantizer;
      a.grad_bias = grad_bias;
    }
    d.ops().layernorm_backward_residual(d.stream(), a);
    a.grad_bias = grad_bias;
    if (!fused) d.ops().quantize(d.stream(), {a.grad_x, w.out.operand, w.out.quantizer, grad_bias});
    return w;
  };
  for (const float amax : {0.0f, 100.0f}) {
    const Written got = run(true, amax), want = run(false, amax);
    REQUIRE(d.get(got.args.grad_x) == d.get(want.args.grad_x));
    REQUIRE(d.get(got.args.grad_gamma) == d.get(want.args.grad_gamma));
    REQUIRE(d.get(got.args.grad_beta) == d.get(want.args.grad_beta));
    const std::vector<float> bias = d.get(want.args.grad_bias);
    if (exact) REQUIRE(d.get(got.args.grad_bias) == bias);
    require_close(d.get(got.args.grad_bias), {bias.begin(), bias.end()}, 1e-6 * static_cast<double>(c.rows), 0);
    REQUIRE(d.codes(got.out.operand.rowwise) == d.codes(want.out.operand.rowwise));
    REQUIRE(d.codes(got.out.operand.columnwise) == d.codes(want.out.operand.columnwise));
    REQUIRE(d.get(got.out.operand.scale_inv) == d.get(want.out.operand.scale_inv));
    REQUIRE(d.read(got.out.amax, 1) == d.read(want.out.amax, 1));
    if (c.pad == 0) continue;
    REQUIRE(d.padding_intact(got.args.grad_x));
    REQUIRE(d.padding_intact(got.out.operand.rowwise));
    REQUIRE(d.padding_intact(got.out.operand.columnwise));
  }
}

// dx = rstd · (dy·gamma − mean_grad) of zeros x, of ones gamma, and rows whose mean is 0.
LayerNormBackwardArgs plain_backward(DeviceArrays& d, std::int64_t rows, std::int64_t cols,
                                     const std::vector<float>& dy) {
  LayerNormBackwardArgs a;
  a.x = d.matrix(DType::kBF16, rows, cols);
  a.grad_out = d.matrix(DType::kBF16, rows, cols, dy);
  a.mean = d.matrix(DType::kF32, 1, rows);
  a.rstd = d.matrix(DType::kF32, 1, rows, filled(rows, 1.0f));
  a.gamma = d.matrix(DType::kF32, 1, cols, filled(cols, 1.0f));
  a.grad_x = d.matrix(DType::kBF16, rows, cols, filled(rows * cols, kNaN));
  a.grad_gamma = d.matrix(DType::kF32, 1, cols);
  a.grad_beta = d.matrix(DType::kF32, 1, cols);
  a.grad_bias = d.matrix(DType::kF32, 1, cols);
  return a;
}

}  // namespace

TEST_CASE("layernorm_quantize matches the oracle in every result type") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType result : {DType::kE4M3, DType::kE5M2, DType::kBF16}) {
      require_forward(d, {DType::kBF16, result, 48, 128, 0}, 0.0f);
      require_forward(d, {DType::kBF16, result, 16, 80, 16}, 0.0f);
    }
  });
}
TEST_CASE("layernorm takes FP32 activations and any size") {
  on_every_backend([](DeviceArrays& d) {
    for (const Case& c : {Case{DType::kF32, DType::kF32, 48, 128, 0}, Case{DType::kF32, DType::kF32, 1, 1, 3},
                          Case{DType::kF32, DType::kF32, 7, 45, 5}, Case{DType::kBF16, DType::kE4M3, 11, 45, 5},
                          Case{DType::kF32, DType::kE5M2, 33, 1000, 0}}) {
      require_forward(d, c, 0.0f);
    }
  });
}
TEST_CASE("layernorm takes rows of every width up to 16384 columns") {
  on_every_backend([](DeviceArrays& d) {
    for (const std::int64_t cols : {512, 2056, 4096, 5120, 8192, 16384}) {
      require_forward(d, {DType::kBF16, DType::kE4M3, 48, cols, 0}, 0.0f);
      require_backward(d, {DType::kBF16, DType::kBF16, 48, cols, 0}, true, true);
    }
    require_forward(d, {DType::kF32, DType::kF32, 5, 16383, 0}, 0.0f);
    require_backward(d, {DType::kF32, DType::kF32, 5, 16383, 0}, true, false);
  });
}
TEST_CASE("layernorm takes few rows in several segments, of any type and pitch") {
  on_every_backend([](DeviceArrays& d) {
    require_forward(d, {DType::kBF16, DType::kE4M3, 21, 4093, 3}, 0.0f);
    require_backward(d, {DType::kBF16, DType::kBF16, 21, 4093, 3}, true, true);
    require_forward(d, {DType::kBF16, DType::kBF16, 17, 8000, 8}, 0.0f);
    require_backward(d, {DType::kF32, DType::kF32, 17, 4096, 0}, true, false);
    require_backward(d, {DType::kF32, DType::kF32, 5, 4093, 3}, false, false);
  });
}
TEST_CASE("layernorm takes many rows") {
  on_every_backend([](DeviceArrays& d) {
    for (const Case& c : {Case{DType::kBF16, DType::kE4M3, 528, 264, 0}, Case{DType::kBF16, DType::kE5M2, 530, 261, 3},
                          Case{DType::kF32, DType::kF32, 515, 264, 8}}) {
      require_forward(d, c, 0.0f);
      require_backward(d, c, true, false);
    }
  });
}
TEST_CASE("layernorm holds at the shapes of a step", "[slow]") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{256, 4096}, Shape{520, 8192}, Shape{1000, 2048}}) {
      require_forward(d, {DType::kBF16, DType::kE4M3, shape.rows, shape.cols, 0}, 0.0f);
      require_backward(d, {DType::kBF16, DType::kBF16, shape.rows, shape.cols, 0}, true, true);
    }
  });
}
TEST_CASE("layernorm keeps its precision far from zero: two passes") {
  on_every_backend([](DeviceArrays& d) {
    require_forward(d, {DType::kF32, DType::kF32, 16, 128, 0}, 300.0f);
    require_forward(d, {DType::kF32, DType::kF32, 16, 4096, 0}, 300.0f);
  });
}

TEST_CASE("layernorm_backward_residual matches the oracle and adds to the vector gradients") {
  on_every_backend([](DeviceArrays& d) {
    for (const bool in_place : {false, true}) {
      require_backward(d, {DType::kBF16, DType::kBF16, 48, 128, 0}, true, in_place);
      require_backward(d, {DType::kBF16, DType::kBF16, 16, 80, 16}, true, in_place);
    }
    require_backward(d, {DType::kBF16, DType::kBF16, 48, 128, 0}, false, false);
  });
}
TEST_CASE("layernorm backward takes FP32 activations and any size") {
  on_every_backend([](DeviceArrays& d) {
    require_backward(d, {DType::kF32, DType::kF32, 48, 128, 0}, true, false);
    require_backward(d, {DType::kF32, DType::kF32, 5, 45, 7}, true, true);
    require_backward(d, {DType::kBF16, DType::kBF16, 33, 1001, 0}, true, false);
  });
}

TEST_CASE("layernorm backward writes the operand that quantize makes of dx, bit by bit") {
  on_every_backend([](DeviceArrays& d) {
    // Few rows and many, one segment of columns and several, the last cut; more than a block holds; then what a kernel
    // may leave to quantize: rows that are not whole sixteens, pitches that are not, FP32.
    for (const Case& c :
         {Case{DType::kBF16, DType::kE5M2, 48, 64, 0}, Case{DType::kBF16, DType::kE5M2, 48, 1040, 0},
          Case{DType::kBF16, DType::kE4M3, 256, 512, 0}, Case{DType::kBF16, DType::kE5M2, 32, 4096, 0},
          Case{DType::kBF16, DType::kE5M2, 48, 272, 16}, Case{DType::kBF16, DType::kE5M2, 528, 264, 0},
          Case{DType::kBF16, DType::kE5M2, 560, 528, 16}, Case{DType::kBF16, DType::kE5M2, 32, 10240, 0},
          Case{DType::kBF16, DType::kE5M2, 530, 256, 0}, Case{DType::kBF16, DType::kE5M2, 48, 272, 8},
          Case{DType::kBF16, DType::kE4M3, 21, 45, 3}, Case{DType::kF32, DType::kE5M2, 48, 264, 0}}) {
      for (const bool with_residual : {true, false}) {
        for (const bool exact : {false, true}) require_operand(d, c, with_residual, exact);
      }
    }
  });
}
TEST_CASE("layernorm backward writes the operand at the shapes of a step", "[slow]") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{256, 4096}, Shape{528, 8192}}) {
      require_operand(d, {DType::kBF16, DType::kE5M2, shape.rows, shape.cols, 0}, true, false);
      require_operand(d, {DType::kBF16, DType::kE5M2, shape.rows, shape.cols, 0}, true, true);
    }
  });
}
// dy of ones less its mean is zero; a column that is not there would be the mean alone.
TEST_CASE("what a segment has behind a row's end reaches neither the amax nor the column sums") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{48, 264}, Shape{528, 264}}) {
      LayerNormBackwardArgs a = plain_backward(d, shape.rows, shape.cols, filled(shape.elements(), 1.0f));
      const OperandUnderTest out(d, DType::kE5M2, shape.rows, shape.cols, 1.0f, 0.0f);
      a.quantized = out.operand;
      a.quantizer = out.quantizer;
      d.ops().layernorm_backward_residual(d.stream(), a);
      REQUIRE(d.read(out.amax, 1)[0] == 0.0f);
      REQUIRE(d.get(a.grad_bias) == filled(shape.cols, 0.0f));
      REQUIRE(d.codes(out.operand.rowwise) == std::vector<std::uint8_t>(static_cast<std::size_t>(shape.elements())));
    }
  });
}
TEST_CASE("a NaN in dx is quantized as quantize does, and its column's sum is one") {
  on_every_backend([](DeviceArrays& d) {
    const std::int64_t rows = 32, cols = 64;
    LayerNormBackwardArgs a = plain_backward(d, rows, cols, uniform(rows * cols, 1));
    std::vector<float> residual = uniform(rows * cols, 2);
    residual[5] = -kNaN;
    a.residual = d.matrix(DType::kBF16, rows, cols, residual);
    const OperandUnderTest got(d, DType::kE5M2, rows, cols, 600.0f, 0.0f), want(d, DType::kE5M2, rows, cols, 600.0f, 0);
    a.quantized = got.operand;
    a.quantizer = got.quantizer;
    d.ops().layernorm_backward_residual(d.stream(), a);
    d.ops().quantize(d.stream(), {a.grad_x, want.operand, want.quantizer, {}});
    REQUIRE(d.codes(got.operand.rowwise) == d.codes(want.operand.rowwise));
    REQUIRE(d.codes(got.operand.columnwise) == d.codes(want.operand.columnwise));
    REQUIRE(d.read(got.amax, 1) == d.read(want.amax, 1));
    const std::vector<float> bias = d.get(a.grad_bias);
    for (std::size_t c = 0; c < bias.size(); ++c) REQUIRE(std::isnan(bias[c]) == (c == 5));
  });
}
TEST_CASE("each part of what layernorm backward makes of dx can be had alone") {
  on_every_backend([](DeviceArrays& d) {
    for (const std::int64_t rows : {48, 528}) {
      const std::int64_t cols = 272;
      LayerNormBackwardArgs a = plain_backward(d, rows, cols, uniform(rows * cols, 1));
      const Tensor grad_bias = a.grad_bias, alone = d.matrix(DType::kF32, 1, cols);
      const OperandUnderTest both(d, DType::kE5M2, rows, cols, 600.0f, 0.0f);
      const OperandUnderTest apart(d, DType::kE5M2, rows, cols, 600.0f, 0.0f);
      const OperandUnderTest copy(d, DType::kBF16, rows, cols, 1.0f, 0.0f);
      const auto run = [&](const Operand& quantized, const Quantizer& quantizer, const Tensor& bias) {
        a.quantized = quantized;
        a.quantizer = quantizer;
        a.grad_bias = bias;
        d.ops().layernorm_backward_residual(d.stream(), a);
      };
      run(both.operand, both.quantizer, grad_bias);
      run({apart.operand.rowwise, {}, {}}, {apart.quantizer.scale, nullptr}, {});
      run({{}, apart.operand.columnwise, {}}, {apart.quantizer.scale, nullptr}, {});
      REQUIRE(d.codes(apart.operand.rowwise) == d.codes(both.operand.rowwise));
      REQUIRE(d.codes(apart.operand.columnwise) == d.codes(both.operand.columnwise));
      REQUIRE(std::isnan(d.get(apart.operand.scale_inv)[0]));
      REQUIRE(d.read(apart.amax, 1)[0] == 0.0f);
      REQUIRE(d.read(both.amax, 1)[0] > 0.0f);
      run({}, {}, alone);
      const std::vector<float> sums = d.get(grad_bias);
      require_close(d.get(alone), {sums.begin(), sums.end()}, 1e-6 * static_cast<double>(rows), 0);
      run(copy.operand, {}, {});
      REQUIRE(d.get(copy.operand.rowwise) == d.get(a.grad_x));
    }
  });
}

namespace {

// Forward, then backward of its result without a residual, into matrices of x's pitch. Returns the backward's
// arguments.
LayerNormBackwardArgs run_both(DeviceArrays& d, const Tensor& x, const Tensor& dy, const Tensor& gamma,
                               const OperandUnderTest& out) {
  const std::int64_t rows = x.shape.rows, cols = x.shape.cols;
  const LayerNormArgs f{x,           gamma,         d.matrix(DType::kF32, 1, cols), static_cast<float>(kEpsilon),
                        out.operand, out.quantizer, d.matrix(DType::kF32, 1, rows), d.matrix(DType::kF32, 1, rows)};
  d.ops().layernorm_quantize(d.stream(), f);
  const LayerNormBackwardArgs b{dy,
                                x,
                                f.mean,
                                f.rstd,
                                gamma,
                                {},
                                d.matrix(x.dtype, rows, cols, filled(rows * cols, kNaN), x.row_pitch),
                                d.matrix(DType::kF32, 1, cols),
                                d.matrix(DType::kF32, 1, cols)};
  d.ops().layernorm_backward_residual(d.stream(), b);
  return b;
}

}  // namespace

TEST_CASE("layernorm gives the same bytes in every call") {
  on_every_backend([](DeviceArrays& d) {
    const std::int64_t rows = 80, cols = 4096;
    const Tensor x = d.matrix(DType::kBF16, rows, cols, uniform(rows * cols, 1));
    const Tensor dy = d.matrix(DType::kBF16, rows, cols, uniform(rows * cols, 2));
    const Tensor gamma = d.matrix(DType::kF32, 1, cols, uniform(cols, 3));
    std::vector<std::vector<std::uint8_t>> codes;
    std::vector<std::vector<float>> mean, dx, grad_gamma;
    for (int call = 0; call < 2; ++call) {
      const OperandUnderTest out(d, DType::kE4M3, rows, cols, 8.0f, 0.0f);
      const LayerNormBackwardArgs b = run_both(d, x, dy, gamma, out);
      codes.push_back(d.codes(out.operand.columnwise));
      mean.push_back(d.get(b.mean));
      dx.push_back(d.get(b.grad_x));
      grad_gamma.push_back(d.get(b.grad_gamma));
    }
    CHECK(codes[0] == codes[1]);
    CHECK(mean[0] == mean[1]);
    CHECK(dx[0] == dx[1]);
    CHECK(grad_gamma[0] == grad_gamma[1]);
  });
}

TEST_CASE("layernorm gives a row the same bytes beside any other rows, at any pitch") {
  on_every_backend([](DeviceArrays& d) {
    for (const std::int64_t cols : {104, 2056}) {
      const std::vector<float> x = uniform(528 * cols, 1), dy = uniform(528 * cols, 2);
      const Tensor gamma = d.matrix(DType::kF32, 1, cols, uniform(cols, 3));
      const auto head = [&](const std::vector<float>& v, std::int64_t rows) {
        return std::vector<float>(v.begin(), v.begin() + rows * cols);
      };
      std::vector<std::uint8_t> codes;
      std::vector<float> mean, rstd, dx;
      for (const Shape& of : {Shape{528, 0}, Shape{517, 3}, Shape{48, 0}, Shape{37, 3}}) {  // rows, padding
        const std::int64_t rows = of.rows, pitch = of.cols == 0 ? 0 : cols + of.cols;
        INFO(rows << "x" << cols << " pitch " << pitch);
        const OperandUnderTest out(d, DType::kE4M3, rows, cols, 8.0f, 0.0f);
        const LayerNormBackwardArgs b = run_both(d, d.matrix(DType::kBF16, rows, cols, head(x, rows), pitch),
                                                 d.matrix(DType::kBF16, rows, cols, head(dy, rows), pitch), gamma, out);
        if (mean.empty()) {
          codes = d.codes(out.operand.rowwise);
          mean = d.get(b.mean);
          rstd = d.get(b.rstd);
          dx = d.get(b.grad_x);
          continue;
        }
        CHECK(std::ranges::equal(d.codes(out.operand.rowwise), std::span(codes).first(rows * cols)));
        CHECK(std::ranges::equal(d.get(b.mean), std::span(mean).first(rows)));
        CHECK(std::ranges::equal(d.get(b.rstd), std::span(rstd).first(rows)));
        CHECK(d.get(b.grad_x) == head(dx, rows));
      }
    }
  });
}

TEST_CASE("layernorm without an amax cell quantizes all the same") {
  on_every_backend([](DeviceArrays& d) {
    const std::int64_t rows = 16, cols = 64;
    std::vector<std::vector<std::uint8_t>> codes;
    for (const bool gather : {true, false}) {
      OperandUnderTest out(d, DType::kE4M3, rows, cols, 8.0f, 0.0f);
      if (!gather) out.quantizer.amax = nullptr;
      d.ops().layernorm_quantize(
          d.stream(), {d.matrix(DType::kBF16, rows, cols, uniform(rows * cols, 9)),
                       d.matrix(DType::kF32, 1, cols, filled(cols, 1.0f)), d.matrix(DType::kF32, 1, cols),
                       static_cast<float>(kEpsilon), out.operand, out.quantizer, d.matrix(DType::kF32, 1, rows),
                       d.matrix(DType::kF32, 1, rows)});
      codes.push_back(d.codes(out.operand.rowwise));
      REQUIRE((d.read(out.amax, 1)[0] > 0) == gather);
    }
    REQUIRE(codes[0] == codes[1]);
  });
}

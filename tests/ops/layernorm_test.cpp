// LayerNorm forward and backward against a double-precision oracle.
#include <cmath>
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

TEST_CASE("layernorm gives the same bytes in every call") {
  on_every_backend([](DeviceArrays& d) {
    const std::int64_t rows = 80, cols = 4096;
    const Tensor x = d.matrix(DType::kBF16, rows, cols, uniform(rows * cols, 1));
    const Tensor dy = d.matrix(DType::kBF16, rows, cols, uniform(rows * cols, 2));
    const Tensor gamma = d.matrix(DType::kF32, 1, cols, uniform(cols, 3)), beta = d.matrix(DType::kF32, 1, cols);
    std::vector<std::vector<std::uint8_t>> codes;
    std::vector<std::vector<float>> mean, dx, grad_gamma;
    for (int call = 0; call < 2; ++call) {
      OperandUnderTest out(d, DType::kE4M3, rows, cols, 8.0f, 0.0f);
      LayerNormArgs f{x,
                      gamma,
                      beta,
                      static_cast<float>(kEpsilon),
                      out.operand,
                      out.quantizer,
                      d.matrix(DType::kF32, 1, rows),
                      d.matrix(DType::kF32, 1, rows)};
      d.ops().layernorm_quantize(d.stream(), f);
      LayerNormBackwardArgs b{dy,
                              x,
                              f.mean,
                              f.rstd,
                              gamma,
                              {},
                              d.matrix(DType::kBF16, rows, cols),
                              d.matrix(DType::kF32, 1, cols),
                              d.matrix(DType::kF32, 1, cols)};
      d.ops().layernorm_backward_residual(d.stream(), b);
      codes.push_back(d.codes(out.operand.columnwise));
      mean.push_back(d.get(f.mean));
      dx.push_back(d.get(b.grad_x));
      grad_gamma.push_back(d.get(b.grad_gamma));
    }
    CHECK(codes[0] == codes[1]);
    CHECK(mean[0] == mean[1]);
    CHECK(dx[0] == dx[1]);
    CHECK(grad_gamma[0] == grad_gamma[1]);
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

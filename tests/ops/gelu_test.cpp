// GELU forward and backward against a double-precision oracle.
#include <cmath>
#include <vector>

#include "tests/ops/ops_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {

const double kRoot = std::sqrt(2.0 / 3.14159265358979323846);

double gelu(double u) { return 0.5 * u * (1 + std::tanh(kRoot * (u + 0.044715 * u * u * u))); }
double gelu_derivative(double u) {
  const double t = std::tanh(kRoot * (u + 0.044715 * u * u * u));
  return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * kRoot * (1 + 3 * 0.044715 * u * u);
}

struct Case {
  DType activation, result;
  std::int64_t rows, cols, pad;
};

// Values over the whole interesting range, zeros and large ones among them.
std::vector<float> inputs(const Case& c) {
  std::vector<float> u = uniform(c.rows * c.cols, 1, -6.0f, 6.0f);
  u.front() = 0.0f;
  u.back() = -40.0f;
  u[u.size() / 2] = 30.0f;
  return stored_as(c.activation, u);
}

// 1 + tanh cancels for negative u, so the error is relative to |u|, not to the result: a few units of |u| · 2^-24.
constexpr double kAbsolute = 4e-6;

void require_forward(DeviceArrays& d, const Case& c) {
  INFO(name_of(c.activation) << " to " << name_of(c.result) << " " << c.rows << "x" << c.cols);
  const std::vector<float> u = inputs(c);
  OperandUnderTest out(d, c.result, c.rows, c.cols, 6.25f, c.pad == 0 ? 0.125f : 100.0f, c.pad);
  d.ops().gelu_quantize(d.stream(), {d.matrix(c.activation, c.rows, c.cols, u, c.pad == 0 ? 0 : c.cols + c.pad),
                                     out.operand, out.quantizer});
  std::vector<double> want;
  for (const float v : u) want.push_back(gelu(v));
  out.require(d, want, kAbsolute, 2e-6);
  if (c.pad != 0) REQUIRE(d.padding_intact(out.operand.rowwise));
}

void require_backward(DeviceArrays& d, const Case& c) {
  INFO(name_of(c.activation) << " to " << name_of(c.result) << " " << c.rows << "x" << c.cols);
  const std::int64_t pitch = c.pad == 0 ? 0 : c.cols + c.pad;
  const std::vector<float> u = inputs(c);
  const std::vector<float> dy = stored_as(c.activation, uniform(c.rows * c.cols, 2)), before = uniform(c.cols, 3);
  OperandUnderTest out(d, c.result, c.rows, c.cols, 6.25f, c.pad == 0 ? 0.125f : 100.0f, c.pad);
  const Tensor grad_bias = d.matrix(DType::kF32, 1, c.cols, before);
  d.ops().gelu_backward_quantize_bias(
      d.stream(), {d.matrix(c.activation, c.rows, c.cols, u, pitch), d.matrix(c.activation, c.rows, c.cols, dy, pitch),
                   out.operand, out.quantizer, grad_bias});
  std::vector<double> want, bias(before.begin(), before.end());
  for (std::size_t i = 0; i < u.size(); ++i) {
    want.push_back(dy[i] * gelu_derivative(u[i]));
    bias[i % bias.size()] += want.back();
  }
  out.require(d, want, kAbsolute, 2e-6);
  // Of the FP32 result: far below what summing BF16 or FP8 roundings would leave. Every row's addition rounds once
  // more.
  require_close(d.get(grad_bias), bias, kAbsolute * 4 + 0x1p-24 * static_cast<double>(c.rows), 1e-5);
  if (c.pad != 0) REQUIRE(d.padding_intact(out.operand.rowwise));
}

}  // namespace

TEST_CASE("gelu_quantize matches the oracle in every result type") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType result : {DType::kE4M3, DType::kE5M2, DType::kBF16}) {
      require_forward(d, {DType::kBF16, result, 48, 112, 0});
      require_forward(d, {DType::kBF16, result, 16, 80, 16});
    }
  });
}
TEST_CASE("gelu_backward_quantize_bias matches the oracle in every result type") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType result : {DType::kE4M3, DType::kE5M2, DType::kBF16}) {
      require_backward(d, {DType::kBF16, result, 48, 112, 0});
      require_backward(d, {DType::kBF16, result, 16, 80, 16});
    }
  });
}
TEST_CASE("gelu takes FP32 activations and any size") {
  on_every_backend([](DeviceArrays& d) {
    for (const Case& c :
         {Case{DType::kF32, DType::kF32, 48, 112, 0}, Case{DType::kF32, DType::kF32, 3, 45, 5},
          Case{DType::kBF16, DType::kE5M2, 11, 45, 5}, Case{DType::kF32, DType::kE4M3, 80, 72, 0},
          Case{DType::kBF16, DType::kE4M3, 65, 129, 0}, Case{DType::kBF16, DType::kE5M2, 272, 208, 0}}) {
      require_forward(d, c);
      require_backward(d, c);
    }
  });
}
TEST_CASE("gelu holds at the shapes of a step", "[slow]") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{256, 11008}, Shape{256, 4096}, Shape{1040, 8192}}) {
      require_forward(d, {DType::kBF16, DType::kE4M3, shape.rows, shape.cols, 0});
      require_backward(d, {DType::kBF16, DType::kE5M2, shape.rows, shape.cols, 0});
    }
  });
}

TEST_CASE("gelu of large values is the identity or zero, its derivative 1 or 0, and NaN stays NaN") {
  on_every_backend([](DeviceArrays& d) {
    const std::vector<float> u = {1e4f, -1e4f, 11.0f, -11.0f, 3e38f, -3e38f, kNaN, 0.0f};
    const Tensor x = d.matrix(DType::kF32, 1, 8, u), y = d.matrix(DType::kF32, 1, 8), dy = d.matrix(DType::kF32, 1, 8);
    d.ops().gelu_quantize(d.stream(), {x, {y, {}, {}}, {}});
    std::vector<float> got = d.get(y);
    CHECK(std::isnan(got[6]));
    got[6] = 0.0f;
    require_close(got, {1e4, 0, 11, 0, 3e38f, 0, 0, 0}, 1e-6, 1e-6);
    // Beyond 1e19 a derivative may leave FP32's range on its way.
    const std::vector<float> v = {1e4f, -1e4f, 11.0f, -11.0f, 1e9f, -1e9f, kNaN, 0.0f};
    const Tensor bias = d.matrix(DType::kF32, 1, 8);
    d.ops().gelu_backward_quantize_bias(
        d.stream(),
        {d.matrix(DType::kF32, 1, 8, v), d.matrix(DType::kF32, 1, 8, filled(8, 1.0f)), {dy, {}, {}}, {}, bias});
    got = d.get(dy);
    CHECK(std::isnan(got[6]));
    got[6] = 0.0f;
    require_close(got, {1, 0, 1, 0, 1, 0, 0, 0.5}, 1e-6, 1e-6);
  });
}

TEST_CASE("gelu backward gives the same bytes in every call") {
  on_every_backend([](DeviceArrays& d) {
    const Tensor u = d.matrix(DType::kBF16, 48, 112, uniform(48 * 112, 4)),
                 dy = d.matrix(DType::kBF16, 48, 112, uniform(48 * 112, 5));
    std::vector<std::vector<float>> sums;
    for (int call = 0; call < 2; ++call) {
      OperandUnderTest out(d, DType::kE5M2, 48, 112, 64.0f, 0.0f);
      const Tensor grad_bias = d.matrix(DType::kF32, 1, 112);
      d.ops().gelu_backward_quantize_bias(d.stream(), {u, dy, out.operand, out.quantizer, grad_bias});
      sums.push_back(d.get(grad_bias));
    }
    REQUIRE(sums[0] == sums[1]);
  });
}

// GELU (tanh form), forward and backward, with the fused quantize tail and the bias gradient.
//
// (1 + tanh z)/2 is the logistic function s of 2z, so with z = sqrt(2/pi) · (u + 0.044715 u³)
//   gelu(u)  = u · s                             s = 1 / (1 + e^(−2z))
//   gelu'(u) = s + u · s · (1 − s) · 2 dz/du     1 − s = s · e^(−2z)
// without the cancellation of 1 + tanh. The kernels' time is their instructions, so powers and reciprocals are the
// hardware's: 2 units of the last place and one, and 2|z| · 2^-24 from the exponent's argument, which counts only as
// far as s · (1 − s) does: below 2^-22 |u| in all.
#include <numbers>

#include "kernels/cuda/elementwise_tile.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/mma_sync.cuh"

namespace qe::cuda {
namespace {

constexpr float kLinear = 1.59576912f;   // 2 sqrt(2/pi)
constexpr float kCubic = 0.0713548163f;  // 2 sqrt(2/pi) · 0.044715
constexpr float kCubicDerivative = 3.0f * kCubic;
constexpr float kLog2e = std::numbers::log2e_v<float>;
constexpr float kSaturated = 9.875f;  // from here on s and the derivative are 0 or 1 within 1e-34, and e^|2z| < 2^123

// A NaN stays one, which fmaxf and fminf would not do.
__device__ __forceinline__ float at_least(float bound, float u) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(u) : "f"(bound));
  return u;
}
__device__ __forceinline__ float at_most(float bound, float u) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(u) : "f"(bound));
  return u;
}
// u within the range in which s moves.
__device__ __forceinline__ float within_range(float u) { return at_most(kSaturated, at_least(-kSaturated, u)); }

// e^(−2z)
__device__ __forceinline__ float exponential(float u) {
  return exp2_approximate(-u * __fmaf_rn(kCubic * kLog2e, u * u, kLinear * kLog2e));
}

// 1 / x for x in [1, 2^125]
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float gelu(float u) {
  return at_least(-kSaturated, u) * reciprocal(1.0f + exponential(within_range(u)));
}

__device__ __forceinline__ float gelu_derivative(float u) {
  const float c = within_range(u);
  const float e = exponential(c);
  const float s = reciprocal(1.0f + e);
  const float slope = __fmaf_rn(kCubicDerivative, c * c, kLinear);
  return __fmaf_rn(c * s * (s * e), slope, s);
}

// Bytes an element, BF16 source and both FP8 layouts: 2 read, 2 written.
template <class T>
struct ForwardSource {
  MatrixView<const T> u;
  int rows, cols;
  using Raw = Eight<T>;
  template <bool kVector>
  __device__ Raw load(int row, int col) const {
    return load_eight<kVector>(u.row(row), col, cols, row < rows);
  }
  __device__ void values(const Raw& raw, float (&v)[kLaneElements]) const {
    to_floats(raw, v);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) v[k] = gelu(v[k]);
  }
};

// Bytes an element: 4 read, 2 written.
template <class T>
struct BackwardSource {
  MatrixView<const T> u, grad;
  int rows, cols;
  struct Raw {
    Eight<T> u, grad;
  };
  template <bool kVector>
  __device__ Raw load(int row, int col) const {
    return {load_eight<kVector>(u.row(row), col, cols, row < rows),
            load_eight<kVector>(grad.row(row), col, cols, row < rows)};
  }
  __device__ void values(const Raw& raw, float (&v)[kLaneElements]) const {
    float g[kLaneElements];
    to_floats(raw.u, v);
    to_floats(raw.grad, g);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) v[k] = g[k] * gelu_derivative(v[k]);
  }
};

template <class T>
void forward(const Launch& launch, const GeluArgs& a) {
  const OperandTarget target = target_of(a.out, a.quantizer, a.u.shape);
  const ForwardSource<T> source{view_of<const T>(a.u), target.rows, target.cols};
  write_elementwise(launch, source, allows_vectors(a.u) && allows_vectors(a.out), target, {});
}

template <class T>
void backward(const Launch& launch, const GeluBackwardArgs& a) {
  const OperandTarget target = target_of(a.grad_u, a.quantizer, a.u.shape);
  const BackwardSource<T> source{view_of<const T>(a.u), view_of<const T>(a.grad_out), target.rows, target.cols};
  const bool vectors = allows_vectors(a.u) && allows_vectors(a.grad_out) && allows_vectors(a.grad_u);
  write_elementwise(launch, source, vectors, target, a.grad_bias);
}

}  // namespace

void gelu_quantize(const Launch& launch, const GeluArgs& a) {
  QE_EXPECTS(is_wide(a.u.dtype), "gelu takes an FP32 or BF16 matrix");
  a.u.dtype == DType::kBF16 ? forward<Bf16>(launch, a) : forward<float>(launch, a);
}

void gelu_backward_quantize_bias(const Launch& launch, const GeluBackwardArgs& a) {
  QE_EXPECTS(is_wide(a.u.dtype) && a.grad_out.dtype == a.u.dtype, "gelu backward takes FP32 or BF16 matrices");
  QE_EXPECTS(a.grad_out.shape == a.u.shape, "grad_out has the shape of u");
  a.u.dtype == DType::kBF16 ? backward<Bf16>(launch, a) : backward<float>(launch, a);
}

}  // namespace qe::cuda

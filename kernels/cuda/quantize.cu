// Matrices into GEMM operands: activations and output gradients, weights, plain casts.
// The tile and the FP8 tail are elementwise_tile.cuh's; scales are scaling.cu's.
#include "kernels/cuda/elementwise_tile.cuh"
#include "kernels/cuda/kernels.h"

namespace qe::cuda {
namespace {

// Bytes an element, both FP8 layouts wanted: BF16 source 2 read + 2 written, FP32 source 4 + 2.
// kRound: the value is bf16(x), of a NaN some NaN: its code is the same.
template <class T, bool kRound>
struct MatrixSource {
  MatrixView<const T> x;
  int rows, cols;
  using Raw = Eight<T>;
  template <bool kVector>
  __device__ Raw load(int row, int col) const {
    return load_eight<kVector>(x.row(row), col, cols, row < rows);
  }
  __device__ void values(const Raw& raw, float (&v)[kLaneElements]) const {
    to_floats(raw, v);
    if constexpr (kRound) {
#pragma unroll
      for (int k = 0; k < kLaneElements; k += 2) {
        const std::uint32_t pair = bf16_pair(v[k], v[k + 1]);
        v[k] = __uint_as_float(pair << 16);
        v[k + 1] = __uint_as_float(pair & 0xffff0000u);
      }
    }
  }
};

template <class T, bool kRound>
void write_matrix(const Launch& launch, const Tensor& x, const Operand& out, const Quantizer& quantizer,
                  const Tensor& gradient) {
  const OperandTarget target = target_of(out, quantizer, x.shape);
  const MatrixSource<T, kRound> source{view_of<const T>(x), target.rows, target.cols};
  write_elementwise(launch, source, allows_vectors(x) && allows_vectors(out), target, gradient);
}

}  // namespace

void quantize(const Launch& launch, const QuantizeArgs& a) {
  QE_EXPECTS(is_wide(a.x.dtype), "quantize takes an FP32 or BF16 matrix");
  if (a.x.dtype == DType::kBF16) {
    write_matrix<Bf16, false>(launch, a.x, a.out, a.quantizer, a.grad_bias);
  } else {
    write_matrix<float, false>(launch, a.x, a.out, a.quantizer, a.grad_bias);
  }
}

// A BF16 result is rounded once either way; an FP32 one stays exact.
void quantize_weight(const Launch& launch, const QuantizeWeightArgs& a) {
  QE_EXPECTS(a.master.dtype == DType::kF32, "quantize_weight takes an FP32 master");
  const DType type = a.out.rowwise.empty() ? a.out.columnwise.dtype : a.out.rowwise.dtype;
  if (is_fp8(type)) {
    write_matrix<float, true>(launch, a.master, a.out, a.quantizer, {});
  } else {
    write_matrix<float, false>(launch, a.master, a.out, a.quantizer, {});
  }
}

void cast(const Launch& launch, const Tensor& from, const Tensor& to) {
  QE_EXPECTS(from.dtype == DType::kF32 && is_wide(to.dtype) && from.shape == to.shape,
             "cast takes an FP32 matrix and an FP32 or BF16 one of its shape");
  write_matrix<float, false>(launch, from, {to, {}, {}}, {}, {});
}

}  // namespace qe::cuda

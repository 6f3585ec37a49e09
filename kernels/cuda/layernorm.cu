// LayerNorm: forward with the fused quantize tail, backward with the residual added and, for the product whose output
// gradient the sum is, the same tail. Host checks and launches; the kernels are layernorm_kernels.cuh's.
#include <algorithm>
#include <bit>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/layernorm_kernels.cuh"

namespace qe::cuda {
namespace {

void require_arguments(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& gamma) {
  const Shape per_row{1, x.shape.rows}, per_column{1, x.shape.cols};
  QE_EXPECTS(is_wide(x.dtype), "layernorm takes an FP32 or BF16 matrix");
  QE_EXPECTS(mean.dtype == DType::kF32 && rstd.dtype == DType::kF32 && mean.shape == per_row && rstd.shape == per_row,
             "mean and rstd are FP32, one value a row");
  QE_EXPECTS(gamma.dtype == DType::kF32 && gamma.shape == per_column, "gamma is FP32, one value a column");
  require_grid(x.shape);
}

// Up to this many rows blocks of 16 occupy the card better than blocks of 32 and are all there at once. A constant: how
// the columns' sums are grouped follows from the shape alone.
constexpr std::int64_t kFewRows = 512;

// A row's segments are dealt to the blocks of a cluster, as few as the cluster's size allows to each.
struct NormShape {
  bool held;
  int segments;  // of a block
  int row_blocks;
  LaunchShape launch;
};
template <class T>
NormShape shape_of(const Launch& launch, const Shape& x) {
  using Held = NormDeal<T, true>;
  using Looping = NormDeal<T, false>;
  const int of_row = tiles(x.cols, kSegment);
  const unsigned cluster = std::clamp<unsigned>(std::bit_ceil(static_cast<unsigned>(of_row)), 2, kMaxCluster);
  const int segments = tiles(of_row, static_cast<int>(cluster));
  const bool held = x.rows <= kFewRows && segments <= Held::kMaxGroups;
  const int row_blocks = tiles(x.rows, held ? Held::kRows : Looping::kRows);
  const int threads = held ? segments * Held::kGroup : Looping::kGroup;
  return {
      held, segments, row_blocks, {dim3(cluster, static_cast<unsigned>(row_blocks)), threads, cluster, launch.stream}};
}

template <class T>
void forward(const Launch& launch, const LayerNormArgs& a) {
  const NormShape shape = shape_of<T>(launch, a.x.shape);
  const NormForward<T> kernel{
      view_of<const T>(a.x), a.gamma.as<float>(), a.beta.as<float>(), a.epsilon,
      a.mean.as<float>(),    a.rstd.as<float>(),  shape.segments,     target_of(a.out, a.quantizer, a.x.shape)};
  const bool vectors =
      allows_vectors(a.x) && allows_vectors(a.gamma) && allows_vectors(a.beta) && allows_vectors(a.out);
  const auto held = vectors ? &normalize_rows<T, true, true> : &normalize_rows<T, false, true>;
  const auto looping = vectors ? &normalize_rows<T, true, false> : &normalize_rows<T, false, false>;
  launch_kernel(shape.launch, shape.held ? held : looping, kernel);
}

// The operand of dx that the kernel itself can write: FP8, of BF16 values, sixteen bytes at a time. Others are left to
// the quantize kernel.
template <class T>
constexpr bool kWritesOperand = sizeof(T) == sizeof(Bf16);
template <class T>
bool writes_operand(const LayerNormBackwardArgs& a) {
  const DType type = a.quantized.rowwise.empty() ? a.quantized.columnwise.dtype : a.quantized.rowwise.dtype;
  return kWritesOperand<T> && is_fp8(type) && allows_vectors(a.quantized);
}

template <class T>
void backward(const Launch& launch, const LayerNormBackwardArgs& a) {
  const NormShape shape = shape_of<T>(launch, a.x.shape);
  const int rows = static_cast<int>(a.x.shape.rows), cols = static_cast<int>(a.x.shape.cols);
  const bool vectors = allows_vectors(a.grad_out) && allows_vectors(a.x) && allows_vectors(a.residual) &&
                       allows_vectors(a.grad_x) && allows_vectors(a.gamma);
  const bool fused = vectors && writes_operand<T>(a) && partials_fit(launch, shape.row_blocks, 3, cols);
  const int outputs = fused && !a.grad_bias.empty() ? 3 : 2;
  float* partials = partials_in(launch, shape.row_blocks, outputs, cols);
  const NormBackward<T> kernel{view_of<const T>(a.grad_out),
                               view_of<const T>(a.x),
                               view_of<const T>(a.residual),
                               view_of<T>(a.grad_x),
                               a.mean.as<float>(),
                               a.rstd.as<float>(),
                               a.gamma.as<float>(),
                               partials,
                               outputs,
                               rows,
                               cols,
                               shape.segments,
                               fused ? target_of(a.quantized, a.quantizer, a.x.shape) : OperandTarget{}};
  auto held = vectors ? &differentiate_rows<T, true, true, false> : &differentiate_rows<T, false, true, false>;
  auto looping = vectors ? &differentiate_rows<T, true, false, false> : &differentiate_rows<T, false, false, false>;
  if constexpr (kWritesOperand<T>) {
    if (fused) held = &differentiate_rows<T, true, true, true>, looping = &differentiate_rows<T, true, false, true>;
  }
  launch_kernel(shape.launch, shape.held ? held : looping, kernel);
  add_partials(launch,
               {partials,
                shape.row_blocks,
                cols,
                {a.grad_gamma.as<float>(), a.grad_beta.as<float>(), outputs == 3 ? a.grad_bias.as<float>() : nullptr}});
  if (!fused && (!a.quantized.empty() || !a.grad_bias.empty())) {
    quantize(launch, {a.grad_x, a.quantized, a.quantizer, a.grad_bias});
  }
}

}  // namespace

void layernorm_quantize(const Launch& launch, const LayerNormArgs& a) {
  require_arguments(a.x, a.mean, a.rstd, a.gamma);
  QE_EXPECTS(a.beta.dtype == DType::kF32 && a.beta.shape == a.gamma.shape, "beta is FP32, one value a column");
  a.x.dtype == DType::kBF16 ? forward<Bf16>(launch, a) : forward<float>(launch, a);
}

void layernorm_backward_residual(const Launch& launch, const LayerNormBackwardArgs& a) {
  require_arguments(a.x, a.mean, a.rstd, a.gamma);
  QE_EXPECTS(a.grad_out.shape == a.x.shape && a.grad_x.shape == a.x.shape, "gradients have the shape of x");
  QE_EXPECTS(a.residual.empty() || a.residual.shape == a.x.shape, "the residual has the shape of x");
  QE_EXPECTS(a.grad_out.dtype == a.x.dtype && a.grad_x.dtype == a.x.dtype &&
                 (a.residual.empty() || a.residual.dtype == a.x.dtype),
             "gradients and residual have the type of x");
  QE_EXPECTS(a.grad_gamma.dtype == DType::kF32 && a.grad_beta.dtype == DType::kF32 &&
                 a.grad_gamma.shape == a.gamma.shape && a.grad_beta.shape == a.gamma.shape,
             "gradients of gamma and beta are FP32, one value a column");
  QE_EXPECTS(a.grad_bias.empty() || (a.grad_bias.dtype == DType::kF32 && a.grad_bias.shape == a.gamma.shape),
             "the bias gradient is FP32, one value a column");
  a.x.dtype == DType::kBF16 ? backward<Bf16>(launch, a) : backward<float>(launch, a);
}

}  // namespace qe::cuda

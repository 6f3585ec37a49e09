// LayerNorm: forward with the fused quantize tail, backward with the residual added. Host checks and launches; the
// kernels are layernorm_kernels.cuh's.
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

// A row's segments are dealt to the blocks of a cluster, as few as the cluster's size allows to each.
struct NormShape {
  int segments;  // of a block
  LaunchShape launch;
};
NormShape shape_of(const Launch& launch, const Shape& x) {
  const int segments = tiles(x.cols, kSegment);
  const unsigned cluster = std::min<unsigned>(kMaxCluster, std::bit_ceil(static_cast<unsigned>(segments)));
  const dim3 grid(cluster, static_cast<unsigned>(tiles(x.rows, kRowsOfBlock)));
  return {tiles(segments, static_cast<int>(cluster)), {grid, kNormThreads, cluster, launch.stream}};
}

template <class T>
void forward(const Launch& launch, const LayerNormArgs& a) {
  const NormShape shape = shape_of(launch, a.x.shape);
  const NormForward<T> kernel{
      view_of<const T>(a.x), a.gamma.as<float>(), a.beta.as<float>(), a.epsilon,
      a.mean.as<float>(),    a.rstd.as<float>(),  shape.segments,     target_of(a.out, a.quantizer, a.x.shape)};
  const bool vectors =
      allows_vectors(a.x) && allows_vectors(a.gamma) && allows_vectors(a.beta) && allows_vectors(a.out);
  launch_kernel(shape.launch, vectors ? &normalize_rows<T, true> : &normalize_rows<T, false>, kernel);
}

template <class T>
void backward(const Launch& launch, const LayerNormBackwardArgs& a) {
  const NormShape shape = shape_of(launch, a.x.shape);
  const int rows = static_cast<int>(a.x.shape.rows), cols = static_cast<int>(a.x.shape.cols);
  const int row_blocks = tiles(rows, kRowsOfBlock);
  float* partials = partials_in(launch, row_blocks, 2, cols);
  const NormBackward<T> kernel{view_of<const T>(a.grad_out),
                               view_of<const T>(a.x),
                               view_of<const T>(a.residual),
                               view_of<T>(a.grad_x),
                               a.mean.as<float>(),
                               a.rstd.as<float>(),
                               a.gamma.as<float>(),
                               partials,
                               rows,
                               cols,
                               shape.segments};
  const bool vectors = allows_vectors(a.grad_out) && allows_vectors(a.x) && allows_vectors(a.residual) &&
                       allows_vectors(a.grad_x) && allows_vectors(a.gamma);
  launch_kernel(shape.launch, vectors ? &differentiate_rows<T, true> : &differentiate_rows<T, false>, kernel);
  add_partials(launch, {partials, row_blocks, cols, {a.grad_gamma.as<float>(), a.grad_beta.as<float>()}});
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
  a.x.dtype == DType::kBF16 ? backward<Bf16>(launch, a) : backward<float>(launch, a);
}

}  // namespace qe::cuda

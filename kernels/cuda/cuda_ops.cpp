#include "kernels/cuda/cuda_ops.h"

#include "kernels/cuda/kernels.h"

namespace qe {

void CudaOps::embedding_forward(Stream& s, const EmbeddingForwardArgs& a) {
  cuda::embedding_forward(device_.launch_on(s), a);
}
void CudaOps::embedding_backward(Stream& s, const EmbeddingBackwardArgs& a) {
  cuda::embedding_backward(device_.launch_on(s), a);
}
void CudaOps::layernorm_quantize(Stream& s, const LayerNormArgs& a) {
  cuda::layernorm_quantize(device_.launch_on(s), a);
}
void CudaOps::layernorm_backward_residual(Stream& s, const LayerNormBackwardArgs& a) {
  cuda::layernorm_backward_residual(device_.launch_on(s), a);
}
void CudaOps::quantize(Stream& s, const QuantizeArgs& a) { cuda::quantize(device_.launch_on(s), a); }
void CudaOps::quantize_weight(Stream& s, const QuantizeWeightArgs& a) {
  cuda::quantize_weight(device_.launch_on(s), a);
}
void CudaOps::dynamic_scale(Stream& s, const DynamicScaleArgs& a) { cuda::dynamic_scale(device_.launch_on(s), a); }
void CudaOps::cast(Stream& s, const Tensor& from, const Tensor& to) { cuda::cast(device_.launch_on(s), from, to); }
void CudaOps::gemm(Stream& s, const GemmArgs& a) { gemms_.run(device_.launch_on(s), device_.gemm_workspace(s), a); }
void CudaOps::gelu_quantize(Stream& s, const GeluArgs& a) { cuda::gelu_quantize(device_.launch_on(s), a); }
void CudaOps::gelu_backward_quantize_bias(Stream& s, const GeluBackwardArgs& a) {
  cuda::gelu_backward_quantize_bias(device_.launch_on(s), a);
}
void CudaOps::attention_forward(Stream& s, const AttentionArgs& a) { cuda::attention_forward(device_.launch_on(s), a); }
void CudaOps::attention_backward(Stream& s, const AttentionBackwardArgs& a) {
  cuda::attention_backward(device_.launch_on(s), a);
}
void CudaOps::cross_entropy(Stream& s, const CrossEntropyArgs& a) { cuda::cross_entropy(device_.launch_on(s), a); }
void CudaOps::update_scales(Stream& s, const UpdateScalesArgs& a) { cuda::update_scales(device_.launch_on(s), a); }
void CudaOps::advance_token(Stream& s, std::uint64_t* counter) { cuda::advance_token(device_.launch_on(s), counter); }
void CudaOps::gradient_norm(Stream& s, const GradientNormArgs& a) { cuda::gradient_norm(device_.launch_on(s), a); }
void CudaOps::clip_factor(Stream& s, const ClipArgs& a) { cuda::clip_factor(device_.launch_on(s), a); }
void CudaOps::adamw(Stream& s, const AdamWArgs& a) { cuda::adamw(device_.launch_on(s), a); }

}  // namespace qe

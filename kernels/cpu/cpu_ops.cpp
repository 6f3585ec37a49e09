#include "kernels/cpu/cpu_ops.h"

#include "kernels/cpu/kernels.h"

namespace qe {

void CpuOps::embedding_forward(Stream& s, const EmbeddingForwardArgs& a) {
  device_.enqueue(s, [a] { cpu::embedding_forward(a); });
}
void CpuOps::embedding_backward(Stream& s, const EmbeddingBackwardArgs& a) {
  device_.enqueue(s, [a] { cpu::embedding_backward(a); });
}
void CpuOps::layernorm_quantize(Stream& s, const LayerNormArgs& a) {
  device_.enqueue(s, [a] { cpu::layernorm_quantize(a); });
}
void CpuOps::layernorm_backward_residual(Stream& s, const LayerNormBackwardArgs& a) {
  device_.enqueue(s, [a] { cpu::layernorm_backward_residual(a); });
}
void CpuOps::quantize(Stream& s, const QuantizeArgs& a) {
  device_.enqueue(s, [a] { cpu::quantize(a); });
}
void CpuOps::quantize_weight(Stream& s, const QuantizeWeightArgs& a) {
  device_.enqueue(s, [a] { cpu::quantize_weight(a); });
}
void CpuOps::dynamic_scale(Stream& s, const DynamicScaleArgs& a) {
  device_.enqueue(s, [a] { cpu::dynamic_scale(a); });
}
void CpuOps::cast(Stream& s, const Tensor& from, const Tensor& to) {
  device_.enqueue(s, [from, to] { cpu::cast(from, to); });
}
void CpuOps::gemm(Stream& s, const GemmArgs& a) {
  device_.enqueue(s, [a] { cpu::gemm(a); });
}
void CpuOps::gelu_quantize(Stream& s, const GeluArgs& a) {
  device_.enqueue(s, [a] { cpu::gelu_quantize(a); });
}
void CpuOps::gelu_backward_quantize_bias(Stream& s, const GeluBackwardArgs& a) {
  device_.enqueue(s, [a] { cpu::gelu_backward_quantize_bias(a); });
}
void CpuOps::attention_forward(Stream& s, const AttentionArgs& a) {
  device_.enqueue(s, [a] { cpu::attention_forward(a); });
}
void CpuOps::attention_backward(Stream& s, const AttentionBackwardArgs& a) {
  device_.enqueue(s, [a] { cpu::attention_backward(a); });
}
void CpuOps::cross_entropy(Stream& s, const CrossEntropyArgs& a) {
  device_.enqueue(s, [a] { cpu::cross_entropy(a); });
}
void CpuOps::update_scales(Stream& s, const UpdateScalesArgs& a) {
  device_.enqueue(s, [a] { cpu::update_scales(a); });
}
void CpuOps::gradient_norm(Stream& s, const GradientNormArgs& a) {
  device_.enqueue(s, [a] { cpu::gradient_norm(a); });
}
void CpuOps::clip_factor(Stream& s, const ClipArgs& a) {
  device_.enqueue(s, [a] { cpu::clip_factor(a); });
}
void CpuOps::adamw(Stream& s, const AdamWArgs& a) {
  device_.enqueue(s, [a] { cpu::adamw(a); });
}

}  // namespace qe

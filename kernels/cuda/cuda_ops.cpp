#include "kernels/cuda/cuda_ops.h"

#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/library_versions.h"

namespace qe {

namespace {

// A launch that the driver refused says so only when it is asked.
template <class Operation, class... Args>
void run(const char* name, Operation operation, const cuda::Launch& launch, const Args&... args) {
  operation(launch, args...);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) cuda::fail(name, cudaGetErrorString(status), __FILE__, __LINE__);
}

}  // namespace

void CudaOps::embedding_forward(Stream& s, const EmbeddingForwardArgs& a) {
  run("embedding_forward", cuda::embedding_forward, device_.launch_on(s), a);
}
void CudaOps::embedding_backward(Stream& s, const EmbeddingBackwardArgs& a) {
  run("embedding_backward", cuda::embedding_backward, device_.launch_on(s), a);
}
void CudaOps::layernorm_quantize(Stream& s, const LayerNormArgs& a) {
  run("layernorm_quantize", cuda::layernorm_quantize, device_.launch_on(s), a);
}
void CudaOps::layernorm_backward_residual(Stream& s, const LayerNormBackwardArgs& a) {
  run("layernorm_backward_residual", cuda::layernorm_backward_residual, device_.launch_on(s), a);
}
void CudaOps::quantize(Stream& s, const QuantizeArgs& a) { run("quantize", cuda::quantize, device_.launch_on(s), a); }
void CudaOps::quantize_weight(Stream& s, const QuantizeWeightArgs& a) {
  run("quantize_weight", cuda::quantize_weight, device_.launch_on(s), a);
}
void CudaOps::dynamic_scale(Stream& s, const DynamicScaleArgs& a) {
  run("dynamic_scale", cuda::dynamic_scale, device_.launch_on(s), a);
}
void CudaOps::cast(Stream& s, const Tensor& from, const Tensor& to) {
  run("cast", cuda::cast, device_.launch_on(s), from, to);
}
void CudaOps::gemm(Stream& s, const GemmArgs& a) { gemms_.run(device_.launch_on(s), device_.gemm_workspace(s), a); }
void CudaOps::gelu_quantize(Stream& s, const GeluArgs& a) {
  run("gelu_quantize", cuda::gelu_quantize, device_.launch_on(s), a);
}
void CudaOps::gelu_backward_quantize_bias(Stream& s, const GeluBackwardArgs& a) {
  run("gelu_backward_quantize_bias", cuda::gelu_backward_quantize_bias, device_.launch_on(s), a);
}
void CudaOps::attention_forward(Stream& s, const AttentionArgs& a) {
  run("attention_forward", cuda::attention_forward, device_.launch_on(s), a);
}
void CudaOps::attention_backward(Stream& s, const AttentionBackwardArgs& a) {
  run("attention_backward", cuda::attention_backward, device_.launch_on(s), a);
}
void CudaOps::cross_entropy(Stream& s, const CrossEntropyArgs& a) {
  run("cross_entropy", cuda::cross_entropy, device_.launch_on(s), a);
}
void CudaOps::update_scales(Stream& s, const UpdateScalesArgs& a) {
  run("update_scales", cuda::update_scales, device_.launch_on(s), a);
}
void CudaOps::gradient_norm(Stream& s, const GradientNormArgs& a) {
  run("gradient_norm", cuda::gradient_norm, device_.launch_on(s), a);
}
void CudaOps::clip_factor(Stream& s, const ClipArgs& a) {
  run("clip_factor", cuda::clip_factor, device_.launch_on(s), a);
}
void CudaOps::adamw(Stream& s, const AdamWArgs& a) { run("adamw", cuda::adamw, device_.launch_on(s), a); }

GemmPlatform CudaOps::gemm_platform() const {
  return {device_.description(), device_.multiprocessors(), "cuBLASLt " + cuda::library_versions().at("cublaslt")};
}
std::string CudaOps::gemm_product(const GemmArgs& args) const { return to_string(cuda::GemmKey(args)); }
void CudaOps::use_gemms(std::span<const GemmChoice> entries, const std::string& source) { gemms_.use(entries, source); }
std::vector<GemmChoice> CudaOps::choose_gemms(std::span<const GemmArgs> products) {
  gemms_.prepare(products, CudaDevice::kGemmWorkspaceBytes);
  return gemms_.choices();
}
std::vector<std::string> CudaOps::gemm_candidates(const GemmArgs& args) {
  return gemms_.candidates(args, CudaDevice::kGemmWorkspaceBytes);
}

}  // namespace qe

#include "kernels/cuda/gemm_plan.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/block_scales.h"
#include "kernels/cuda/check.h"

namespace qe::cuda {

namespace {

// cuBLASLt is column-major: our row-major D[m, n] is its D[n, m], so its A is our B and its B is our A.

constexpr std::uint32_t kAlignment = 256;  // bytes, of the question asked; the calls have at least 16
// Partial sums of a split K stay FP32 until the one rounding into D.
constexpr std::uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
constexpr int kMostCandidates = 32;

struct Destroy {
  void operator()(cublasLtMatmulDesc_t d) const noexcept { (void)cublasLtMatmulDescDestroy(d); }
  void operator()(cublasLtMatrixLayout_t l) const noexcept { (void)cublasLtMatrixLayoutDestroy(l); }
  void operator()(cublasLtMatmulPreference_t p) const noexcept { (void)cublasLtMatmulPreferenceDestroy(p); }
};
using DescHandle = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy>;
using LayoutHandle = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy>;
using PreferenceHandle = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy>;

cudaDataType_t cuda_type(DType t) {
  switch (t) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    default:
      break;
  }
  QE_EXPECTS(false, "a GEMM computes on floating-point matrices");
}

// A row-major matrix [rows, cols] as cuBLASLt sees it: cols x rows.
LayoutHandle layout(DType type, std::int64_t rows, std::int64_t cols, std::int64_t pitch) {
  cublasLtMatrixLayout_t made = nullptr;
  QE_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&made, cuda_type(type), static_cast<std::uint64_t>(cols),
                                             static_cast<std::uint64_t>(rows), pitch));
  return LayoutHandle(made);
}

template <class T>
void set(const DescHandle& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  QE_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof value));
}
template <class T>
void set(const PreferenceHandle& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  QE_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value));
}

void set_pointers(const DescHandle& desc, const GemmKey& key, const void* a_scale, const void* b_scale,
                  const void* bias) {
  if (is_fp8(key.b)) set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b_scale);
  if (is_fp8(key.a)) set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a_scale);
  if (key.has_bias) set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
}

// With several scales one operand has them by row and the other by square, where its rows are whole squares: measured
// faster than both by row, and for FP32 results the other way round than for BF16 ones.
ScaleForm scale_form(std::int64_t rows, bool square) {
  return square && rows % kScaleBlock == 0 ? ScaleForm::kSquare : ScaleForm::kVector;
}
ScaleForm a_form(const GemmKey& key) { return scale_form(key.m, key.d == DType::kBF16); }
ScaleForm b_form(const GemmKey& key) { return scale_form(key.n, key.d != DType::kBF16); }

std::int32_t scale_mode(ScaleForm form) {
  return form == ScaleForm::kVector ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                    : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// Fills both operands' arrays in the scratch.
std::pair<const float*, const float*> expand_scales(const Launch& launch, const GemmKey& key, const GemmArgs& args) {
  if (key.k % (key.scale_blocks * kScaleBlock) != 0) {
    throw DeviceError("gradients.w_group above 1 on CUDA needs microbatches of whole " + std::to_string(kScaleBlock) +
                      " tokens, but " + std::to_string(key.scale_blocks) + " of them have " + std::to_string(key.k) +
                      "; set gradients.w_group to 1 or change training.seq_length.");
  }
  const BlockScales a(a_form(key), args.a_scale_inv, key.m, key.k, launch.scratch.as<float>());
  const std::int64_t room = (a.elements() + 63) / 64 * 64;  // B's array begins on 256 bytes
  const BlockScales b(b_form(key), args.b_scale_inv, key.n, key.k, launch.scratch.as<float>() + room);
  QE_EXPECTS(static_cast<std::size_t>(room + b.elements()) * sizeof(float) <= launch.scratch.bytes,
             "the scales fit into the scratch");
  fill_block_scales(launch, a, b);
  return {a.to, b.to};
}

bool aligned(const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0; }

void check(const GemmArgs& args, const GemmKey& key) {
  const Shape a = args.a_transposed ? Shape{key.k, key.m} : Shape{key.m, key.k};
  const Shape b = args.b_transposed ? Shape{key.k, key.n} : Shape{key.n, key.k};
  QE_EXPECTS(args.a.shape == a && args.b.shape == b, "the operands' shapes do not make D's");
  QE_EXPECTS(!args.a_transposed || !is_fp8(args.a.dtype), "an FP8 operand must be K-contiguous");
  QE_EXPECTS(!args.b_transposed || !is_fp8(args.b.dtype), "an FP8 operand must be K-contiguous");
  QE_EXPECTS(args.a_scale_inv.empty() == !is_fp8(args.a.dtype), "exactly the FP8 operands have a scale_inv");
  QE_EXPECTS(args.b_scale_inv.empty() == !is_fp8(args.b.dtype), "exactly the FP8 operands have a scale_inv");
  QE_EXPECTS(args.a_scale_inv.shape.rows == args.b_scale_inv.shape.rows, "both operands have as many scales");
  QE_EXPECTS(key.scale_blocks == 1 || !key.fast_accumulation, "fast accumulation has one scale an operand");
  QE_EXPECTS(args.bias.empty() || args.bias.shape == (Shape{1, key.n}), "the bias is [1, n]");
  QE_EXPECTS(args.residual.empty() || (args.residual.shape == args.d.shape && args.residual.dtype == args.d.dtype),
             "the residual has D's shape and type");
  QE_EXPECTS(!args.accumulate || (args.bias.empty() && args.residual.empty()), "accumulate has no other addend");
  QE_EXPECTS(aligned(args.a) && aligned(args.b) && aligned(args.bias) && aligned(args.residual) && aligned(args.d) &&
                 aligned(args.a_scale_inv) && aligned(args.b_scale_inv),
             "cuBLASLt reads and writes matrices that begin on 16 bytes");
}

std::string hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  for (const std::uint64_t word : algorithm.data) {
    char digits[20];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(word));
    text += (text.empty() ? "" : " ") + std::string(digits);
  }
  return text;
}

// The inverse of hex(); nothing where the text has another form.
std::optional<cublasLtMatmulAlgo_t> algorithm_from(const std::string& text) {
  cublasLtMatmulAlgo_t algorithm{};
  std::istringstream words(text);
  for (std::uint64_t& word : algorithm.data) words >> std::hex >> word;
  return words && hex(algorithm) == text ? std::optional(algorithm) : std::nullopt;
}

[[noreturn]] void refuse(const GemmKey& key, const char* what, cublasStatus_t status) {
  throw DeviceError("cuBLASLt " + std::to_string(cublasLtGetVersion()) + " " + what + " " + to_string(key) + ": " +
                    cublasLtGetStatusString(status) +
                    "; FP8 products need sizes and pitches that are multiples of 16, so check model.hidden_size, "
                    "model.ffn_hidden_size and the tokens of a microbatch.");
}

[[noreturn]] void refuse_entry(const GemmKey& key, const std::string& algorithm, const std::string& source,
                               cublasStatus_t status) {
  throw DeviceError(source + ": cuBLASLt " + std::to_string(cublasLtGetVersion()) + " cannot compute " +
                    to_string(key) + " by algorithm \"" + algorithm + "\": " + cublasLtGetStatusString(status) +
                    "; tune this product again by qeffect bench --tune.");
}

}  // namespace

GemmKey::GemmKey(const GemmArgs& args)
    : m(args.d.shape.rows),
      n(args.d.shape.cols),
      k(args.a_transposed ? args.a.shape.rows : args.a.shape.cols),
      a(args.a.dtype),
      b(args.b.dtype),
      d(args.d.dtype),
      a_transposed(args.a_transposed),
      b_transposed(args.b_transposed),
      a_pitch(args.a.row_pitch),
      b_pitch(args.b.row_pitch),
      c_pitch(args.residual.empty() ? args.d.row_pitch : args.residual.row_pitch),
      d_pitch(args.d.row_pitch),
      has_bias(!args.bias.empty()),
      bias(args.bias.dtype),
      fast_accumulation(args.fast_accumulation && is_fp8(args.a.dtype)),
      scale_blocks(args.a_scale_inv.empty() ? 1 : args.a_scale_inv.shape.rows) {}

std::string to_string(const GemmKey& key) {
  const auto operand = [](DType type, bool transposed, std::int64_t pitch) {
    return std::string(name_of(type)) + (transposed ? " transposed" : "") + " pitch " + std::to_string(pitch);
  };
  return "D[m " + std::to_string(key.m) + ", n " + std::to_string(key.n) + "] over k " + std::to_string(key.k) +
         " (A " + operand(key.a, key.a_transposed, key.a_pitch) + ", B " +
         operand(key.b, key.b_transposed, key.b_pitch) + ", D " + operand(key.d, false, key.d_pitch) +
         ", added pitch " + std::to_string(key.c_pitch) +
         (key.has_bias ? std::string(", bias ") + name_of(key.bias) : "") +
         (key.fast_accumulation ? ", fast accumulation" : "") +
         (key.scale_blocks > 1 ? ", scale blocks " + std::to_string(key.scale_blocks) : "") + ")";
}

struct GemmPlans::Plan {
  explicit Plan(const GemmKey&);
  // What the heuristic says, up to `most` results; refuses where there is none.
  [[nodiscard]] std::vector<cublasLtMatmulAlgo_t> propose(cublasLtHandle_t, const GemmKey&, std::size_t workspace_bytes,
                                                          int most) const;
  // SUCCESS: cuBLASLt can compute this product so, within the workspace.
  cublasStatus_t check(cublasLtHandle_t, const cublasLtMatmulAlgo_t&, std::size_t workspace_bytes) const;

  DescHandle desc;  // its pointers are set anew for every call
  LayoutHandle a, b, c, d;
  cublasLtMatmulAlgo_t algorithm{};
};

GemmPlans::Plan::Plan(const GemmKey& key) {
  cublasLtMatmulDesc_t made = nullptr;
  QE_CUBLAS_CHECK(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  desc.reset(made);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSA, key.b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSB, key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(key.fast_accumulation));
  if (key.scale_blocks > 1) {
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(b_form(key)));
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(a_form(key)));
  }
  if (key.has_bias) {
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(key.bias));
  }
  a = key.b_transposed ? layout(key.b, key.k, key.n, key.b_pitch) : layout(key.b, key.n, key.k, key.b_pitch);
  b = key.a_transposed ? layout(key.a, key.k, key.m, key.a_pitch) : layout(key.a, key.m, key.k, key.a_pitch);
  c = layout(key.d, key.m, key.n, key.c_pitch);
  d = layout(key.d, key.m, key.n, key.d_pitch);
  // One made-up address stands for every pointer, so that no call's addresses enter the choice.
  const void* aligned = reinterpret_cast<const void*>(std::uintptr_t{kAlignment});
  set_pointers(desc, key, aligned, aligned, aligned);
}

std::vector<cublasLtMatmulAlgo_t> GemmPlans::Plan::propose(cublasLtHandle_t handle, const GemmKey& key,
                                                           std::size_t workspace_bytes, int most) const {
  cublasLtMatmulPreference_t made = nullptr;
  QE_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&made));
  const PreferenceHandle preference(made);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes});
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductions);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);

  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(most));
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, desc.get(), a.get(), b.get(), c.get(), d.get(),
                                                               preference.get(), most, results.data(), &found);
  if (status != CUBLAS_STATUS_SUCCESS) refuse(key, "has no algorithm for", status);
  const cublasStatus_t first = results.front().state;
  if (found == 0 || first != CUBLAS_STATUS_SUCCESS) refuse(key, "has no algorithm for", first);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(result.algo);
  }
  return algorithms;
}

cublasStatus_t GemmPlans::Plan::check(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& asked,
                                      std::size_t workspace_bytes) const {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(handle, desc.get(), a.get(), b.get(), c.get(), d.get(), &asked, &result);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  return result.workspaceSize <= workspace_bytes ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

GemmPlans::GemmPlans() { QE_CUBLAS_CHECK(cublasLtCreate(&handle_)); }
GemmPlans::~GemmPlans() { (void)cublasLtDestroy(handle_); }

GemmPlans::Plan& GemmPlans::plan_for(const GemmKey& key, std::size_t workspace_bytes) {
  std::unique_ptr<Plan>& plan = plans_[key];
  if (plan) return *plan;
  auto made = std::make_unique<Plan>(key);
  if (const auto entry = entries_.find(to_string(key)); entry != entries_.end()) {
    const std::optional<cublasLtMatmulAlgo_t> stored = algorithm_from(entry->second);
    const cublasStatus_t status = stored ? made->check(handle_, *stored, workspace_bytes) : CUBLAS_STATUS_INVALID_VALUE;
    if (status != CUBLAS_STATUS_SUCCESS) refuse_entry(key, entry->second, source_, status);
    made->algorithm = *stored;
  } else {
    made->algorithm = made->propose(handle_, key, workspace_bytes, 1).front();
  }
  plan = std::move(made);
  return *plan;
}

void GemmPlans::use(std::span<const GemmChoice> entries, const std::string& source) {
  plans_.clear();
  entries_.clear();
  for (const GemmChoice& entry : entries) entries_.emplace(entry.product, entry.algorithm);
  source_ = source;
}

void GemmPlans::run(const Launch& launch, const Scratch& workspace, const GemmArgs& args) {
  const GemmKey key(args);
  check(args, key);
  const Plan& plan = plan_for(key, workspace.bytes);
  std::pair<const float*, const float*> scales{args.a_scale_inv.as<float>(), args.b_scale_inv.as<float>()};
  if (key.scale_blocks > 1) scales = expand_scales(launch, key, args);
  set_pointers(plan.desc, key, scales.first, scales.second, args.bias.data);
  const float alpha = 1.0f;
  const float beta = args.accumulate || !args.residual.empty() ? 1.0f : 0.0f;
  const void* added = args.residual.empty() ? args.d.data : args.residual.data;
  const cublasStatus_t status = cublasLtMatmul(handle_, plan.desc.get(), &alpha, args.b.data, plan.a.get(), args.a.data,
                                               plan.b.get(), &beta, added, plan.c.get(), args.d.data, plan.d.get(),
                                               &plan.algorithm, workspace.data, workspace.bytes, launch.stream);
  if (status != CUBLAS_STATUS_SUCCESS) refuse(key, "failed to run", status);
}

void GemmPlans::prepare(std::span<const GemmArgs> products, std::size_t workspace_bytes) {
  std::set<std::string> refusals;
  for (const GemmArgs& args : products) {
    try {
      (void)plan_for(GemmKey(args), workspace_bytes);
    } catch (const DeviceError& e) {
      refusals.insert(e.what());
    }
  }
  if (refusals.empty()) return;
  std::string text = "The config needs matrix products that this GPU's library does not have:";
  for (const std::string& refusal : refusals) text += "\n  " + refusal;
  throw DeviceError(text);
}

std::vector<GemmChoice> GemmPlans::choices() const {
  std::vector<GemmChoice> all;
  for (const auto& [key, plan] : plans_) {
    if (plan) all.push_back({to_string(key), hex(plan->algorithm)});
  }
  return all;
}

std::vector<std::string> GemmPlans::candidates(const GemmArgs& args, std::size_t workspace_bytes) const {
  const GemmKey key(args);
  const Plan plan(key);
  // Asked for one first, as plan_for() asks: that a longer list begins with the same one is promised nowhere.
  std::vector<std::string> all;
  for (const int most : {1, kMostCandidates}) {
    for (const cublasLtMatmulAlgo_t& algorithm : plan.propose(handle_, key, workspace_bytes, most)) {
      std::string words = hex(algorithm);
      if (std::find(all.begin(), all.end(), words) == all.end()) all.push_back(std::move(words));
    }
  }
  return all;
}

}  // namespace qe::cuda

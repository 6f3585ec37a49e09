// The model's parameters by global name, in global order: what blocks declare, what stages own, what the optimizer
// walks. Owns no memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/stage/layer_config.h"
#include "core/tensor.h"

namespace qe {

// kMatrix: a GEMM weight: its gradient comes out of W, it decays, the ledger counts it as a matrix.
// kVector: norm, bias, token and position embedding: its gradient comes out of I, in FP32, and always adds.
enum class ParameterKind : std::uint8_t { kMatrix, kVector };

enum class Init : std::uint8_t { kZeros, kOnes, kNormal };

struct Parameter {
  std::string name;  // "layers.3.attention.query.weight": the same under every cut of the model
  ParameterKind kind = ParameterKind::kMatrix;
  Shape shape;                 // as stored, padding rows included
  std::int64_t real_rows = 0;  // rows from here on are padding: initially zero, and their gradients are zero
  Init init = Init::kZeros;
  float init_std = 0.0f;
  bool adjacent = false;     // laid out directly behind the parameter before it: the two are used as one
  bool sparse_rows = false;  // few rows have a gradient in a step: they are counted (GradMemory::touched)
};

inline constexpr float kInitStd = 0.02f;
// Output projections start smaller, so that the residual stream's variance does not grow with depth: 0.02 /
// sqrt(2·layers).
float output_init_std(const ModelConfig&);
std::string layer_name(int layer);  // "layers.3"

// Parameters in global order: embedding, layers ascending, final norm and head.
class ParameterList {
 public:
  void add(Parameter p) { parameters_.push_back(std::move(p)); }

  [[nodiscard]] int size() const noexcept { return static_cast<int>(parameters_.size()); }
  [[nodiscard]] const Parameter& operator[](int i) const { return parameters_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] int index(const std::string& name) const;  // QE_EXPECTS that it is there
  [[nodiscard]] auto begin() const noexcept { return parameters_.begin(); }
  [[nodiscard]] auto end() const noexcept { return parameters_.end(); }

 private:
  std::vector<Parameter> parameters_;
};

// Which part of the model a stage owns.
struct StageRange {
  int first_layer = 0;
  int num_layers = 0;
  bool embedding = false;
  bool head = false;
};

// Parameters of a stage, in global order.
ParameterList stage_parameters(const StageConfig&, const StageRange&);
// The whole model as one stage: global index = position here.
ParameterList model_parameters(const StageConfig&);

// Layers of each stage: an explicit list, or an even division whose remainder goes to the first stages.
std::vector<StageRange> cut_into_stages(int num_layers, int stages, std::span<const int> layers_per_stage);

// Initial FP32 values, row-major, of shape.elements(): a function of (seed, name) and the shape alone (design.md 3).
std::vector<float> initial_values(const Parameter&, std::uint64_t seed);

// Offsets, in elements, of the selected parameters in one contiguous buffer: each 256-byte aligned unless adjacent.
struct ParameterOffsets {
  std::vector<std::int64_t> offset;  // by parameter; −1 where not selected
  std::int64_t total = 0;
};
template <class Select>
ParameterOffsets lay_out(const ParameterList& list, Select select) {
  constexpr std::int64_t kAlign = 128;  // elements: 256 bytes of BF16, 512 of FP32
  ParameterOffsets out;
  for (const Parameter& p : list) {
    if (!select(p)) {
      out.offset.push_back(-1);
      continue;
    }
    if (!p.adjacent) out.total = (out.total + kAlign - 1) / kAlign * kAlign;
    out.offset.push_back(out.total);
    out.total += p.shape.elements();
  }
  return out;
}

}  // namespace qe

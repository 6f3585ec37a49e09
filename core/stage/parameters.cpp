#include "core/stage/parameters.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "core/error.h"
#include "core/random.h"
#include "core/stage/attention_block.h"
#include "core/stage/embedding.h"
#include "core/stage/mlp_block.h"
#include "core/stage/output_head.h"

namespace qe {

int ParameterList::index(const std::string& name) const {
  for (int i = 0; i < size(); ++i) {
    if ((*this)[i].name == name) return i;
  }
  QE_EXPECTS(false, ("no parameter named " + name).c_str());
}

float output_init_std(const ModelConfig& model) {
  return kInitStd / std::sqrt(2.0f * static_cast<float>(model.num_layers));
}

std::string layer_name(int layer) { return "layers." + std::to_string(layer); }

ParameterList stage_parameters(const StageConfig& config, const StageRange& range) {
  ParameterList list;
  if (range.embedding) Embedding::declare(list, config.model);
  for (int layer = range.first_layer; layer < range.first_layer + range.num_layers; ++layer) {
    AttentionBlock::declare(list, config.model, layer);
    MlpBlock::declare(list, config.model, layer);
  }
  if (range.head) OutputHead::declare(list, config.model);
  return list;
}

ParameterList model_parameters(const StageConfig& config) {
  return stage_parameters(config, {0, config.model.num_layers, true, true});
}

std::vector<StageRange> cut_into_stages(int num_layers, int stages, std::span<const int> layers_per_stage) {
  std::vector<StageRange> ranges;
  int first = 0;
  for (int s = 0; s < stages; ++s) {
    const int count = layers_per_stage.empty() ? num_layers / stages + (s < num_layers % stages ? 1 : 0)
                                               : layers_per_stage[static_cast<std::size_t>(s)];
    ranges.push_back({first, count, s == 0, s == stages - 1});
    first += count;
  }
  QE_EXPECTS(first == num_layers, "the stages hold every layer exactly once");
  return ranges;
}

namespace {

// log(x) of 0 < x < 1 from additions, multiplications and divisions alone: the C library's may differ by machine.
double log_unit(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // m in [0.5, 1)
  if (m < 0.70710678118654752) {
    m *= 2.0;
    --exponent;
  }
  const double t = (m - 1.0) / (m + 1.0);
  const double t2 = t * t;
  double series = 0.0;
  for (int k = 19; k >= 1; k -= 2) series = series * t2 + 1.0 / k;
  return 2.0 * t * series + exponent * 0.69314718055994531;
}

// Standard normal number `element` of a stream: Marsaglia's polar method, retried under the next counter.
float normal(std::uint64_t key, std::uint64_t element) {
  for (std::uint64_t attempt = 0;; ++attempt) {
    const RandomWords r = philox(key, attempt, element);
    const double x = (static_cast<double>(r.w[0]) + 0.5) * 0x1p-31 - 1.0;
    const double y = (static_cast<double>(r.w[1]) + 0.5) * 0x1p-31 - 1.0;
    const double s = x * x + y * y;
    if (s < 1.0) return static_cast<float>(x * std::sqrt(-2.0 * log_unit(s) / s));
  }
}

}  // namespace

std::vector<float> initial_values(const Parameter& p, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(p.shape.elements()), 0.0f);
  const auto real = static_cast<std::size_t>(p.real_rows * p.shape.cols);
  if (p.init == Init::kZeros) return values;
  const std::uint64_t key = random_key(seed, p.name);
  const auto fill = [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) values[i] = p.init == Init::kOnes ? 1.0f : p.init_std * normal(key, i);
  };
  // A value depends on its index alone, so large parameters are cut among threads: a billion take a minute on one.
  constexpr std::size_t kPerThread = std::size_t{1} << 20;
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t share = std::max(kPerThread, (real + cores - 1) / cores);
  std::vector<std::jthread> helpers;
  for (std::size_t first = share; first < real; first += share) {
    helpers.emplace_back(fill, first, std::min(real, first + share));
  }
  fill(0, std::min(real, share));
  helpers.clear();  // joins
  return values;
}

}  // namespace qe

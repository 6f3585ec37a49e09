// Parameters of an optimizer's test: memory, random states, a launch. Knows no expected value.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "core/adamw_rule.h"
#include "tests/ops/device_arrays.h"

namespace qe::test {

inline constexpr AdamWArgs kHyper{{}, nullptr, 0.9f, 0.95f, 1e-8f, 0.1f, 42};

inline std::vector<float> random_values(std::size_t n, std::uint64_t stream, float magnitude) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = magnitude * (static_cast<float>(philox(stream, 7, i).w[0]) * 0x1p-31f - 1.0f);
  }
  return values;
}

inline OptimizerScalars scalars_at(std::uint32_t step, float learning_rate, float beta1 = 0.9f, float beta2 = 0.95f) {
  OptimizerScalars s{};
  s.learning_rate = learning_rate;
  s.step_size =
      static_cast<float>(static_cast<double>(learning_rate) / (1.0 - std::pow(static_cast<double>(beta1), step)));
  s.root_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(beta2), step)));
  s.step = step;
  s.clip = 1.0f;
  return s;
}

// A parameter with its moments and gradient on the device.
struct Parameter {
  AdamWItem item;
  Parameter(DeviceArrays& d, Shape shape, DType moments, bool decay, std::int64_t pad = 0) {
    const auto matrix = [&](DType type) { return d.matrix(type, shape.rows, shape.cols, pad ? shape.cols + pad : 0); };
    item = {matrix(DType::kF32), matrix(DType::kF32), matrix(moments), matrix(moments), 5, decay, false};
  }
};
inline void update(DeviceArrays& d, const std::vector<AdamWItem>& items, const OptimizerScalars& scalars,
                   AdamWArgs hyper = kHyper) {
  hyper.items = items;
  hyper.scalars = d.array<OptimizerScalars>({scalars});
  d.ops().adamw(d.stream(), hyper);
}

inline bool same_bytes(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// What one parameter holds, as FP32.
struct State {
  std::vector<float> master, gradient, moment1, moment2;
};
inline void set(DeviceArrays& d, const AdamWItem& item, const State& s) {
  d.set(item.master, s.master);
  d.set(item.gradient, s.gradient);
  d.set(item.moment1, s.moment1);
  d.set(item.moment2, s.moment2);
}
inline State make_state(std::size_t n, std::uint64_t stream, DType gradient, DType moments) {
  State s = {random_values(n, stream, 1.0f), random_values(n, stream + 1, 0.03f), random_values(n, stream + 2, 0.01f),
             random_values(n, stream + 3, 1e-4f)};
  for (std::size_t i = 0; i < n; ++i) {
    s.moment2[i] = std::abs(s.moment2[i]);
    if (i / 96 % 2 == 0) {
      if (i % 7 == 3) s.gradient[i] = s.moment1[i] = s.moment2[i] = 0.0f;  // a row that no token named
      if (i % 11 == 5) s.gradient[i] *= 1e-36f;                            // subnormal on the way
      if (i % 13 == 6) s.moment1[i] *= 1e-38f;
      if (i % 17 == 8) s.moment2[i] *= 1e-37f;
    }
    if (gradient == DType::kBF16) s.gradient[i] = round_bf16(s.gradient[i]);
    if (moments == DType::kBF16) s.moment1[i] = round_bf16(s.moment1[i]);
    if (moments == DType::kBF16) s.moment2[i] = round_bf16(s.moment2[i]);
  }
  return s;
}
}  // namespace qe::test

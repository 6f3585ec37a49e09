// BF16 moments: what stochastic rounding promises, and that round-to-nearest would not do.
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "core/adamw_rule.h"
#include "tests/ops/device_arrays.h"

using namespace qe;
using qe::test::DeviceArrays;
using qe::test::on_every_backend;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// One update with learning rate 0; `items` share seed and step.
void update(DeviceArrays& d, const std::vector<AdamWItem>& items, std::uint32_t step, std::uint64_t seed, float beta2) {
  OptimizerScalars s{};
  s.step_size = s.learning_rate;
  s.root_scale = 1.0f;
  s.step = step;
  s.clip = 1.0f;
  d.ops().adamw(d.stream(), {items, d.array<OptimizerScalars>({s}), 0.9f, beta2, 1e-8f, 0.0f, seed});
}

AdamWItem parameter(DeviceArrays& d, Shape shape, DType moments, std::int64_t index, std::int64_t pitch = 0) {
  return {d.matrix(DType::kF32, shape.rows, shape.cols, pitch),
          d.matrix(DType::kF32, shape.rows, shape.cols, pitch),
          d.matrix(moments, shape.rows, shape.cols, pitch),
          d.matrix(moments, shape.rows, shape.cols, pitch),
          index,
          false,
          false};
}

double mean_of(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

}  // namespace

TEST_CASE("stochastic rounding keeps what BF16 can hold, whatever the bits") {
  for (std::uint32_t u = 0; u < 0x10000u; ++u) {
    const float v = to_float({static_cast<std::uint16_t>(u)});
    for (const std::uint32_t bits : {0u, 1u, 0x7fffu, 0xffffu, 0xffffffffu}) {
      const Bf16 r = stochastic_round_bf16(v, bits);
      if (std::isnan(v)) {
        REQUIRE(std::isnan(to_float(r)));
      } else {
        REQUIRE(r.bits == u);
      }
    }
  }
}

TEST_CASE("stochastic rounding takes the upper neighbour for exactly the share of bits that keeps the mean") {
  for (const std::uint32_t low : {1u, 0x1234u, 0x8000u, 0xffffu}) {
    for (const std::uint32_t high : {0x3f80u, 0xbf80u, 0x0000u, 0x0012u, 0x7f00u}) {
      const float v = std::bit_cast<float>((high << 16) | low);
      std::uint32_t away = 0;
      for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
        const std::uint32_t r = stochastic_round_bf16(v, bits).bits;
        REQUIRE((r == high || r == high + 1));
        away += r - high;
      }
      CHECK(away == low);
    }
  }
}

TEST_CASE("Inf stays Inf and the NaN with the lowest payload stays NaN") {
  CHECK(to_float(stochastic_round_bf16(kInf, 0xffffu)) == kInf);
  CHECK(to_float(stochastic_round_bf16(-kInf, 0xffffu)) == -kInf);
  CHECK(std::isnan(to_float(stochastic_round_bf16(std::bit_cast<float>(0x7f800001u), 0u))));
  CHECK(std::isnan(to_float(stochastic_round_bf16(std::bit_cast<float>(0x7fffffffu), 0xffffu))));
}

TEST_CASE("BF16 moments are the FP32 moments rounded with the documented word of each element") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{3, 8}, Shape{5, 7}, Shape{2, 301}, Shape{1, 1}, Shape{70, 260}}) {
      const AdamWItem exact = parameter(d, shape, DType::kF32, 11);
      const AdamWItem rounded = parameter(d, shape, DType::kBF16, 11, shape.cols + 3);
      std::vector<float> g(static_cast<std::size_t>(shape.elements()));
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = static_cast<float>(philox(1, 1, i).w[0]) * 0x1p-32f - 0.5f;
      d.set(exact.gradient, g);
      d.set(rounded.gradient, g);
      update(d, {exact, rounded}, 9, 77, 0.95f);
      const std::vector<float> m = d.get(exact.moment1), v = d.get(exact.moment2);
      const std::vector<float> rm = d.get(rounded.moment1), rv = d.get(rounded.moment2);
      for (std::size_t i = 0; i < g.size(); ++i) {
        const std::uint32_t word = philox<7>(77, (9ull << 32) | 11, i / 4).w[i % 4];
        REQUIRE(rm[i] == to_float(stochastic_round_bf16(m[i], word & 0xffffu)));
        REQUIRE(rv[i] == to_float(stochastic_round_bf16(v[i], word >> 16)));
      }
      CHECK(d.padding_intact(rounded.moment1));
      CHECK(d.get(exact.master) == d.get(rounded.master));
    }
  });
}

TEST_CASE("seed, step and parameter each change the bits") {
  on_every_backend([](DeviceArrays& d) {
    const auto moments_with = [&](std::uint64_t seed, std::uint32_t step, std::int64_t index) {
      const AdamWItem p = parameter(d, {1, 256}, DType::kBF16, index);
      d.set(p.gradient, std::vector<float>(256, 0.7f));
      update(d, {p}, step, seed, 0.95f);
      return d.get(p.moment2);
    };
    std::set<std::vector<float>> seen = {moments_with(1, 1, 0), moments_with(2, 1, 0), moments_with(1, 2, 0),
                                         moments_with(1, 1, 1)};
    CHECK(seen.size() == 4);
    seen.insert(moments_with(1, 1, 0));
    CHECK(seen.size() == 4);
  });
}

TEST_CASE("BF16 second moments shrink a hundredfold like FP32's; with round-to-nearest they would not") {
  struct Case {
    float beta2;
    std::uint32_t steps;    // until β₂^steps ≈ 1/400
    double tolerance;       // of the mean over the elements, relative
    bool nearest_is_stuck;  // β₂ = 0.95 moves by more than half a unit until it is close
  };
  on_every_backend([](DeviceArrays& d) {
    for (const Case c : {Case{0.95f, 117, 0.01, false}, Case{0.999f, 5990, 0.01, true}}) {
      INFO("beta2 " << c.beta2);
      constexpr std::size_t kCount = 1024;
      const AdamWItem exact = parameter(d, {1, kCount}, DType::kF32, 0);
      const AdamWItem rounded = parameter(d, {1, kCount}, DType::kBF16, 1);
      for (const AdamWItem& p : {exact, rounded}) {
        d.set(p.moment2, std::vector<float>(kCount, 1.0f));
        d.set(p.gradient, std::vector<float>(kCount, 0.08f));
      }
      float nearest = 1.0f;
      for (std::uint32_t step = 1; step <= c.steps; ++step) {
        update(d, {exact, rounded}, step, 2024, c.beta2);
        nearest = round_bf16(std::fma(c.beta2, nearest, (1.0f - c.beta2) * 0.08f * 0.08f));
      }
      const double want = d.get(exact.moment2)[0];
      CHECK(want < 0.01);
      CHECK(std::abs(mean_of(d.get(rounded.moment2)) / want - 1.0) < c.tolerance);
      CHECK(std::abs(mean_of(d.get(rounded.moment1)) / d.get(exact.moment1)[0] - 1.0) < c.tolerance);
      if (c.nearest_is_stuck) CHECK(nearest / want > 100.0);
    }
  });
}

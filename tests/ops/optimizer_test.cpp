// gradient_norm, clip_factor and adamw against oracles in double and against exact values.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/ops/adamw_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Norm {
  float squares, bad;
};
Norm norm_of(DeviceArrays& d, const Tensor& gradient, const std::vector<Tensor>& microbatch = {}) {
  float* squares = d.array<float>({-1.0f, -1.0f, -1.0f});
  float* bad = d.array<float>({-1.0f, -1.0f, -1.0f});
  d.ops().gradient_norm(d.stream(), {{{gradient, microbatch, 1}}, squares, bad});
  const std::vector<float> s = d.read(squares, 3), b = d.read(bad, 3);
  CHECK((s[0] == -1.0f && s[2] == -1.0f && b[0] == -1.0f && b[2] == -1.0f));  // other parameters' cells
  return {s[1], b[1]};
}

// The shared rule, element by element.
State after_update(State s, const AdamWItem& item, const OptimizerScalars& scalars) {
  const AdamWFactors f = {scalars.clip,        kHyper.beta1,
                          1.0f - kHyper.beta1, kHyper.beta2,
                          1.0f - kHyper.beta2, scalars.step_size,
                          scalars.root_scale,  item.decay ? scalars.learning_rate * kHyper.weight_decay : 0.0f,
                          kHyper.epsilon};
  for (std::size_t i = 0; i < s.master.size(); ++i) {
    const AdamWElement e = adamw_element({s.master[i], s.moment1[i], s.moment2[i]}, s.gradient[i], f);
    s.master[i] = e.weight;
    s.moment1[i] = e.moment1;
    s.moment2[i] = e.moment2;
    if (item.zero_gradient) s.gradient[i] = 0.0f;
    if (item.moment1.dtype == DType::kF32) continue;
    const std::uint32_t word =
        moment_rounding_words(kHyper.seed, scalars.step, static_cast<std::uint32_t>(item.global_index), i / 4).w[i % 4];
    s.moment1[i] = to_float(stochastic_round_bf16(e.moment1, moment1_bits(word)));
    s.moment2[i] = to_float(stochastic_round_bf16(e.moment2, moment2_bits(word)));
  }
  return s;
}

}  // namespace

TEST_CASE("a parameter's sum of squares is exact where it can be and assigned, not added") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      for (const Shape shape : {Shape{1, 1}, Shape{3, 5}, Shape{1, 16}, Shape{7, 33}, Shape{5, 3000}}) {
        std::vector<float> g(static_cast<std::size_t>(shape.elements()));
        double want = 0.0;
        for (std::size_t i = 0; i < g.size(); ++i) {
          g[i] = static_cast<float>(static_cast<int>(i % 9) - 4);
          want += g[i] * g[i];
        }
        const Norm n = norm_of(d, d.matrix(type, shape.rows, shape.cols, g));
        CHECK(n.squares == static_cast<float>(want));
        CHECK(n.bad == 0.0f);
      }
    }
  });
}

TEST_CASE("the tree of a parameter's sum depends on its shape, not on its row pitch") {
  on_every_backend([](DeviceArrays& d) {
    const std::vector<float> g = random_values(37 * 1111, 1, 1.0f);
    const Norm tight = norm_of(d, d.matrix(DType::kF32, 37, 1111, g));
    const Norm wide = norm_of(d, d.matrix(DType::kF32, 37, 1111, g, 1200));
    CHECK(tight.squares == wide.squares);
    double want = 0.0;
    for (const float v : g) want += static_cast<double>(v) * v;
    CHECK(std::abs(tight.squares - want) < 1e-6 * want);
  });
}

TEST_CASE("microbatch views are summed in index order into the main gradient, whose norm is taken") {
  on_every_backend([](DeviceArrays& d) {
    // 2^24 + 1 + 1 − 2^24 in FP32, in this order: 0. Any other order gives 1 or 2.
    const float big = 16777216.0f;
    const Tensor gradient = d.matrix(DType::kF32, 1, 3, {9, 9, 9}, 8);
    const std::vector<Tensor> views = {d.matrix(DType::kBF16, 1, 3, {big, 1, 2}, 16),
                                       d.matrix(DType::kBF16, 1, 3, {1, 1, 2}), d.matrix(DType::kBF16, 1, 3, {1, 1, 2}),
                                       d.matrix(DType::kBF16, 1, 3, {-big, 1, 2})};
    const Norm n = norm_of(d, gradient, views);
    CHECK(d.get(gradient) == std::vector<float>{0, 4, 8});
    CHECK(n.squares == 80.0f);
    CHECK(d.padding_intact(gradient));
  });
}

TEST_CASE("one NaN or Inf anywhere marks the parameter bad") {
  on_every_backend([](DeviceArrays& d) {
    for (const float poison : {kNaN, kInf, -kInf}) {
      for (const std::size_t at : {0u, 15u, 1030u, 2098u}) {
        std::vector<float> g(3 * 700, 1.0f);
        g[at] = poison;
        CHECK(norm_of(d, d.matrix(DType::kF32, 3, 700, g)).bad == 1.0f);
        CHECK(norm_of(d, d.matrix(DType::kBF16, 3, 700, g)).bad == 1.0f);
        const Tensor sum = d.matrix(DType::kF32, 3, 700);
        CHECK(norm_of(d, sum, {d.matrix(DType::kBF16, 3, 700, g)}).bad == 1.0f);
      }
    }
  });
}

TEST_CASE("the clip factor is min(1, max_norm / (norm + 1e-6)) and 1 without clipping") {
  on_every_backend([](DeviceArrays& d) {
    const auto clip = [&](const std::vector<float>& squares, const std::vector<float>& bad, float max_norm) {
      OptimizerScalars s{};
      s.step = 7;
      auto* scalars = d.array<OptimizerScalars>({s});
      d.ops().clip_factor(
          d.stream(), {d.array(squares), d.array(bad), static_cast<std::int64_t>(squares.size()), max_norm, scalars});
      return d.read(scalars, 1)[0];
    };
    const std::vector<float> fine(3, 0.0f);
    const OptimizerScalars large = clip({9.0f, 0.0f, 16.0f}, fine, 1.0f);
    CHECK(large.norm == 5.0f);
    CHECK(large.clip == 1.0f / (5.0f + 1e-6f));
    CHECK(large.skip == 0);
    CHECK(large.first_bad == -1);
    CHECK(large.step == 7);
    CHECK(clip({9.0f, 0.0f, 16.0f}, fine, 6.0f).clip == 1.0f);
    CHECK(clip({9.0f, 0.0f, 16.0f}, fine, 0.0f).clip == 1.0f);
    CHECK(clip({0.0f, 0.0f, 0.0f}, fine, 1.0f).clip == 1.0f);
    // Below FP32's last place the partials still count: their sum is taken in double.
    const std::vector<float> many = {16777216.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    CHECK(clip(many, std::vector<float>(5, 0.0f), 0.0f).norm == 4096.0f + 0x1p-11f);

    const OptimizerScalars bad = clip({1.0f, kNaN, kInf}, {0.0f, 1.0f, 1.0f}, 1.0f);
    CHECK(bad.skip == 1);
    CHECK(bad.clip == 0.0f);
    CHECK(bad.first_bad == 1);
    CHECK(!std::isfinite(bad.norm));
    // Every gradient finite, but a sum of squares that is not: that parameter is named.
    const OptimizerScalars overflow = clip({1.0f, 1.0f, kInf}, fine, 1.0f);
    CHECK(overflow.skip == 1);
    CHECK(overflow.first_bad == 2);
    CHECK(overflow.norm == kInf);
  });
}

TEST_CASE("one element moves to the exact values of the written formula") {
  struct Case {
    float w, m, v, g, clip, step_size, root_scale;
    bool decay;
    float want_w, want_m, want_v;  // computed with rational numbers, rounded after every operation
  };
  const Case cases[] = {
      {1.7f, 0.0f, 0.0f, 0.3f, 1.0f, 3e-3f, 4.47213595f, true, 0x1.b31c32p0f, 0x1.eb8528p-6f, 0x1.26e98p-8f},
      {-0.02f, 1e-3f, 4e-6f, -7e-3f, 0.25f, 1.1070111e-3f, 2.6478907f, true, -0x1.4a2af8p-6f, 0x1.7c1bdap-11f,
       0x1.094a2cp-18f},
      {0.5f, -0.3f, 0.2f, 1e-20f, 0.6f, 3e-4f, 1.0f, false, 0x1.00185cp-1f, -0x1.147ae2p-2f, 0x1.851eb8p-3f},
  };
  on_every_backend([&](DeviceArrays& d) {
    for (const Case& c : cases) {
      const Parameter p(d, {1, 1}, DType::kF32, c.decay);
      d.set(p.item.master, {c.w});
      d.set(p.item.moment1, {c.m});
      d.set(p.item.moment2, {c.v});
      d.set(p.item.gradient, {c.g});
      OptimizerScalars s = scalars_at(1, 3e-4f);
      s.clip = c.clip;
      s.step_size = c.step_size;
      s.root_scale = c.root_scale;
      update(d, {p.item}, s);
      CHECK(d.get(p.item.master)[0] == c.want_w);
      CHECK(d.get(p.item.moment1)[0] == c.want_m);
      CHECK(d.get(p.item.moment2)[0] == c.want_v);
    }
  });
}

TEST_CASE("ten steps of AdamW follow an oracle in double, decay on matrices only") {
  on_every_backend([](DeviceArrays& d) {
    for (const bool decay : {true, false}) {
      constexpr std::size_t kCount = 9 * 300;
      const Parameter p(d, {9, 300}, DType::kF32, decay, 20);
      const std::vector<float> start = random_values(kCount, 2, 1.0f);
      d.set(p.item.master, start);
      std::vector<double> w(start.begin(), start.end()), m(kCount, 0.0), v(kCount, 0.0);
      const double b1 = 0.9f, b2 = 0.95f, lr = 0.01f, wd = 0.1f, eps = 1e-8f;
      for (std::uint32_t step = 1; step <= 10; ++step) {
        const std::vector<float> g = random_values(kCount, 100 + step, 0.02f);
        d.set(p.item.gradient, g);
        OptimizerScalars s = scalars_at(step, 0.01f);
        s.clip = 0.5f;
        update(d, {p.item}, s);
        for (std::size_t i = 0; i < kCount; ++i) {
          const double clipped = g[i] * 0.5;
          m[i] = b1 * m[i] + (1 - b1) * clipped;
          v[i] = b2 * v[i] + (1 - b2) * clipped * clipped;
          if (decay) w[i] -= lr * wd * w[i];
          w[i] -= lr * (m[i] / (1 - std::pow(b1, step))) / (std::sqrt(v[i] / (1 - std::pow(b2, step))) + eps);
        }
      }
      const std::vector<float> got = d.get(p.item.master), gm = d.get(p.item.moment1), gv = d.get(p.item.moment2);
      for (std::size_t i = 0; i < kCount; ++i) {
        REQUIRE(std::abs(got[i] - w[i]) < 2e-6);
        REQUIRE(std::abs(gm[i] - m[i]) < 1e-8);
        REQUIRE(std::abs(gv[i] - v[i]) < 1e-6 * v[i]);
      }
      CHECK(d.padding_intact(p.item.master));
      CHECK(d.padding_intact(p.item.moment2));
    }
  });
}

TEST_CASE("a skipped step clears the vectors' gradients and changes nothing else") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType moments : {DType::kF32, DType::kBF16}) {
      Parameter matrix(d, {4, 8}, moments, true), vector(d, {1, 8}, moments, false);
      vector.item.zero_gradient = true;
      for (const Tensor& t : {matrix.item.master, matrix.item.gradient, matrix.item.moment1, matrix.item.moment2}) {
        d.set(t, std::vector<float>(32, 0.5f));
      }
      for (const Tensor& t : {vector.item.master, vector.item.moment1, vector.item.moment2}) {
        d.set(t, std::vector<float>(8, 0.5f));
      }
      d.set(vector.item.gradient, std::vector<float>(8, kNaN));
      OptimizerScalars s = scalars_at(3, 0.1f);
      s.skip = 1;
      s.clip = 0.0f;
      update(d, {matrix.item, vector.item}, s);
      for (const Tensor& t : {matrix.item.master, matrix.item.gradient, matrix.item.moment1, matrix.item.moment2}) {
        CHECK(d.get(t) == std::vector<float>(32, 0.5f));
      }
      for (const Tensor& t : {vector.item.master, vector.item.moment1, vector.item.moment2}) {
        CHECK(d.get(t) == std::vector<float>(8, 0.5f));
      }
      CHECK(d.get(vector.item.gradient) == std::vector<float>(8, 0.0f));

      d.set(vector.item.gradient, std::vector<float>(8, 1.0f));
      s.skip = 0;
      s.clip = 1.0f;
      update(d, {matrix.item, vector.item}, s);
      CHECK(d.get(vector.item.gradient) == std::vector<float>(8, 0.0f));
      CHECK(d.get(matrix.item.gradient) == std::vector<float>(32, 0.5f));
      CHECK(d.get(vector.item.master)[0] < 0.5f);
    }
  });
}

TEST_CASE("a BF16 main gradient gives the update of its FP32 value") {
  on_every_backend([](DeviceArrays& d) {
    Parameter wide(d, {3, 7}, DType::kF32, true), narrow(d, {3, 7}, DType::kF32, true);
    narrow.item.gradient = d.matrix(DType::kBF16, 3, 7, 8);
    std::vector<float> g = random_values(21, 6, 1.0f);
    for (float& v : g) v = round_bf16(v);
    d.set(wide.item.gradient, g);
    d.set(narrow.item.gradient, g);
    update(d, {wide.item, narrow.item}, scalars_at(1, 0.1f));
    CHECK(d.get(wide.item.master) == d.get(narrow.item.master));
  });
}

TEST_CASE("every element of every parameter of a launch moves by the shared rule, bit for bit") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType moments : {DType::kF32, DType::kBF16}) {
      std::vector<AdamWItem> items;
      std::vector<State> states;
      // Around a tile of 64 × 128, tall, flat and tiny; rows that begin on wide accesses and not.
      for (const Shape shape :
           {Shape{1, 1}, Shape{64, 128}, Shape{65, 132}, Shape{3, 5}, Shape{130, 260}, Shape{700, 8}, Shape{1, 9000},
            Shape{1, 8191}, Shape{5, 3000}, Shape{67, 129}, Shape{2100, 3}}) {
        for (const std::int64_t pad : {0, 4, 3}) {
          const std::size_t k = items.size();
          const DType type = k % 2 == 0 ? DType::kF32 : DType::kBF16;
          Parameter p(d, shape, moments, k % 3 != 0, pad);
          p.item.gradient = d.matrix(type, shape.rows, shape.cols, pad == 0 ? 0 : shape.cols + 2 * pad);
          p.item.global_index = static_cast<std::int64_t>(7 * k);
          p.item.zero_gradient = k % 4 == 1;
          states.push_back(make_state(static_cast<std::size_t>(shape.elements()), 10 * k, type, moments));
          set(d, p.item, states.back());
          items.push_back(p.item);
        }
      }
      OptimizerScalars s = scalars_at(3, 0.01f);
      s.clip = 0.37f;
      update(d, items, s);
      for (std::size_t k = 0; k < items.size(); ++k) {
        INFO("item " << k << ", " << items[k].master.shape.rows << " x " << items[k].master.shape.cols);
        const State want = after_update(states[k], items[k], s);
        CHECK(same_bytes(d.get(items[k].master), want.master));
        CHECK(same_bytes(d.get(items[k].gradient), want.gradient));
        CHECK(same_bytes(d.get(items[k].moment1), want.moment1));
        CHECK(same_bytes(d.get(items[k].moment2), want.moment2));
      }
    }
  });
}

TEST_CASE("a parameter's sum of squares does not depend on pitch, alignment or what else is in the launch") {
  on_every_backend([](DeviceArrays& d) {
    const Tensor small = d.matrix(DType::kF32, 1, 3), large = d.matrix(DType::kF32, 301, 130);
    for (const Shape shape : {Shape{70, 1300}, Shape{200, 24}, Shape{1, 20000}, Shape{5, 7}}) {
      const std::vector<float> g = random_values(static_cast<std::size_t>(shape.elements()), 31, 1.0f);
      const float alone = norm_of(d, d.matrix(DType::kF32, shape.rows, shape.cols, g)).squares;
      double want = 0.0;
      for (const float v : g) want += static_cast<double>(v) * v;
      CHECK(std::abs(alone - want) <= 1e-6 * want);
      for (const std::int64_t pad : {0, 3, 8}) {
        std::vector<GradientItem> items;
        for (std::int64_t k = 0; k < 1100; ++k) {  // more than a block has threads
          items.push_back({k % 100 == 0 ? large : small, {}, k});
        }
        items[777].gradient = d.matrix(DType::kF32, shape.rows, shape.cols, g, pad == 0 ? 0 : shape.cols + pad);
        float* squares = d.array(std::vector<float>(1100, -1.0f));
        float* bad = d.array(std::vector<float>(1100, -1.0f));
        d.ops().gradient_norm(d.stream(), {items, squares, bad});
        std::vector<float> got = d.read(squares, 1100);
        CHECK(got[777] == alone);
        got[777] = 0.0f;
        CHECK(got == std::vector<float>(1100, 0.0f));
        CHECK(d.read(bad, 1100) == std::vector<float>(1100, 0.0f));
      }
    }
  });
}

TEST_CASE("a large parameter's sum of squares is exact on small integers") {
  on_every_backend([](DeviceArrays& d) {
    std::vector<float> g(1003 * 1000);
    double want = 0.0;
    for (std::size_t i = 0; i < g.size(); ++i) {
      g[i] = static_cast<float>(static_cast<int>(i % 7) - 3);
      want += g[i] * g[i];
    }
    for (const DType type : {DType::kF32, DType::kBF16}) {
      CHECK(norm_of(d, d.matrix(type, 1003, 1000, g)).squares == static_cast<float>(want));
      CHECK(norm_of(d, d.matrix(type, 1000, 1003, g)).squares == static_cast<float>(want));
    }
  });
}

TEST_CASE("views of any pitch are summed in index order over whatever the main gradient held") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{130, 200}, Shape{67, 129}, Shape{1, 9001}}) {
      const auto n = static_cast<std::size_t>(shape.elements());
      std::vector<Tensor> views;
      std::vector<float> want;
      for (std::uint64_t m = 0; m < 5; ++m) {
        std::vector<float> v = random_values(n, 50 + m, m == 2 ? 1000.0f : 1.0f);
        for (float& x : v) x = round_bf16(x);
        views.push_back(d.matrix(DType::kBF16, shape.rows, shape.cols, v,
                                 m % 2 == 0 ? 0 : shape.cols + 4 * static_cast<std::int64_t>(m)));
        if (m == 0) want.assign(n, 0.0f);
        for (std::size_t i = 0; i < n; ++i) want[i] = m == 0 ? v[i] : want[i] + v[i];
      }
      for (const std::int64_t pad : {0, 4, 1}) {
        const Tensor gradient =
            d.matrix(DType::kF32, shape.rows, shape.cols, std::vector<float>(n, kNaN), pad == 0 ? 0 : shape.cols + pad);
        const Norm norm = norm_of(d, gradient, views);
        CHECK(same_bytes(d.get(gradient), want));
        CHECK(norm.squares == norm_of(d, d.matrix(DType::kF32, shape.rows, shape.cols, want)).squares);
        CHECK(norm.bad == 0.0f);
        if (pad != 0) CHECK(d.padding_intact(gradient));
      }
    }
  });
}

TEST_CASE("a finite gradient whose square overflows is not bad, but its sum is infinite") {
  on_every_backend([](DeviceArrays& d) {
    const Norm one = norm_of(d, d.matrix(DType::kF32, 1, 3, {1.0f, 1e30f, 1.0f}));
    CHECK(one.squares == kInf);
    CHECK(one.bad == 0.0f);
    const Norm many = norm_of(d, d.matrix(DType::kF32, 300, 130, std::vector<float>(300 * 130, 1e17f)));
    CHECK(many.squares == kInf);
    CHECK(many.bad == 0.0f);
  });
}

TEST_CASE("the norm is the root of the partials' sum in index order, whatever their number") {
  on_every_backend([](DeviceArrays& d) {
    for (const std::size_t count : {1u, 255u, 256u, 257u, 3000u}) {
      std::vector<float> squares = random_values(count, 60, 1.0f);
      double sum = 0.0;
      for (std::size_t i = 0; i < count; ++i) {
        squares[i] = squares[i] * squares[i] * (i % 5 == 0 ? 1e12f : 1e-9f);
        sum += static_cast<double>(squares[i]);
      }
      std::vector<float> bad(count, 0.0f);
      auto* scalars = d.array<OptimizerScalars>({OptimizerScalars{}});
      const auto run = [&] {
        d.ops().clip_factor(d.stream(),
                            {d.array(squares), d.array(bad), static_cast<std::int64_t>(count), 1.0f, scalars});
        return d.read(scalars, 1)[0];
      };
      CHECK(run().norm == static_cast<float>(std::sqrt(sum)));
      bad[count - 1] = bad[count / 2] = 1.0f;
      CHECK(run().first_bad == static_cast<std::int32_t>(count / 2));
    }
  });
}

TEST_CASE("the update has the rule's bits whatever the moments' exponents") {
  on_every_backend([](DeviceArrays& d) {
    const auto spread = [](std::size_t n, std::uint64_t stream, float low, float high, bool negative) {
      std::vector<float> values(n);  // every exponent of [low, high] as often
      const std::uint32_t first = std::bit_cast<std::uint32_t>(low), last = std::bit_cast<std::uint32_t>(high);
      for (std::size_t i = 0; i < n; ++i) {
        const RandomWords r = philox(stream, 8, i);
        values[i] = std::bit_cast<float>(first + r.w[0] % (last - first));
        if (negative && (r.w[1] & 1u) != 0) values[i] = -values[i];
      }
      return values;
    };
    constexpr std::size_t kCount = 512 * 1024;
    const Parameter p(d, {512, 1024}, DType::kF32, true);
    for (const std::uint32_t step : {1u, 10u, 400u}) {
      State s = {random_values(kCount, 70, 1.0f), std::vector<float>(kCount, 0.0f), {}, {}};
      for (const bool narrow : {true, false}) {  // what training meets, then every finite size
        s.moment1 = spread(kCount, 71 + step, narrow ? 1e-12f : 1e-44f, narrow ? 1.0f : 1e30f, true);
        s.moment2 = spread(kCount, 72 + step, narrow ? 1e-20f : 1e-44f, narrow ? 1.0f : 1e30f, false);
        set(d, p.item, s);
        const OptimizerScalars scalars = scalars_at(step, 1e-3f);
        update(d, {p.item}, scalars);
        const State want = after_update(s, p.item, scalars);
        CHECK(same_bytes(d.get(p.item.master), want.master));
        CHECK(same_bytes(d.get(p.item.moment1), want.moment1));
        CHECK(same_bytes(d.get(p.item.moment2), want.moment2));
      }
    }
  });
}

// Causal attention against a double-precision oracle: forward, gradients (themselves checked by finite differences),
// causality, grouped key heads, column ranges of a fused projection.
#include <cmath>
#include <vector>

#include "tests/ops/ops_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {

struct Case {
  DType type;
  int sequences, length, heads, kv_heads, dim;
  [[nodiscard]] std::int64_t tokens() const { return std::int64_t{sequences} * length; }
  [[nodiscard]] double scale() const { return 1.0 / std::sqrt(dim); }
  [[nodiscard]] std::size_t q_at(int token, int head) const {
    return static_cast<std::size_t>((token * heads + head) * dim);
  }
  [[nodiscard]] std::size_t k_at(int token, int head) const {
    return static_cast<std::size_t>((token * kv_heads + head / (heads / kv_heads)) * dim);
  }
};

using Values = std::vector<double>;
struct Forward {
  Values out, lse;
};

double product(const Values& a, std::size_t i, const Values& b, std::size_t j, int n) {
  double sum = 0;
  for (int d = 0; d < n; ++d) sum += a[i + static_cast<std::size_t>(d)] * b[j + static_cast<std::size_t>(d)];
  return sum;
}

// Calls visit(query token, head, first key token, probabilities of keys first..query, lse).
template <class Visit>
void for_each_row(const Case& c, const Values& q, const Values& k, const Visit& visit) {
  for (int head = 0; head < c.heads; ++head) {
    for (int t = 0; t < c.tokens(); ++t) {
      const int first = t / c.length * c.length;
      Values p;
      double sum = 0;
      for (int j = first; j <= t; ++j)
        p.push_back(std::exp(product(q, c.q_at(t, head), k, c.k_at(j, head), c.dim) * c.scale()));
      for (const double v : p) sum += v;
      for (double& v : p) v /= sum;
      visit(t, head, first, p, std::log(sum));
    }
  }
}

Forward attend(const Case& c, const Values& q, const Values& k, const Values& v) {
  Forward f{Values(q.size(), 0.0), Values(static_cast<std::size_t>(c.heads * c.tokens()), 0.0)};
  for_each_row(c, q, k, [&](int t, int head, int first, const Values& p, double lse) {
    f.lse[static_cast<std::size_t>(head * c.tokens() + t)] = lse;
    for (std::size_t j = 0; j < p.size(); ++j) {
      for (std::size_t d = 0; d < static_cast<std::size_t>(c.dim); ++d) {
        f.out[c.q_at(t, head) + d] += p[j] * v[c.k_at(first + static_cast<int>(j), head) + d];
      }
    }
  });
  return f;
}

struct Gradients {
  Values q, k, v;
};
Gradients differentiate(const Case& c, const Values& q, const Values& k, const Values& v, const Values& grad_out) {
  const Forward f = attend(c, q, k, v);
  Gradients g{Values(q.size(), 0.0), Values(k.size(), 0.0), Values(v.size(), 0.0)};
  for_each_row(c, q, k, [&](int t, int head, int first, const Values& p, double) {
    const std::size_t at = c.q_at(t, head);
    const double delta = product(f.out, at, grad_out, at, c.dim);
    for (std::size_t j = 0; j < p.size(); ++j) {
      const std::size_t key = c.k_at(first + static_cast<int>(j), head);
      const double ds = p[j] * (product(grad_out, at, v, key, c.dim) - delta) * c.scale();
      for (std::size_t d = 0; d < static_cast<std::size_t>(c.dim); ++d) {
        g.q[at + d] += ds * k[key + d];
        g.k[key + d] += ds * q[at + d];
        g.v[key + d] += p[j] * grad_out[at + d];
      }
    }
  });
  return g;
}

struct Inputs {
  explicit Inputs(const Case& c)
      : q(stored_as(c.type, uniform(c.tokens() * c.heads * c.dim, 1, -2.0f, 2.0f))),
        k(stored_as(c.type, uniform(c.tokens() * c.kv_heads * c.dim, 2, -2.0f, 2.0f))),
        v(stored_as(c.type, uniform(c.tokens() * c.kv_heads * c.dim, 3))),
        grad_out(stored_as(c.type, uniform(c.tokens() * c.heads * c.dim, 4))) {}
  std::vector<float> q, k, v, grad_out;
};
Values wide(const std::vector<float>& v) { return {v.begin(), v.end()}; }

// q, k and v as neighbouring column ranges of one matrix, as the projection writes them; poisoned outputs.
struct Setup {
  Setup(DeviceArrays& d, const Case& c, const Inputs& in) : fused(projection(d, c)), grad_fused(projection(d, c)) {
    const std::int64_t w = std::int64_t{c.heads} * c.dim, kw = std::int64_t{c.kv_heads} * c.dim;
    AttentionArgs f{c.sequences,
                    c.length,
                    c.heads,
                    c.kv_heads,
                    c.dim,
                    static_cast<float>(c.scale()),
                    fused.cols(0, w),
                    fused.cols(w, kw),
                    fused.cols(w + kw, kw),
                    d.matrix(c.type, c.tokens(), w, filled(c.tokens() * w, kNaN), w + 8),
                    d.matrix(DType::kF32, c.heads, c.tokens(), filled(c.heads * c.tokens(), kNaN), c.tokens() + 4)};
    set(d, f.q, in.q);
    set(d, f.k, in.k);
    set(d, f.v, in.v);
    args = {f,
            d.matrix(c.type, c.tokens(), w, in.grad_out),
            grad_fused.cols(0, w),
            grad_fused.cols(w, kw),
            grad_fused.cols(w + kw, kw),
            d.matrix(DType::kF32, c.heads, c.tokens(), filled(c.heads * c.tokens(), kNaN))};
  }
  static Tensor projection(DeviceArrays& d, const Case& c) {
    const std::int64_t width = std::int64_t{c.heads + 2 * c.kv_heads} * c.dim;
    return d.matrix(c.type, c.tokens(), width, filled(c.tokens() * width, kNaN), width + 16);
  }
  // DeviceArrays reads whole rows: set and get a column range row by row.
  static void set(DeviceArrays& d, const Tensor& t, const std::vector<float>& values) {
    for (std::int64_t r = 0; r < t.shape.rows; ++r)
      d.set(row(t, r), {values.begin() + r * t.shape.cols, values.begin() + (r + 1) * t.shape.cols});
  }
  static std::vector<float> get(DeviceArrays& d, const Tensor& t) {
    std::vector<float> all;
    for (std::int64_t r = 0; r < t.shape.rows; ++r) {
      const std::vector<float> one = d.get(row(t, r));
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  static Tensor row(const Tensor& t, std::int64_t r) {
    Tensor one = t.rows(r, 1);
    one.row_pitch = one.shape.cols;
    return one;
  }

  Tensor fused, grad_fused;
  AttentionBackwardArgs args;
};

void require_matches_oracle(DeviceArrays& d, const Case& c) {
  INFO(name_of(c.type) << " " << c.sequences << "x" << c.length << " heads " << c.heads << "/" << c.kv_heads << " dim "
                       << c.dim);
  const Inputs in(c);
  const Values q = wide(in.q), k = wide(in.k), v = wide(in.v);
  Setup setup(d, c, in);
  d.ops().attention_forward(d.stream(), setup.args.forward);
  d.ops().attention_backward(d.stream(), setup.args);
  const Forward f = attend(c, q, k, v);
  const Gradients g = differentiate(c, q, k, v, wide(in.grad_out));
  // FP32 sums of up to L and dim terms of size 1; in BF16 the stored results are rounded once, and delta is made of the
  // rounded out, which moves each score gradient by up to its rounding.
  const bool bf16 = c.type == DType::kBF16;
  const double tolerance = bf16 ? 8e-3 : 2e-5, rounding = rounding_of(c.type);
  require_close(d.get(setup.args.forward.out), f.out, 2e-5, 2e-5 + rounding);
  require_close(d.get(setup.args.forward.lse), f.lse, 2e-5, 1e-5);
  require_close(Setup::get(d, setup.args.grad_q), g.q, tolerance, 2e-5 + rounding);
  require_close(Setup::get(d, setup.args.grad_k), g.k, tolerance, 2e-5 + rounding);
  require_close(Setup::get(d, setup.args.grad_v), g.v, tolerance, 2e-5 + rounding);
  REQUIRE(d.padding_intact(setup.args.forward.out));
  REQUIRE(d.padding_intact(setup.args.forward.lse));
  REQUIRE(d.padding_intact(setup.grad_fused));
}

}  // namespace

TEST_CASE("the oracle's gradients agree with finite differences") {
  const Case c{DType::kF32, 1, 5, 2, 1, 4};
  const Inputs in(c);
  const Values grad_out = wide(in.grad_out);
  std::vector<Values> x{wide(in.q), wide(in.k), wide(in.v)};
  const Gradients g = differentiate(c, x[0], x[1], x[2], grad_out);
  const auto objective = [&] {
    return product(attend(c, x[0], x[1], x[2]).out, 0, grad_out, 0, static_cast<int>(grad_out.size()));
  };
  const std::vector<const Values*> analytic{&g.q, &g.k, &g.v};
  for (std::size_t which = 0; which < 3; ++which) {
    for (std::size_t i = 0; i < x[which].size(); ++i) {
      const double before = x[which][i], step = 1e-5;
      x[which][i] = before + step;
      const double up = objective();
      x[which][i] = before - step;
      const double down = objective();
      x[which][i] = before;
      REQUIRE(std::abs((up - down) / (2 * step) - (*analytic[which])[i]) < 1e-8);
    }
  }
}

TEST_CASE("attention in BF16 matches the oracle, forward and backward") {
  on_every_backend([](DeviceArrays& d) {
    require_matches_oracle(d, {DType::kBF16, 2, 64, 2, 2, 64});
    require_matches_oracle(d, {DType::kBF16, 1, 80, 4, 2, 64});
  });
}
TEST_CASE("the CPU attention in FP32 matches the oracle at any size") {
  DeviceArrays d("cpu");
  for (const Case& c : {Case{DType::kF32, 2, 48, 2, 2, 16}, Case{DType::kF32, 1, 100, 4, 1, 32},
                        Case{DType::kF32, 3, 1, 2, 1, 16}, Case{DType::kF32, 1, 33, 1, 1, 80}}) {
    require_matches_oracle(d, c);
  }
}

TEST_CASE("attention never sees a later token or another sequence") {
  on_every_backend([](DeviceArrays& d) {
    const Case c{DType::kBF16, 2, 48, 2, 1, 64};
    const Inputs in(c);
    const std::int64_t cut = 20, width = std::int64_t{c.heads} * c.dim, kv_width = std::int64_t{c.kv_heads} * c.dim;
    Inputs changed(in);
    for (std::int64_t t = cut; t < c.tokens(); ++t) {
      for (std::int64_t i = 0; i < kv_width; ++i) {
        changed.k[static_cast<std::size_t>(t * kv_width + i)] = 3.0f;
        changed.v[static_cast<std::size_t>(t * kv_width + i)] = -3.0f;
      }
    }
    Setup before(d, c, in), after(d, c, changed);
    d.ops().attention_forward(d.stream(), before.args.forward);
    d.ops().attention_forward(d.stream(), after.args.forward);
    const std::vector<float> a = d.get(before.args.forward.out), b = d.get(after.args.forward.out);
    const auto first = static_cast<std::ptrdiff_t>(cut * width);
    REQUIRE(std::vector<float>(a.begin(), a.begin() + first) == std::vector<float>(b.begin(), b.begin() + first));
    REQUIRE(a != b);
  });
}

TEST_CASE("attention stays finite where plain exponentials would overflow") {
  on_every_backend([](DeviceArrays& d) {
    const Case c{DType::kBF16, 1, 48, 1, 1, 64};
    Inputs in(c);
    for (float& v : in.q) v *= 64.0f;
    Setup setup(d, c, in);
    d.ops().attention_forward(d.stream(), setup.args.forward);
    d.ops().attention_backward(d.stream(), setup.args);
    for (const float v : d.get(setup.args.forward.out)) REQUIRE(std::isfinite(v));
    for (const float v : Setup::get(d, setup.args.grad_k)) REQUIRE(std::isfinite(v));
  });
}

TEST_CASE("attention backward gives the same bytes in every call") {
  on_every_backend([](DeviceArrays& d) {
    const Case c{DType::kBF16, 2, 64, 4, 2, 64};
    Setup setup(d, c, Inputs(c));
    d.ops().attention_forward(d.stream(), setup.args.forward);
    std::vector<std::vector<float>> results;
    for (int call = 0; call < 2; ++call) {
      d.ops().attention_backward(d.stream(), setup.args);
      results.push_back(d.get(setup.grad_fused));
    }
    REQUIRE(results[0] == results[1]);
  });
}

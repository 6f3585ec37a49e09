// Causal attention against a double-precision oracle: forward, gradients (themselves checked by finite differences),
// causality, grouped key heads, column ranges of a fused projection, lengths around every tile's edge.
#include <algorithm>
#include <cmath>
#include <string>
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
      for (int j = first; j <= t; ++j) p.push_back(product(q, c.q_at(t, head), k, c.k_at(j, head), c.dim) * c.scale());
      const double max = *std::max_element(p.begin(), p.end());
      for (double& v : p) sum += v = std::exp(v - max);
      for (double& v : p) v /= sum;
      visit(t, head, first, p, max + std::log(sum));
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
  Setup(DeviceArrays& d, const Case& c, const Inputs& in)
      : query_width(std::int64_t{c.heads} * c.dim),
        key_width(std::int64_t{c.kv_heads} * c.dim),
        fused(projection(d, c, beside(in))),
        grad_fused(projection(d, c, filled(c.tokens() * (query_width + 2 * key_width), kNaN))) {
    const AttentionArgs f{
        c.sequences,
        c.length,
        c.heads,
        c.kv_heads,
        c.dim,
        static_cast<float>(c.scale()),
        fused.cols(0, query_width),
        fused.cols(query_width, key_width),
        fused.cols(query_width + key_width, key_width),
        d.matrix(c.type, c.tokens(), query_width, filled(c.tokens() * query_width, kNaN), query_width + 8),
        d.matrix(DType::kF32, c.heads, c.tokens(), filled(c.heads * c.tokens(), kNaN), c.tokens() + 4)};
    args = {f,
            d.matrix(c.type, c.tokens(), query_width, in.grad_out),
            grad_fused.cols(0, query_width),
            grad_fused.cols(query_width, key_width),
            grad_fused.cols(query_width + key_width, key_width),
            d.matrix(DType::kF32, c.heads, c.tokens(), filled(c.heads * c.tokens(), kNaN))};
  }
  Tensor projection(DeviceArrays& d, const Case& c, const std::vector<float>& values) const {
    const std::int64_t width = query_width + 2 * key_width;
    return d.matrix(c.type, c.tokens(), width, values, width + 16);
  }
  [[nodiscard]] std::vector<float> beside(const Inputs& in) const {
    std::vector<float> all;
    for (std::size_t q = 0, k = 0; q < in.q.size();) {
      for (std::int64_t i = 0; i < query_width; ++i) all.push_back(in.q[q++]);
      for (std::int64_t i = 0; i < key_width; ++i) all.push_back(in.k[k + static_cast<std::size_t>(i)]);
      for (std::int64_t i = 0; i < key_width; ++i) all.push_back(in.v[k++]);
    }
    return all;
  }
  void run(DeviceArrays& d) const {
    d.ops().attention_forward(d.stream(), args.forward);
    d.ops().attention_backward(d.stream(), args);
  }
  struct Results {
    std::vector<float> out, lse, q, k, v;
    bool operator==(const Results&) const = default;
  };
  [[nodiscard]] Results results(DeviceArrays& d) const {
    Results r{d.get(args.forward.out), d.get(args.forward.lse), {}, {}, {}};
    const std::vector<float> all = d.get(grad_fused);
    for (auto at = all.begin(); at != all.end();) {
      for (auto* to : {&r.q, &r.k, &r.v}) {
        const auto end = at + (to == &r.q ? query_width : key_width);
        to->insert(to->end(), at, end);
        at = end;
      }
    }
    return r;
  }

  std::int64_t query_width, key_width;
  Tensor fused, grad_fused;
  AttentionBackwardArgs args;
};

// Every element within `absolute` and one rounding of the type, and ‖got − want‖ <= norm · ‖want‖.
void require_near(const std::vector<float>& got, const Values& want, DType type, double absolute, double norm) {
  require_close(got, want, absolute, 2e-5 + rounding_of(type));
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  // 1e-6 an element: of one token alone grad_q and grad_k are exactly zero.
  REQUIRE(std::sqrt(error) <= norm * std::sqrt(size) + 1e-6 * std::sqrt(static_cast<double>(want.size())));
}

// In FP32: sums of up to L and dim terms of size 1. In BF16: a probability and a score's gradient may be rounded before
// their products, delta is made of the rounded out, and the stored result is rounded. One rounding is up to 2^-9 of a
// value and about 1.7e-3 of a vector's norm; at most three of them meet in a result. Element by element an error is up
// to 2^-9 of the sum of absolute products, which cancels least in grad_v: the first keys are seen by every query.
void require_matches_oracle(DeviceArrays& d, const Case& c, const Inputs& in) {
  INFO(name_of(c.type) << " " << c.sequences << "x" << c.length << " heads " << c.heads << "/" << c.kv_heads << " dim "
                       << c.dim);
  const Values q = wide(in.q), k = wide(in.k), v = wide(in.v);
  const Setup setup(d, c, in);
  setup.run(d);
  const Forward f = attend(c, q, k, v);
  const Gradients g = differentiate(c, q, k, v, wide(in.grad_out));
  const bool bf16 = c.type == DType::kBF16;
  const double norm = bf16 ? 5e-3 : 2e-5;
  const Setup::Results r = setup.results(d);
  require_near(r.out, f.out, c.type, bf16 ? 4e-3 : 2e-5, norm);
  require_close(r.lse, f.lse, bf16 ? 5e-5 : 2e-5, 1e-5);
  require_near(r.q, g.q, c.type, bf16 ? 1e-2 : 2e-5, norm);
  require_near(r.k, g.k, c.type, bf16 ? 1e-2 : 2e-5, norm);
  require_near(r.v, g.v, c.type, bf16 ? 1e-2 : 2e-5, norm);
  REQUIRE(d.padding_intact(setup.args.forward.out));
  REQUIRE(d.padding_intact(setup.args.forward.lse));
  REQUIRE(d.padding_intact(setup.grad_fused));
}
void require_matches_oracle(DeviceArrays& d, const Case& c) { require_matches_oracle(d, c, Inputs(c)); }

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

TEST_CASE("attention in BF16 matches the oracle at any length, forward and backward") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) {
      for (const int length : {1, 15, 16, 17, 64, 100, 128}) {
        require_matches_oracle(d, {DType::kBF16, 2, length, 2, 2, dim});
      }
      for (const int length : {256, 300}) require_matches_oracle(d, {DType::kBF16, 1, length, 2, 1, dim});
    }
  });
}
TEST_CASE("query heads share the keys of their group") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) require_matches_oracle(d, {DType::kBF16, 3, 80, 4, 2, dim});
    require_matches_oracle(d, {DType::kBF16, 1, 70, 6, 2, 64});
  });
}
TEST_CASE("attention matches the oracle over a long sequence", "[slow]") {
  on_every_backend([](DeviceArrays& d) { require_matches_oracle(d, {DType::kBF16, 1, 2048, 2, 1, 128}); });
}
TEST_CASE("attention is right or refused by a sentence that says what there is") {
  on_every_backend([](DeviceArrays& d) {
    for (const Case& c : {Case{DType::kF32, 1, 20, 2, 1, 64}, Case{DType::kBF16, 1, 20, 2, 1, 32}}) {
      try {
        require_matches_oracle(d, c);
      } catch (const DeviceError& e) {
        REQUIRE(std::string(e.what()).find(c.dim == 64 ? "bf16" : "64 and 128") != std::string::npos);
      }
    }
  });
}
TEST_CASE("the CPU attention in FP32 matches the oracle at any size") {
  DeviceArrays d("cpu");
  for (const Case& c : {Case{DType::kF32, 2, 48, 2, 2, 16}, Case{DType::kF32, 1, 100, 4, 1, 32},
                        Case{DType::kF32, 3, 1, 2, 1, 16}, Case{DType::kF32, 1, 33, 1, 1, 80}}) {
    require_matches_oracle(d, c);
  }
}

TEST_CASE("equal keys give the average of the values seen so far, exactly") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) {
      const Case c{DType::kBF16, 2, 100, 2, 2, dim};
      Inputs in(c);
      in.q = integers(c.tokens() * c.heads * c.dim, 5, 1);
      std::fill(in.k.begin(), in.k.end(), 0.125f);
      // Averages of at most 100 integers up to 3 are never near the middle of two BF16 numbers.
      in.v = integers(c.tokens() * c.kv_heads * c.dim, 6, 3);
      const Setup setup(d, c, in);
      d.ops().attention_forward(d.stream(), setup.args.forward);
      const std::vector<float> out = d.get(setup.args.forward.out);
      for (int t = 0; t < c.tokens(); ++t) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(c.heads * c.dim); ++i) {
          const std::size_t width = static_cast<std::size_t>(c.heads * c.dim);
          double sum = 0;
          for (int j = t / c.length * c.length; j <= t; ++j) sum += in.v[static_cast<std::size_t>(j) * width + i];
          const double average = sum / (t % c.length + 1);
          REQUIRE(out[static_cast<std::size_t>(t) * width + i] == round_bf16(static_cast<float>(average)));
        }
      }
    }
  });
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

TEST_CASE("attention matches the oracle where plain exponentials would overflow") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) {
      const Case c{DType::kBF16, 1, 100, 2, 1, dim};
      Inputs in(c);
      // Scores up to some hundred: one key has nearly all of a row, so a score's gradient is a difference of nearly
      // equal products, in which the rounding of out is large. The gradients of the keys grow with the queries.
      for (float& v : in.q) v *= 64.0f;
      const Setup setup(d, c, in);
      setup.run(d);
      const Forward f = attend(c, wide(in.q), wide(in.k), wide(in.v));
      const Gradients g = differentiate(c, wide(in.q), wide(in.k), wide(in.v), wide(in.grad_out));
      REQUIRE(*std::max_element(f.lse.begin(), f.lse.end()) > 150.0);
      const Setup::Results r = setup.results(d);
      require_near(r.out, f.out, c.type, 4e-3, 5e-3);
      require_close(r.lse, f.lse, 2e-4, 1e-6);
      require_near(r.q, g.q, c.type, 2e-2, 3e-2);
      require_near(r.k, g.k, c.type, 64 * 2e-2, 3e-2);
      require_near(r.v, g.v, c.type, 1e-2, 5e-3);
    }
  });
}

TEST_CASE("attention gives the same bytes in every call") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) {
      const Case c{DType::kBF16, 2, 100, 4, 2, dim};
      const Inputs in(c);
      const Setup first(d, c, in), second(d, c, in);
      first.run(d);
      second.run(d);
      REQUIRE(first.results(d) == second.results(d));
      first.run(d);
      REQUIRE(first.results(d) == second.results(d));
    }
  });
}

TEST_CASE("attention writes the operand that quantize makes of its result, bit by bit") {
  struct Quantized {
    DType format;
    int sequences, length, heads;
    std::int64_t pad;
  };
  on_every_backend([](DeviceArrays& d) {
    // Whole and cut tiles, sequences that are not whole sixteens, pitches that are not, enough blocks for large ones.
    for (const Quantized& q : {Quantized{DType::kE4M3, 2, 48, 2, 0}, Quantized{DType::kE4M3, 2, 48, 2, 16},
                               Quantized{DType::kE5M2, 2, 48, 2, 8}, Quantized{DType::kE4M3, 1, 256, 2, 0},
                               Quantized{DType::kE4M3, 3, 37, 2, 0}, Quantized{DType::kE4M3, 2, 40, 2, 0},
                               Quantized{DType::kE5M2, 34, 144, 4, 0}}) {
      for (const int dim : {64, 128}) {
        const Case c{DType::kBF16, q.sequences, q.length, q.heads, q.heads, dim};
        INFO(name_of(q.format) << " " << c.sequences << "x" << c.length << " heads " << c.heads << " dim " << dim
                               << " padded by " << q.pad);
        const Setup setup(d, c, Inputs(c));
        AttentionArgs args = setup.args.forward;
        const std::int64_t width = args.out.shape.cols;
        for (const float amax : {0.0f, 100.0f}) {
          const OperandUnderTest got(d, q.format, c.tokens(), width, 600.0f, amax, q.pad);
          const OperandUnderTest want(d, q.format, c.tokens(), width, 600.0f, amax, q.pad);
          args.quantized = got.operand;
          args.quantizer = got.quantizer;
          d.set(args.out, filled(c.tokens() * width, kNaN));
          d.ops().attention_forward(d.stream(), args);
          d.ops().quantize(d.stream(), {args.out, want.operand, want.quantizer, {}});
          REQUIRE(d.codes(got.operand.rowwise) == d.codes(want.operand.rowwise));
          REQUIRE(d.codes(got.operand.columnwise) == d.codes(want.operand.columnwise));
          REQUIRE(d.get(got.operand.scale_inv) == d.get(want.operand.scale_inv));
          REQUIRE(d.read(got.amax, 1) == d.read(want.amax, 1));
          if (q.pad != 0) REQUIRE(d.padding_intact(got.operand.rowwise));
          if (q.pad != 0) REQUIRE(d.padding_intact(got.operand.columnwise));
        }
        const std::vector<float> out = d.get(args.out);
        d.ops().attention_forward(d.stream(), setup.args.forward);
        REQUIRE(d.get(args.out) == out);
      }
    }
  });
}
// Every row attends to the first key alone, whose value is zero; a row without a query would average the others.
TEST_CASE("rows that a tile has behind a sequence's end do not reach the amax") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) {
      const Case c{DType::kBF16, 2, 48, 1, 1, dim};
      Inputs in(c);
      std::fill(in.q.begin(), in.q.end(), 1.0f);
      std::fill(in.k.begin(), in.k.end(), 0.0f);
      std::fill(in.v.begin(), in.v.end(), 1.0f);
      for (int sequence = 0; sequence < c.sequences; ++sequence) {
        const auto first = static_cast<std::ptrdiff_t>(c.k_at(sequence * c.length, 0));
        std::fill_n(in.k.begin() + first, dim, 8.0f);
        std::fill_n(in.v.begin() + first, dim, 0.0f);
      }
      const Setup setup(d, c, in);
      const OperandUnderTest out(d, DType::kE4M3, c.tokens(), dim, 1.0f, 0.0f);
      AttentionArgs args = setup.args.forward;
      args.quantized = out.operand;
      args.quantizer = out.quantizer;
      d.ops().attention_forward(d.stream(), args);
      REQUIRE(d.read(out.amax, 1)[0] < 1e-6f);
    }
  });
}
TEST_CASE("each layout of attention's operand can be had alone, and without an amax") {
  on_every_backend([](DeviceArrays& d) {
    const Case c{DType::kBF16, 2, 80, 2, 2, 64};
    const Setup setup(d, c, Inputs(c));
    AttentionArgs args = setup.args.forward;
    const OperandUnderTest both(d, DType::kE4M3, c.tokens(), args.out.shape.cols, 600.0f, 0.0f);
    const OperandUnderTest apart(d, DType::kE4M3, c.tokens(), args.out.shape.cols, 600.0f, 0.0f);
    const auto run = [&](const Operand& quantized, const Quantizer& quantizer) {
      args.quantized = quantized;
      args.quantizer = quantizer;
      d.ops().attention_forward(d.stream(), args);
    };
    run(both.operand, both.quantizer);
    run({apart.operand.rowwise, {}, {}}, {apart.quantizer.scale, nullptr});
    run({{}, apart.operand.columnwise, {}}, {apart.quantizer.scale, nullptr});
    REQUIRE(d.codes(apart.operand.rowwise) == d.codes(both.operand.rowwise));
    REQUIRE(d.codes(apart.operand.columnwise) == d.codes(both.operand.columnwise));
    REQUIRE(std::isnan(d.get(apart.operand.scale_inv)[0]));
    REQUIRE(d.read(apart.amax, 1)[0] == 0.0f);
    REQUIRE(d.read(both.amax, 1)[0] > 0.0f);
  });
}
TEST_CASE("attention copies its result into an operand that is not FP8") {
  on_every_backend([](DeviceArrays& d) {
    const Case c{DType::kBF16, 2, 48, 2, 2, 64};
    const Setup setup(d, c, Inputs(c));
    AttentionArgs args = setup.args.forward;
    const OperandUnderTest copy(d, DType::kBF16, c.tokens(), args.out.shape.cols, 1.0f, 0.0f);
    args.quantized = copy.operand;
    d.ops().attention_forward(d.stream(), args);
    REQUIRE(d.get(copy.operand.rowwise) == d.get(args.out));
  });
}

// Backends may cut a large call into other pieces than a small one.
TEST_CASE("a sequence has the same bytes alone and among many") {
  on_every_backend([](DeviceArrays& d) {
    for (const int dim : {64, 128}) {
      const Case one{DType::kBF16, 1, 130, 4, 2, dim};
      Case many = one;
      many.sequences = 34;
      const Inputs in(one);
      Inputs repeated(in);
      for (auto* values : {&repeated.q, &repeated.k, &repeated.v, &repeated.grad_out}) {
        const std::vector<float> once = *values;
        for (int i = 1; i < many.sequences; ++i) values->insert(values->end(), once.begin(), once.end());
      }
      const Setup alone(d, one, in), among(d, many, repeated);
      alone.run(d);
      among.run(d);
      const Setup::Results want = alone.results(d), got = among.results(d);
      const auto require_repeats = [](const std::vector<float>& all, const std::vector<float>& part) {
        for (std::size_t i = 0; i < all.size(); ++i) {
          if (all[i] != part[i % part.size()]) FAIL("element " << i);
        }
      };
      require_repeats(got.out, want.out);
      require_repeats(got.q, want.q);
      require_repeats(got.k, want.k);
      require_repeats(got.v, want.v);
    }
  });
}

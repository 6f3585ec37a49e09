// gemm against sums written out in double: exact where the operands are small integers, whatever the backend.
#include <cmath>
#include <vector>

#include "tests/ops/ops_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {

struct Problem {
  std::int64_t m, n, k;
};

struct Layout {
  DType a, b;
  bool a_transposed = false, b_transposed = false;
  std::int64_t pad = 0;  // elements between rows
};

// Integer operands of one GEMM and their exact products.
struct Operands {
  Operands(DeviceArrays& d, const Problem& p, const Layout& l) : problem(p) {
    a_values = integers(p.m * p.k, 1, 4);
    b_values = integers(p.n * p.k, 2, 4);
    args.a = upload(d, l.a, a_values, p.m, p.k, l.a_transposed, l.pad);
    args.b = upload(d, l.b, b_values, p.n, p.k, l.b_transposed, l.pad);
    args.a_transposed = l.a_transposed;
    args.b_transposed = l.b_transposed;
    if (is_fp8(l.a)) args.a_scale_inv = d.matrix(DType::kF32, 1, 1, filled(1, 1.0f));
    if (is_fp8(l.b)) args.b_scale_inv = d.matrix(DType::kF32, 1, 1, filled(1, 1.0f));
  }
  static Tensor upload(DeviceArrays& d, DType type, const std::vector<float>& values, std::int64_t rows,
                       std::int64_t depth, bool transposed, std::int64_t pad) {
    const std::int64_t r = transposed ? depth : rows, c = transposed ? rows : depth;
    std::vector<float> laid(values);
    for (std::int64_t i = 0; transposed && i < rows; ++i) {
      for (std::int64_t p = 0; p < depth; ++p) {
        laid[static_cast<std::size_t>(p * rows + i)] = values[static_cast<std::size_t>(i * depth + p)];
      }
    }
    return d.matrix(type, r, c, laid, pad == 0 ? 0 : c + pad);
  }
  // Σ of a·b over [first, last) of k.
  [[nodiscard]] double product(std::int64_t i, std::int64_t j, std::int64_t first, std::int64_t last) const {
    double sum = 0;
    for (std::int64_t p = first; p < last; ++p) {
      sum += double{a_values[static_cast<std::size_t>(i * problem.k + p)]} *
             double{b_values[static_cast<std::size_t>(j * problem.k + p)]};
    }
    return sum;
  }
  [[nodiscard]] std::vector<double> products() const {
    std::vector<double> all;
    for (std::int64_t i = 0; i < problem.m; ++i) {
      for (std::int64_t j = 0; j < problem.n; ++j) all.push_back(product(i, j, 0, problem.k));
    }
    return all;
  }

  Problem problem;
  std::vector<float> a_values, b_values;
  GemmArgs args;
};

// Exact values rounded once into the type.
std::vector<float> rounded(DType type, const std::vector<double>& values) {
  std::vector<float> out;
  for (const double v : values)
    out.push_back(type == DType::kBF16 ? round_bf16(static_cast<float>(v)) : static_cast<float>(v));
  return out;
}

void require_exact_product(DeviceArrays& d, const Problem& p, const Layout& l, DType result) {
  INFO(name_of(l.a) << " " << name_of(l.b) << " transposed " << l.a_transposed << l.b_transposed << " pad " << l.pad
                    << " m " << p.m << " n " << p.n << " k " << p.k);
  Operands o(d, p, l);
  // Rows of an FP8 product begin on 16 bytes on CUDA.
  const std::int64_t gap = is_fp8(l.a) ? 16 : 1;
  o.args.d = d.matrix(result, p.m, p.n, filled(p.m * p.n, kNaN), p.n + l.pad + gap);
  d.ops().gemm(d.stream(), o.args);
  REQUIRE(d.get(o.args.d) == rounded(result, o.products()));
  REQUIRE(d.padding_intact(o.args.d));
}

}  // namespace

TEST_CASE("gemm of FP8 integers is exact for every pair of formats") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType a : {DType::kE4M3, DType::kE5M2}) {
      for (const DType b : {DType::kE4M3, DType::kE5M2}) {
        if (a == DType::kE5M2 && b == DType::kE5M2) continue;  // the recipe has no such pair, Hopper neither
        require_exact_product(d, {48, 80, 112}, {a, b}, DType::kF32);
        require_exact_product(d, {64, 32, 304}, {a, b, false, false, 16}, DType::kBF16);
      }
    }
  });
}

TEST_CASE("gemm of BF16 and FP32 integers is exact in every layout, size and pitch") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType type : {DType::kBF16, DType::kF32}) {
      // cuBLASLt has no product of FP32 matrices into BF16.
      const DType narrow = type == DType::kBF16 || d.is("cpu") ? DType::kBF16 : DType::kF32;
      for (const Problem& p : {Problem{48, 80, 112}, Problem{1, 1, 1}, Problem{33, 31, 17}, Problem{5, 70, 300}}) {
        for (const bool at : {false, true}) {
          for (const bool bt : {false, true}) {
            require_exact_product(d, p, {type, type, at, bt, 0}, DType::kF32);
            require_exact_product(d, p, {type, type, at, bt, 8}, narrow);
          }
        }
      }
    }
  });
}

TEST_CASE("gemm adds residual and bias before its one rounding") {
  on_every_backend([](DeviceArrays& d) {
    const Problem p{48, 80, 112};
    for (const DType type : {DType::kE4M3, DType::kBF16, DType::kF32}) {
      const DType activation = type == DType::kF32 ? DType::kF32 : DType::kBF16;
      Operands o(d, p, {type, type});
      const std::vector<float> residual = integers(p.m * p.n, 3, 200);
      std::vector<float> bias = integers(p.n, 4, 100);
      for (float& v : bias) v *= 0.015625f;
      o.args.residual = d.matrix(activation, p.m, p.n, residual, p.n + 8);
      o.args.bias = d.matrix(activation, 1, p.n, bias);
      o.args.d = d.matrix(activation, p.m, p.n, filled(p.m * p.n, kNaN));
      d.ops().gemm(d.stream(), o.args);
      std::vector<double> want = o.products();
      for (std::size_t i = 0; i < want.size(); ++i) want[i] += residual[i] + bias[i % bias.size()];
      REQUIRE(d.get(o.args.d) == rounded(activation, want));
    }
  });
}

TEST_CASE("gemm may write over its residual") {
  on_every_backend([](DeviceArrays& d) {
    const Problem p{48, 80, 112};
    Operands o(d, p, {DType::kBF16, DType::kBF16});
    const std::vector<float> residual = integers(p.m * p.n, 3, 200);
    o.args.d = d.matrix(DType::kBF16, p.m, p.n, residual);
    o.args.residual = o.args.d;
    d.ops().gemm(d.stream(), o.args);
    std::vector<double> want = o.products();
    for (std::size_t i = 0; i < want.size(); ++i) want[i] += residual[i];
    REQUIRE(d.get(o.args.d) == rounded(DType::kBF16, want));
  });
}

TEST_CASE("gemm accumulates onto D with D's own rounding") {
  on_every_backend([](DeviceArrays& d) {
    const Problem p{48, 80, 112};
    for (const DType result : {DType::kF32, DType::kBF16}) {
      Operands o(d, p, {DType::kE4M3, DType::kE4M3});
      const std::vector<float> before = integers(p.m * p.n, 5, 250);
      o.args.d = d.matrix(result, p.m, p.n, before);
      o.args.accumulate = true;
      d.ops().gemm(d.stream(), o.args);
      std::vector<double> want = o.products();
      for (std::size_t i = 0; i < want.size(); ++i) want[i] += before[i];
      REQUIRE(d.get(o.args.d) == rounded(result, want));
    }
  });
}

TEST_CASE("gemm scales by the product of the two inverse scales") {
  on_every_backend([](DeviceArrays& d) {
    const Problem p{48, 80, 112};
    const float a_scale = 0.3f, b_scale = 1.7f;
    Operands o(d, p, {DType::kE4M3, DType::kE5M2});
    o.args.a_scale_inv = d.matrix(DType::kF32, 1, 1, filled(1, a_scale));
    o.args.b_scale_inv = d.matrix(DType::kF32, 1, 1, filled(1, b_scale));
    o.args.d = d.matrix(DType::kF32, p.m, p.n, filled(p.m * p.n, kNaN));
    d.ops().gemm(d.stream(), o.args);
    std::vector<double> want = o.products();
    for (double& v : want) v *= double{a_scale} * double{b_scale};
    require_close(d.get(o.args.d), want, 0, 3 * 0x1p-24);  // the product of the scales and one of the sum are rounded
  });
}

TEST_CASE("gemm gives each block of K its own scales") {
  struct Case {
    Problem p;
    int blocks;
  };
  // On CUDA a block is whole 128 of K. Three of 256 make 6 of 128, which is not a multiple of 4.
  const std::vector<Case> cases{{{48, 80, 3 * 272}, 3}, {{128, 256, 3 * 256}, 3}, {{384, 176, 8 * 128}, 8}};
  on_every_backend([&](DeviceArrays& d) {
    for (const Case& c : cases) {
      const Problem& p = c.p;
      const std::int64_t depth = p.k / c.blocks;
      if (!d.is("cpu") && depth % 128 != 0) continue;
      Operands o(d, p, {DType::kE5M2, DType::kE4M3});
      std::vector<float> a_scale, b_scale;
      for (int g = 0; g < c.blocks; ++g) {
        a_scale.push_back(std::exp2(static_cast<float>(g % 3 - 1)));
        b_scale.push_back(std::exp2(static_cast<float>(2 - g % 4)));
      }
      o.args.a_scale_inv = d.matrix(DType::kF32, c.blocks, 1, a_scale, kScalePitch);
      o.args.b_scale_inv = d.matrix(DType::kF32, c.blocks, 1, b_scale, kScalePitch);
      std::vector<double> products(static_cast<std::size_t>(p.m * p.n), 0.0);
      for (std::int64_t at = 0; at < p.m * p.n; ++at) {
        for (int g = 0; g < c.blocks; ++g) {
          const auto block = static_cast<std::size_t>(g);
          products[static_cast<std::size_t>(at)] += o.product(at / p.n, at % p.n, g * depth, (g + 1) * depth) *
                                                    double{a_scale[block]} * double{b_scale[block]};
        }
      }
      for (const DType result : {DType::kF32, DType::kBF16}) {
        for (const bool accumulate : {false, true}) {
          INFO("k " << p.k << " blocks " << c.blocks << " " << name_of(result) << " accumulate " << accumulate);
          const std::vector<float> before = integers(p.m * p.n, 5, 250);
          o.args.d = d.matrix(result, p.m, p.n, accumulate ? before : filled(p.m * p.n, kNaN));
          o.args.accumulate = accumulate;
          d.ops().gemm(d.stream(), o.args);
          std::vector<double> want = products;
          for (std::size_t i = 0; accumulate && i < want.size(); ++i) want[i] += double{before[i]};
          if (accumulate && result == DType::kBF16 && !d.is("cpu")) {
            // cuBLASLt's block-scaled products round to BF16 before they are added to a BF16 D: two roundings.
            const std::vector<float> got = d.get(o.args.d);
            for (std::size_t i = 0; i < want.size(); ++i) {
              REQUIRE(std::abs(got[i] - want[i]) <= 0x1p-8 * (std::abs(products[i]) + std::abs(want[i])));
            }
          } else {
            REQUIRE(d.get(o.args.d) == rounded(result, want));
          }
        }
      }
    }
  });
}

TEST_CASE("the CPU gemm sums in index order with fma, to the bit") {
  DeviceArrays d("cpu");
  const Problem p{37, 45, 530};
  const std::vector<float> a = uniform(p.m * p.k, 6), b = uniform(p.n * p.k, 7);
  GemmArgs args;
  args.a = d.matrix(DType::kF32, p.m, p.k, a);
  args.b = d.matrix(DType::kF32, p.n, p.k, b);
  args.d = d.matrix(DType::kF32, p.m, p.n, filled(p.m * p.n, kNaN));
  d.ops().gemm(d.stream(), args);
  std::vector<float> want;
  for (std::int64_t i = 0; i < p.m; ++i) {
    for (std::int64_t j = 0; j < p.n; ++j) {
      float sum = 0;
      for (std::int64_t q = 0; q < p.k; ++q) {
        sum = std::fma(a[static_cast<std::size_t>(i * p.k + q)], b[static_cast<std::size_t>(j * p.k + q)], sum);
      }
      want.push_back(sum);
    }
  }
  REQUIRE(d.get(args.d) == want);
}

TEST_CASE("gemm gives the same bytes in every call, eager and captured") {
  on_every_backend([](DeviceArrays& d) {
    // Few tiles over a long K: where a library would split K.
    for (const Problem& p : {Problem{48, 80, 112}, Problem{64, 64, 4096}}) {
      for (const DType type : {DType::kBF16, DType::kE4M3}) {
        Operands o(d, p, {type, type});
        d.set(o.args.a, uniform(p.m * p.k, 8));
        d.set(o.args.b, uniform(p.n * p.k, 9));
        o.args.d = d.matrix(DType::kF32, p.m, p.n, filled(p.m * p.n, kNaN));
        const auto next = [&](const std::function<void()>& run) {
          d.set(o.args.d, filled(p.m * p.n, kNaN));
          run();
          return d.get(o.args.d);
        };
        const std::vector<float> first = next([&] { d.ops().gemm(d.stream(), o.args); });
        REQUIRE(next([&] { d.ops().gemm(d.stream(), o.args); }) == first);
        const auto graph = d.device().capture(d.stream(), [&] { d.ops().gemm(d.stream(), o.args); });
        for (int replay = 0; replay < 2; ++replay) {
          REQUIRE(next([&] { d.device().launch(*graph, d.stream()); }) == first);
        }
      }
    }
  });
}

TEST_CASE("gemm gives the same bytes wherever its matrices lie") {
  on_every_backend([](DeviceArrays& d) {
    const Problem p{64, 64, 1024};
    std::vector<float> first;
    for (const std::int64_t offset : {0, 16, 64, 4096}) {  // bytes
      Operands o(d, p, {DType::kE4M3, DType::kE4M3});
      d.set(o.args.a, uniform(p.m * p.k, 8));
      Tensor moved = d.matrix(DType::kE4M3, 1, p.n * p.k + offset);
      moved = make_tensor(moved.as<unsigned char>() + offset, DType::kE4M3, {p.n, p.k});
      d.set(moved, uniform(p.n * p.k, 9));
      o.args.b = moved;
      o.args.d = d.matrix(DType::kBF16, p.m, p.n, filled(p.m * p.n, kNaN));
      d.ops().gemm(d.stream(), o.args);
      const std::vector<float> got = d.get(o.args.d);
      if (first.empty()) first = got;
      REQUIRE(got == first);
    }
  });
}

// The products of the paper's hidden size at 256 tokens, exact on sampled elements: with integers of this size every
// partial sum has fewer than 13 bits, which the tensor cores' FP8 sums keep.
TEST_CASE("gemm is exact at the paper's sizes", "[slow]") {
  struct Case {
    Problem p;
    Layout l;
    DType d;
    bool forward, accumulate;
  };
  const Layout y{DType::kE4M3, DType::kE4M3}, dx{DType::kE5M2, DType::kE4M3}, dw{DType::kE5M2, DType::kE4M3};
  const std::vector<Case> cases{{{256, 12288, 4096}, y, DType::kBF16, true, false},
                                {{256, 4096, 11008}, y, DType::kBF16, true, false},
                                {{256, 4096, 12288}, dx, DType::kBF16, false, false},
                                {{12288, 4096, 256}, dw, DType::kF32, false, true},
                                {{4096, 11008, 256}, dw, DType::kBF16, false, false}};
  on_every_backend([&](DeviceArrays& d) {
    for (const Case& c : cases) {
      INFO("m " << c.p.m << " n " << c.p.n << " k " << c.p.k);
      Operands o(d, c.p, c.l);
      o.args.fast_accumulation = c.forward;
      o.args.accumulate = c.accumulate;
      const std::int64_t cells = c.p.m * c.p.n;
      o.args.d = d.matrix(c.d, c.p.m, c.p.n, c.accumulate ? integers(cells, 5, 250) : filled(cells, kNaN));
      const std::vector<float> before = d.get(o.args.d);
      std::vector<float> bias(static_cast<std::size_t>(c.p.n), 0.0f);
      if (c.forward) {
        bias = integers(c.p.n, 4, 100);
        o.args.bias = d.matrix(DType::kBF16, 1, c.p.n, bias);
      }
      d.ops().gemm(d.stream(), o.args);
      const std::vector<float> got = d.get(o.args.d);
      std::vector<float> sampled;
      std::vector<double> want;
      for (std::int64_t at = 0; at < cells; at += 1009) {
        const std::int64_t j = at % c.p.n;
        sampled.push_back(got[static_cast<std::size_t>(at)]);
        want.push_back(o.product(at / c.p.n, j, 0, c.p.k) + double{bias[static_cast<std::size_t>(j)]} +
                       (c.accumulate ? double{before[static_cast<std::size_t>(at)]} : 0.0));
      }
      REQUIRE(sampled == rounded(c.d, want));
    }
  });
}

TEST_CASE("gemm refuses shapes and layouts that do not fit") {
  const std::vector<std::function<void(DeviceArrays&, GemmArgs&)>> faults{
      [](DeviceArrays& d, GemmArgs& args) {  // an FP8 operand stored transposed
        args.a = d.matrix(DType::kE4M3, 32, 16);
        args.a_transposed = true;
      },
      [](DeviceArrays&, GemmArgs& args) { args.b_scale_inv = {}; },                     // no scale
      [](DeviceArrays& d, GemmArgs& args) { args.d = d.matrix(DType::kF32, 16, 24); },  // another width
      [](DeviceArrays& d, GemmArgs& args) {
        args.accumulate = true;
        args.bias = d.matrix(DType::kBF16, 1, 16);
      }};
  on_every_backend([&](DeviceArrays& d) {
    for (std::size_t i = 0; i < faults.size(); ++i) {
      INFO("fault " << i);
      Operands o(d, {16, 16, 32}, {DType::kE4M3, DType::kE4M3});
      o.args.d = d.matrix(DType::kF32, 16, 16);
      faults[i](d, o.args);
      REQUIRE_THROWS_AS(d.ops().gemm(d.stream(), o.args), std::logic_error);
    }
  });
}

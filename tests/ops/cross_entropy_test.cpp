// Cross-entropy and its gradient against a softmax in double.
#include <cmath>
#include <limits>
#include <vector>

#include "core/random.h"
#include "tests/ops/device_arrays.h"

using namespace qe;
using qe::test::DeviceArrays;
using qe::test::on_every_backend;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kScale = 1.0f / 64.0f;

struct Problem {
  std::int64_t tokens, vocabulary, padded;
  std::vector<float> logits;  // [tokens, padded]
  std::vector<std::int32_t> targets;
};

// Logits of about [-8, 8]; padding columns hold `padding`.
Problem make_problem(std::int64_t tokens, std::int64_t vocabulary, std::int64_t padded, DType type, float padding) {
  Problem p{tokens, vocabulary, padded, {}, {}};
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t c = 0; c < padded; ++c) {
      const RandomWords r = philox(17, static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(c));
      const float v = 16.0f * (static_cast<float>(r.w[0]) * 0x1p-32f - 0.5f);
      p.logits.push_back(c >= vocabulary ? padding : type == DType::kBF16 ? round_bf16(v) : v);
    }
    p.targets.push_back(static_cast<std::int32_t>(philox(18, 0, static_cast<std::uint64_t>(t)).w[0] %
                                                  static_cast<std::uint32_t>(vocabulary)));
  }
  return p;
}

struct Expected {
  double loss = 0.0;
  std::vector<double> gradient;  // (softmax − onehot) · kScale, zero in padding columns and uncounted rows
};
Expected in_double(const Problem& p) {
  Expected e;
  e.gradient.assign(p.logits.size(), 0.0);
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    const std::int32_t target = p.targets[static_cast<std::size_t>(t)];
    if (target < 0) continue;
    const float* row = &p.logits[static_cast<std::size_t>(t * p.padded)];
    double sum = 0.0;
    for (std::int64_t c = 0; c < p.vocabulary; ++c) sum += std::exp(static_cast<double>(row[c]));
    e.loss += std::log(sum) - row[target];
    for (std::int64_t c = 0; c < p.vocabulary; ++c) {
      e.gradient[static_cast<std::size_t>(t * p.padded + c)] =
          (std::exp(static_cast<double>(row[c])) / sum - (c == target ? 1.0 : 0.0)) * kScale;
    }
  }
  return e;
}

struct Result {
  std::vector<float> loss;      // one cell a microbatch
  std::vector<float> logits;    // after the call
  bool padding_intact = false;  // between the rows
};
Result run(DeviceArrays& d, const Problem& p, DType type, bool write_gradient) {
  const Tensor logits = d.matrix(type, p.tokens, p.padded, p.logits, p.padded + 8);
  std::vector<std::int32_t> targets(static_cast<std::size_t>(p.tokens), 0);  // of microbatch 0
  targets.insert(targets.end(), p.targets.begin(), p.targets.end());
  float* loss = d.array<float>({-1.0f, -2.0f, -3.0f});
  d.ops().cross_entropy(d.stream(), {logits, p.vocabulary, d.array(targets), d.array<std::int32_t>({1}), loss,
                                     write_gradient, d.array<float>({kScale})});
  return {d.read(loss, 3), d.get(logits), d.padding_intact(logits)};
}

// Loss and gradient against the double oracle. FP32: a few units of the last place. BF16: half a unit, 2^-9, more.
void require_oracle(const Problem& p, DType type, const Result& got) {
  const Expected want = in_double(p);
  CHECK(std::abs(got.loss[1] - want.loss) <= 1e-6 * want.loss + 1e-6);
  CHECK(got.padding_intact);
  const double relative = type == DType::kBF16 ? 0x1p-8 : 1e-6;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < want.gradient.size(); ++i) {
    const double error = std::abs(got.logits[i] - want.gradient[i]);
    if (!(error <= relative * std::abs(want.gradient[i]) + 1e-9)) ++wrong;
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("loss and gradient agree with a softmax in double, whatever the padding columns hold") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType type : {DType::kBF16, DType::kF32}) {
      for (const float padding : {0.0f, 1e30f, kNaN}) {
        INFO(name_of(type) << " padding " << padding);
        const Problem p = make_problem(24, 257, 384, type, padding);
        const Expected want = in_double(p);
        const Result got = run(d, p, type, true);
        CHECK(std::abs(got.loss[1] - want.loss) < 1e-6 * want.loss);
        CHECK(got.padding_intact);
        // FP32: a few units of the last place. BF16: half a unit, 2^-9, more.
        const double relative = type == DType::kBF16 ? 0x1p-8 : 1e-6;
        for (std::size_t i = 0; i < want.gradient.size(); ++i) {
          REQUIRE(std::abs(got.logits[i] - want.gradient[i]) <= relative * std::abs(want.gradient[i]) + 1e-9);
        }
        for (std::int64_t t = 0; t < p.tokens; ++t) {
          for (std::int64_t c = p.vocabulary; c < p.padded; ++c) {
            REQUIRE(got.logits[static_cast<std::size_t>(t * p.padded + c)] == 0.0f);
          }
        }
      }
    }
  });
}

TEST_CASE("a vocabulary below, at and above the sizes of vector lanes is summed whole") {
  on_every_backend([](DeviceArrays& d) {
    for (const std::int64_t vocabulary : {1, 2, 15, 16, 17, 33}) {
      const Problem p = make_problem(5, vocabulary, 48, DType::kF32, 50.0f);
      const double want = in_double(p).loss;
      CHECK(std::abs(run(d, p, DType::kF32, true).loss[1] - want) <= 1e-6 * want + 1e-6);
    }
  });
}

TEST_CASE("only the current microbatch's loss cell is written") {
  on_every_backend([](DeviceArrays& d) {
    const Result got = run(d, make_problem(4, 32, 32, DType::kBF16, 0.0f), DType::kBF16, true);
    CHECK(got.loss[0] == -1.0f);
    CHECK(got.loss[1] > 0.0f);
    CHECK(got.loss[2] == -3.0f);
  });
}

TEST_CASE("equal logits cost the logarithm of the vocabulary, however large they are") {
  on_every_backend([](DeviceArrays& d) {
    for (const float level : {0.0f, 1e4f, -3e38f, 3e38f}) {
      Problem p = make_problem(3, 257, 384, DType::kF32, 0.0f);
      for (float& v : p.logits) v = level;
      CHECK(std::abs(run(d, p, DType::kF32, false).loss[1] - 3 * std::log(257.0)) < 1e-5);
    }
  });
}

TEST_CASE("evaluation leaves the logits as they are and gives the same loss") {
  on_every_backend([](DeviceArrays& d) {
    const Problem p = make_problem(8, 100, 128, DType::kBF16, 3.0f);
    const Result evaluated = run(d, p, DType::kBF16, false);
    CHECK(evaluated.logits == p.logits);
    CHECK(evaluated.loss[1] == run(d, p, DType::kBF16, true).loss[1]);
  });
}

TEST_CASE("a row without target has no loss and a gradient of zero") {
  on_every_backend([](DeviceArrays& d) {
    Problem p = make_problem(6, 40, 48, DType::kF32, 7.0f);
    p.targets[0] = p.targets[4] = -1;
    for (std::size_t c = 0; c < 48; ++c) p.logits[c] = kNaN;  // row 0
    const Result got = run(d, p, DType::kF32, true);
    const double want = in_double(p).loss;
    CHECK(std::abs(got.loss[1] - want) < 1e-6 * want);
    for (std::size_t c = 0; c < 48; ++c) {
      CHECK(got.logits[c] == 0.0f);
      CHECK(got.logits[4 * 48 + c] == 0.0f);
    }
  });
}

TEST_CASE("a NaN or an Inf among the logits reaches the loss") {
  on_every_backend([](DeviceArrays& d) {
    for (const float poison : {kNaN, kInf}) {
      for (const std::size_t column : {0u, 20u, 99u}) {
        Problem p = make_problem(4, 100, 128, DType::kF32, 0.0f);
        p.logits[2 * 128 + column] = poison;
        CHECK(std::isnan(run(d, p, DType::kF32, true).loss[1]));
      }
    }
  });
}

TEST_CASE("a column of minus infinity has probability zero") {
  on_every_backend([](DeviceArrays& d) {
    Problem p = make_problem(1, 2, 16, DType::kF32, 0.0f);
    p.logits[0] = 5.0f;
    p.logits[1] = -kInf;
    p.targets[0] = 0;
    const Result got = run(d, p, DType::kF32, true);
    CHECK(got.loss[1] == 0.0f);
    CHECK(got.logits[0] == 0.0f);
    CHECK(got.logits[1] == 0.0f);
  });
}

TEST_CASE("rows of any length agree with the softmax in double, and the same call twice gives the same bytes") {
  struct Case {
    DType type;
    std::int64_t tokens, vocabulary, padded;
  };
  // Rows without wide accesses; rows of a few kilobytes up to several times a GPU's shared memory.
  const Case cases[] = {
      {DType::kBF16, 7, 251, 251},       {DType::kF32, 7, 253, 261},      {DType::kBF16, 3, 8191, 8192},
      {DType::kF32, 3, 8193, 8256},      {DType::kBF16, 3, 50257, 50304}, {DType::kF32, 2, 50257, 50304},
      {DType::kBF16, 2, 120001, 120064}, {DType::kF32, 2, 70001, 70016},  {DType::kF32, 1, 70001, 70003}};
  on_every_backend([&](DeviceArrays& d) {
    for (const Case& c : cases) {
      INFO(name_of(c.type) << " " << c.vocabulary << " of " << c.padded);
      Problem p = make_problem(c.tokens, c.vocabulary, c.padded, c.type, kNaN);
      p.targets.back() = static_cast<std::int32_t>(c.vocabulary - 1);
      const Result got = run(d, p, c.type, true), again = run(d, p, c.type, true);
      require_oracle(p, c.type, got);
      CHECK(got.loss == again.loss);
      CHECK(got.logits == again.logits);
    }
  });
}

TEST_CASE("a padding column has gradient zero even where the row is NaN") {
  on_every_backend([](DeviceArrays& d) {
    Problem p = make_problem(2, 100, 128, DType::kBF16, 5.0f);
    p.logits[128 + 3] = kNaN;
    const Result got = run(d, p, DType::kBF16, true);
    for (std::size_t c = 100; c < 128; ++c) CHECK(got.logits[128 + c] == 0.0f);
    CHECK(std::isnan(got.logits[128 + 4]));
  });
}

TEST_CASE("many rows at the size of a language model agree with the softmax in double", "[slow]") {
  on_every_backend([](DeviceArrays& d) {
    Problem p = make_problem(512, 50257, 50304, DType::kBF16, 1e30f);
    for (std::size_t t = 0; t < p.targets.size(); t += 5) p.targets[t] = -1;
    require_oracle(p, DType::kBF16, run(d, p, DType::kBF16, true));
  });
}

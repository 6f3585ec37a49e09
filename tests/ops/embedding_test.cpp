// Embedding forward and backward with inputs whose sums are exact, or whose order of summation shows.
#include <bit>
#include <cstring>
#include <vector>

#include "core/random.h"
#include "tests/ops/device_arrays.h"

using namespace qe;
using qe::test::DeviceArrays;
using qe::test::on_every_backend;

namespace {
constexpr float kBig = 16777216.0f;  // 2^24: adding 1 to it changes nothing

std::vector<float> random_values(std::size_t n, std::uint64_t stream) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(philox(stream, 9, i).w[0]) * 0x1p-31f - 1.0f;
  return values;
}

bool same_bytes(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A microbatch of random tokens, the second of two; a third of its tokens are id 1, some ids never come.
struct Batch {
  std::size_t tokens, length, hidden, ids;
  std::vector<std::int32_t> values;  // both microbatches
  [[nodiscard]] std::size_t id(std::size_t t) const { return static_cast<std::size_t>(values[tokens + t]); }
};
Batch make_batch(std::size_t tokens, std::size_t length, std::size_t hidden, std::size_t ids) {
  Batch b{tokens, length, hidden, ids, std::vector<std::int32_t>(2 * tokens, 0)};
  for (std::size_t t = 0; t < tokens; ++t) {
    const RandomWords r = philox(21, tokens, t);
    b.values[tokens + t] = r.w[1] % 3 == 0 ? 1 : static_cast<std::int32_t>(r.w[0] % ids);
  }
  return b;
}

struct Gradients {
  std::vector<float> token, position;
};
// In the order of additions that core/ops_args.h names.
Gradients gradients_in_order(const Batch& b, const std::vector<float>& rows, Gradients g) {
  std::vector<float> sums(b.ids * b.hidden, 0.0f);
  std::vector<bool> comes(b.ids, false);
  for (std::size_t t = 0; t < b.tokens; ++t) {
    comes[b.id(t)] = true;
    for (std::size_t c = 0; c < b.hidden; ++c) {
      const float v = rows[t * b.hidden + c];
      sums[b.id(t) * b.hidden + c] += v;
      g.position[t % b.length * b.hidden + c] += v;
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (comes[i / b.hidden]) g.token[i] += sums[i];
  }
  return g;
}
}  // namespace

TEST_CASE("a row is its token's plus its position's, summed in FP32 and rounded once") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType type : {DType::kBF16, DType::kF32}) {
      // Two microbatches of two sequences of two tokens; the second microbatch is read.
      const auto* tokens = d.array<std::int32_t>({9, 9, 9, 9, 2, 0, 1, 2});
      const auto* microbatch = d.array<std::int32_t>({1});
      const Tensor table = d.matrix(type, 10, 2, {1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 4);
      const Tensor positions = d.matrix(DType::kF32, 3, 2, {0x1p-9f, 0.25f, 0.5f, 0x1p-20f, 99, 99});
      const Tensor out = d.matrix(type, 4, 2, 8);
      d.ops().embedding_forward(d.stream(), {tokens, microbatch, 2, table, positions, out});
      std::vector<float> want = {5 + 0x1p-9f, 6.25f, 1.5f, 2 + 0x1p-20f, 3 + 0x1p-9f, 4.25f, 5.5f, 6 + 0x1p-20f};
      if (type == DType::kBF16) {
        for (float& v : want) v = round_bf16(v);
      }
      CHECK(d.get(out) == want);
      CHECK(d.padding_intact(out));
    }
  });
}

TEST_CASE("token and position gradients add every row of the current microbatch") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType type : {DType::kBF16, DType::kF32}) {
      const auto* tokens = d.array<std::int32_t>({4, 4, 4, 4, 2, 0, 2, 2});
      const auto* microbatch = d.array<std::int32_t>({1});
      const Tensor grad = d.matrix(type, 4, 2, {1, 10, 2, 20, 4, 40, 8, 80}, 4);
      const Tensor token = d.matrix(DType::kF32, 5, 2, std::vector<float>(10, 100.0f));
      const Tensor position = d.matrix(DType::kF32, 3, 2, std::vector<float>(6, 1000.0f));
      const Tensor touched = d.matrix(DType::kF32, 1, 5, {0, 0, 3, 0, 0});
      d.ops().embedding_backward(d.stream(), {tokens, microbatch, 2, grad, token, position, touched});
      CHECK(d.get(touched) == std::vector<float>{1, 0, 4, 0, 0});
      CHECK(d.get(token) == std::vector<float>{102, 120, 100, 100, 113, 230, 100, 100, 100, 100});
      CHECK(d.get(position) == std::vector<float>{1005, 1050, 1010, 1100, 1000, 1000});
    }
  });
}

TEST_CASE("the rows of one id are summed in token order before they meet the main gradient") {
  on_every_backend([](DeviceArrays& d) {
    const auto* microbatch = d.array<std::int32_t>({0});
    const Tensor position = d.matrix(DType::kF32, 4, 1);
    // Two ones first become two, which a main gradient of 2^24 can hold; one by one they would vanish.
    const auto* same = d.array<std::int32_t>({1, 0, 1, 0});
    const Tensor token = d.matrix(DType::kF32, 2, 1, {0, kBig});
    const Tensor ones = d.matrix(DType::kF32, 4, 1, {1, 0, 1, 0});
    d.ops().embedding_backward(d.stream(), {same, microbatch, 4, ones, token, position});
    CHECK(d.get(token) == std::vector<float>{0, kBig + 2});
    // In token order the one is lost; in any other it is not.
    const Tensor then_back = d.matrix(DType::kF32, 4, 1, {kBig, 1, -kBig, 0});
    const auto* three = d.array<std::int32_t>({0, 0, 0, 1});
    d.set(token, {0, 0});
    d.ops().embedding_backward(d.stream(), {three, microbatch, 4, then_back, token, position});
    CHECK(d.get(token)[0] == 0.0f);
  });
}

TEST_CASE("an id with many rows keeps their token order") {
  on_every_backend([](DeviceArrays& d) {
    // Ids alternate 5, 2, 5, 2, …; the rows of each rise so steeply that another order gives another sum.
    constexpr std::size_t kTokens = 256;
    std::vector<std::int32_t> ids(kTokens);
    std::vector<float> rows(kTokens), want(8, 0.0f);
    for (std::size_t i = 0; i < kTokens; ++i) {
      ids[i] = i % 2 == 0 ? 5 : 2;
      rows[i] = (static_cast<float>(philox(4, 0, i).w[0]) * 0x1p-32f + 1.0f) * static_cast<float>(1 + i * i);
      want[static_cast<std::size_t>(ids[i])] += rows[i];
    }
    const Tensor token = d.matrix(DType::kF32, 8, 1), position = d.matrix(DType::kF32, 256, 1);
    d.ops().embedding_backward(d.stream(), {d.array(ids), d.array<std::int32_t>({0}), 256,
                                            d.matrix(DType::kF32, kTokens, 1, rows), token, position});
    CHECK(d.get(token) == want);
  });
}

TEST_CASE("all tokens equal: the gradient is the same in every one of 20 runs and close to the exact sum") {
  on_every_backend([](DeviceArrays& d) {
    constexpr std::int64_t kTokens = 64, kHidden = 32;
    std::vector<float> rows(kTokens * kHidden);
    std::vector<double> want(kHidden, 0.0);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = round_bf16(static_cast<float>(philox(3, 0, i).w[0]) * 0x1p-32f - 0.5f);
      want[i % kHidden] += rows[i];
    }
    const auto* tokens = d.array(std::vector<std::int32_t>(kTokens, 3));
    const auto* microbatch = d.array<std::int32_t>({0});
    const Tensor grad = d.matrix(DType::kBF16, kTokens, kHidden, rows);
    const Tensor token = d.matrix(DType::kF32, 8, kHidden), position = d.matrix(DType::kF32, 32, kHidden);
    std::vector<float> first_token, first_position;
    for (int run = 0; run < 20; ++run) {
      d.set(token, std::vector<float>(8 * kHidden, 0.0f));
      d.set(position, std::vector<float>(32 * kHidden, 0.0f));
      d.ops().embedding_backward(d.stream(), {tokens, microbatch, 32, grad, token, position});
      if (run == 0) {
        first_token = d.get(token);
        first_position = d.get(position);
      }
      REQUIRE(d.get(token) == first_token);
      REQUIRE(d.get(position) == first_position);
    }
    for (std::size_t c = 0; c < kHidden; ++c) {
      CHECK(std::abs(first_token[3 * kHidden + c] - want[c]) < 1e-5);
      CHECK(first_token[2 * kHidden + c] == 0.0f);
    }
  });
}

TEST_CASE("gradients of any shape have the bits of additions in the promised order") {
  struct Case {
    std::size_t tokens, length, hidden, ids;
    std::int64_t pad;  // between rows; 0: contiguous
  };
  // Columns that allow wide accesses and not, more than a block's; more tokens than are compared at once.
  const Case cases[] = {{1, 1, 1, 3, 0},          {6, 3, 4104, 5, 8},       {33, 11, 8, 4, 0},
                        {64, 64, 13, 40, 5},      {4104, 1026, 40, 300, 0}, {2049, 683, 16, 9, 8},
                        {2048, 512, 768, 700, 0}, {65536, 4096, 8, 5000, 0}};
  on_every_backend([&](DeviceArrays& d) {
    for (const Case& c : cases) {
      INFO(c.tokens << " tokens of " << c.hidden);
      const Batch b = make_batch(c.tokens, c.length, c.hidden, c.ids);
      const auto matrix = [&](DType type, std::size_t rows, const std::vector<float>& values) {
        const auto cols = static_cast<std::int64_t>(c.hidden);
        return d.matrix(type, static_cast<std::int64_t>(rows), cols, values, c.pad == 0 ? 0 : cols + c.pad);
      };
      const Gradients before = {random_values(c.ids * c.hidden, 1), random_values(c.length * c.hidden, 2)};
      for (const DType type : {DType::kBF16, DType::kF32}) {
        std::vector<float> rows = random_values(c.tokens * c.hidden, 3);
        if (type == DType::kBF16) {
          for (float& v : rows) v = round_bf16(v);
        }
        const Tensor token = matrix(DType::kF32, c.ids, before.token);
        const Tensor position = matrix(DType::kF32, c.length, before.position);
        d.ops().embedding_backward(d.stream(),
                                   {d.array(b.values), d.array<std::int32_t>({1}), static_cast<int>(c.length),
                                    matrix(type, c.tokens, rows), token, position});
        const Gradients want = gradients_in_order(b, rows, before);
        CHECK(same_bytes(d.get(token), want.token));
        CHECK(same_bytes(d.get(position), want.position));
        if (c.pad != 0) CHECK((d.padding_intact(token) && d.padding_intact(position)));
      }
    }
  });
}

TEST_CASE("rows of any width are token plus position and overwrite whatever was there") {
  on_every_backend([](DeviceArrays& d) {
    for (const std::size_t hidden : {1u, 8u, 13u, 768u, 4104u}) {
      for (const DType type : {DType::kBF16, DType::kF32}) {
        INFO(hidden << " columns of " << name_of(type));
        const Batch b = make_batch(96, 32, hidden, 50);
        const auto cols = static_cast<std::int64_t>(hidden);
        std::vector<float> table = random_values(b.ids * hidden, 4), positions = random_values(b.length * hidden, 5);
        if (type == DType::kBF16) {
          for (float& v : table) v = round_bf16(v);
        }
        const Tensor out = d.matrix(type, 96, cols, std::vector<float>(96 * hidden, std::bit_cast<float>(0x7fc00000u)));
        d.ops().embedding_forward(d.stream(),
                                  {d.array(b.values), d.array<std::int32_t>({1}), 32, d.matrix(type, 50, cols, table),
                                   d.matrix(DType::kF32, 32, cols, positions), out});
        std::vector<float> want(96 * hidden);
        for (std::size_t i = 0; i < want.size(); ++i) {
          const std::size_t t = i / hidden, c = i % hidden;
          want[i] = table[b.id(t) * hidden + c] + positions[t % 32 * hidden + c];
          if (type == DType::kBF16) want[i] = round_bf16(want[i]);
        }
        CHECK(same_bytes(d.get(out), want));
      }
    }
  });
}

// Philox against the vectors of its authors (Random123, kat_vectors), and the keys of named streams.
#include "core/random.h"

#include <cmath>
#include <set>

#include "tests/catch.h"

namespace {

void require_words(const qe::RandomWords& r, std::uint32_t w0, std::uint32_t w1, std::uint32_t w2, std::uint32_t w3) {
  CHECK(r.w[0] == w0);
  CHECK(r.w[1] == w1);
  CHECK(r.w[2] == w2);
  CHECK(r.w[3] == w3);
}

}  // namespace

TEST_CASE("philox 4x32-10 gives the published words") {
  require_words(qe::philox(0, 0, 0), 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u);
  require_words(qe::philox(~0ull, ~0ull, ~0ull), 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu);
  // Counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0, first word lowest.
  require_words(qe::philox(0x299f31d0a4093822ull, 0x0370734413198a2eull, 0x85a308d3243f6a88ull), 0xd16cfe09u,
                0x94fdccebu, 0x5001e420u, 0x24126ea1u);
}

TEST_CASE("the same key and counter give the same words at compile time and at run time") {
  constexpr qe::RandomWords at_compile_time = qe::philox(7, 8, 9);
  const qe::RandomWords now = qe::philox(7, 8, 9);
  require_words(now, at_compile_time.w[0], at_compile_time.w[1], at_compile_time.w[2], at_compile_time.w[3]);
}

TEST_CASE("streams of different names or seeds have different keys") {
  std::set<std::uint64_t> keys;
  for (const std::uint64_t seed : {0ull, 1ull, 2ull, 0x100000000ull}) {
    for (const char* name : {"", "a", "b", "ab", "ba", "layers.0.mlp.fc1.weight", "layers.1.mlp.fc1.weight"}) {
      keys.insert(qe::random_key(seed, name));
    }
  }
  CHECK(keys.size() == 28);
}

TEST_CASE("the mean of many words is that of a uniform distribution") {
  double sum = 0.0;
  constexpr int kGroups = 100000;
  for (int i = 0; i < kGroups; ++i) {
    const qe::RandomWords r = qe::philox(qe::random_key(1234, "uniform"), 0, static_cast<std::uint64_t>(i));
    for (const std::uint32_t w : r.w) sum += w * 0x1p-32;
  }
  // 400,000 draws: the standard deviation of the mean is 0.00046.
  CHECK(std::abs(sum / (4.0 * kGroups) - 0.5) < 0.0023);
}

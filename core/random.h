// Counter-based random bits: the same key and counter give the same bits on every machine and device.
// Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace qe {

struct RandomWords {
  std::uint32_t w[4];
};

template <int kRounds = 10>
QE_HD constexpr RandomWords philox(std::uint64_t key, std::uint64_t counter_hi, std::uint64_t counter_lo) noexcept {
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  std::uint32_t c0 = static_cast<std::uint32_t>(counter_lo), c1 = static_cast<std::uint32_t>(counter_lo >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(counter_hi), c3 = static_cast<std::uint32_t>(counter_hi >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A key for a named stream of random bits: FNV-1a of the name, mixed with the seed.
constexpr std::uint64_t random_key(std::uint64_t seed, std::string_view name) noexcept {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  const RandomWords r = philox(h, 0, seed);
  return (std::uint64_t{r.w[0]} << 32) | r.w[1];
}

}  // namespace qe

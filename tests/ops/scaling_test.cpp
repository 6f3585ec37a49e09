// update_scales over the slots of a chain, and the scale of dynamic FP8.
#include <cmath>
#include <limits>
#include <vector>

#include "core/fp8/scale_rule.h"
#include "core/random.h"
#include "tests/ops/device_arrays.h"

using namespace qe;
using qe::test::DeviceArrays;
using qe::test::on_every_backend;

namespace {
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
}  // namespace

TEST_CASE("one update rolls the used slots and leaves an idle one as it was") {
  on_every_backend([](DeviceArrays& d) {
    float* history = d.array<float>({
        5.0f, 1.0f, 2.0f,     // used
        0.0f, 8.0f, 16.0f,    // idle
        kInf, 4.0f, 4.0f,     // overflowed
        0x1p-40f, 0.0f, 0.0f  // tiny
    });
    float* scale = d.array<float>({1.0f, 2.0f, 3.0f, 4.0f});
    d.ops().update_scales(d.stream(), {history, scale, 4, 3, DType::kE5M2, 0, AmaxAlgorithm::kMax});
    CHECK(d.read(history, 12) == std::vector<float>{0.0f, 2.0f, 5.0f,   //
                                                    0.0f, 8.0f, 16.0f,  //
                                                    0.0f, 4.0f, kInf,   //
                                                    0.0f, 0.0f, 0x1p-40f});
    CHECK(d.read(scale, 4) == std::vector<float>{57344.0f / 5.0f, 2.0f, 3.0f, 57344.0f * 0x1p40f});
  });
}

TEST_CASE("every slot follows the shared rule through many updates") {
  on_every_backend([](DeviceArrays& d) {
    for (const int length : {1, 2, 3, 4, 255, 1024, 1025, 1026, 3000}) {
      for (const AmaxAlgorithm algorithm : {AmaxAlgorithm::kMax, AmaxAlgorithm::kMostRecent}) {
        constexpr int kSlots = 12;
        std::vector<float> history(static_cast<std::size_t>(kSlots * length), 0.0f), scale(kSlots, 1.0f);
        float* device_history = d.array(history);
        float* device_scale = d.array(scale);
        for (std::uint64_t update = 0; update < 6; ++update) {
          for (std::uint64_t slot = 0; slot < kSlots; ++slot) {
            const RandomWords r = philox(5, slot, update);
            const float amax[] = {0.0f, kInf, kNaN, 1e-45f};
            float& current = history[slot * static_cast<std::size_t>(length)];
            current = r.w[0] % 8 < 4 ? amax[r.w[0] % 4] : std::ldexp(1.0f, static_cast<int>(r.w[1] % 40) - 20);
          }
          d.write(device_history, history);
          d.ops().update_scales(d.stream(), {device_history, device_scale, kSlots, length, DType::kE4M3, 2, algorithm});
          for (int slot = 0; slot < kSlots; ++slot) {
            const auto s = static_cast<std::size_t>(slot);
            scale[s] = update_slot(&history[s * static_cast<std::size_t>(length)], length, scale[s], DType::kE4M3, 2,
                                   algorithm);
          }
          REQUIRE(d.read(device_scale, scale.size()) == scale);
          const std::vector<float> got = d.read(device_history, history.size());
          REQUIRE(std::memcmp(got.data(), history.data(), history.size() * sizeof(float)) == 0);
        }
      }
    }
  });
}

TEST_CASE("the dynamic scale is the format's maximum over the tensor's amax") {
  on_every_backend([](DeviceArrays& d) {
    float* scale = d.array<float>({-1.0f});
    const auto scale_of = [&](const Tensor& x, DType format, bool round) {
      d.ops().dynamic_scale(d.stream(), {x, format, scale, round});
      return d.read(scale, 1)[0];
    };
    const Tensor bf16 = d.matrix(DType::kBF16, 3, 3, {1.0f, -7.0f, 0.5f, 2.0f, 3.0f, 6.0f, 0.0f, 1.0f, -1.0f}, 8);
    CHECK(scale_of(bf16, DType::kE4M3, false) == 64.0f);
    CHECK(scale_of(bf16, DType::kE5M2, false) == 8192.0f);
    // The master rounds to 7 in BF16; unrounded it gives another scale.
    const Tensor master = d.matrix(DType::kF32, 1, 2, {7.0f + 0x1p-8f, 1.0f});
    CHECK(scale_of(master, DType::kE4M3, true) == 64.0f);
    CHECK(scale_of(master, DType::kE4M3, false) == 448.0f / (7.0f + 0x1p-8f));
  });
}

TEST_CASE("a tensor of zeros has a finite dynamic scale, and NaN does not reach it") {
  on_every_backend([](DeviceArrays& d) {
    float* scale = d.array<float>({-1.0f});
    const Tensor zeros = d.matrix(DType::kBF16, 2, 4);
    d.ops().dynamic_scale(d.stream(), {zeros, DType::kE4M3, scale, false});
    CHECK(d.read(scale, 1)[0] == 0x1.97742p+48f);  // 448 / 1e-12
    const Tensor nan = d.matrix(DType::kBF16, 1, 2, {kNaN, 14.0f});
    d.ops().dynamic_scale(d.stream(), {nan, DType::kE4M3, scale, false});
    CHECK(d.read(scale, 1)[0] == 32.0f);
  });
}

TEST_CASE("the dynamic scale finds the largest value wherever it lies, and nothing between the rows") {
  on_every_backend([](DeviceArrays& d) {
    float* scale = d.array<float>({-1.0f});
    const std::int64_t rows = 67, cols = 1040;
    for (const DType type : {DType::kBF16, DType::kF32}) {
      for (const std::int64_t pitch : {0, 1048, 1043}) {
        for (const std::int64_t at : {std::int64_t{0}, rows * cols - 1, 31 * cols + 513}) {
          std::vector<float> values(static_cast<std::size_t>(rows * cols), 1.0f);
          values[static_cast<std::size_t>(at)] = -3.5f;
          const Tensor x = d.matrix(type, rows, cols, values, pitch);
          d.ops().dynamic_scale(d.stream(), {x, DType::kE4M3, scale, type == DType::kF32});
          CHECK(d.read(scale, 1)[0] == 128.0f);
        }
      }
    }
  });
}

TEST_CASE("a token advances by one in every call, with the slots and alone, whatever their amaxes") {
  on_every_backend([](DeviceArrays& d) {
    auto* token = d.array<std::uint64_t>({(std::uint64_t{1} << 32) - 1});
    float* history = d.array<float>({0.0f, 1.0f, 4.0f, 0.0f});  // the first slot has nothing to move
    float* scale = d.array<float>({3.0f, 3.0f});
    d.ops().update_scales(d.stream(), {.token = token});
    d.ops().update_scales(d.stream(), {history, scale, 2, 2, DType::kE4M3, 0, AmaxAlgorithm::kMostRecent, token});
    CHECK(d.read(token, 1)[0] == (std::uint64_t{1} << 32) + 1);
    CHECK(d.read(scale, 2) == std::vector<float>{3.0f, 112.0f});
    CHECK(d.read(history, 4) == std::vector<float>{0.0f, 1.0f, 0.0f, 4.0f});
  });
}

// What the CUDA backend promises about the choice among cuBLASLt's algorithms: alike everywhere, or as a tune file
// says.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "app/bench/gemm_tune.h"
#include "core/error.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "tests/catch.h"

using namespace qe;

namespace {

// False, with a warning, on a machine without a GPU.
bool has_device() {
  if (CudaDevice::count() > 0) return true;
  WARN("skipped: no CUDA device here");
  return false;
}

// A backend that has multiplied BF16 matrices [n, n], and one FP8 product it is asked for.
struct Products {
  CudaDevice device;
  CudaOps ops{device};
  std::unique_ptr<Stream> stream = device.make_stream("gemm");
  Buffer memory = device.allocate(std::size_t{4} << 20, MemoryKind::kStep);

  Tensor matrix(int i, DType type, std::int64_t rows, std::int64_t cols) const {
    return make_tensor(memory.as<unsigned char>() + (std::int64_t{i} << 20), type, {rows, cols});
  }
  GemmArgs product(std::int64_t n) const {
    GemmArgs args;
    args.a = matrix(0, DType::kBF16, n, n);
    args.b = matrix(1, DType::kBF16, n, n);
    args.d = matrix(2, DType::kBF16, n, n);
    return args;
  }
};

}  // namespace

TEST_CASE("two backends asked for the same products choose the same algorithms") {
  if (!has_device()) return;
  const auto choices = [](std::vector<std::int64_t> sizes) {
    Products p;
    std::vector<GemmArgs> products;
    for (const std::int64_t n : sizes) products.push_back(p.product(n));
    return p.ops.choose_gemms(products);
  };
  CHECK(choices({512, 256}) == choices({256, 512, 256}));
  CHECK(choices({512}) != choices({256}));
}

TEST_CASE("a product that the library cannot compute is named") {
  if (!has_device()) return;
  Products p;
  GemmArgs args;
  args.a = p.matrix(0, DType::kE4M3, 32, 24);  // k is no multiple of 16
  args.b = p.matrix(1, DType::kE4M3, 32, 24);
  args.a_scale_inv = args.b_scale_inv = p.matrix(2, DType::kF32, 1, 1);
  args.d = p.matrix(3, DType::kBF16, 32, 32);
  REQUIRE_THROWS_WITH(p.ops.gemm(*p.stream, args),
                      ContainsSubstring("m 32, n 32") && ContainsSubstring("k 24") && ContainsSubstring("e4m3"));
  REQUIRE_THROWS_WITH(p.ops.choose_gemms(std::vector{args}), ContainsSubstring("k 24") && ContainsSubstring("e4m3"));
  p.ops.gemm(*p.stream, p.product(256));  // and the backend goes on
  p.device.synchronize();
}

TEST_CASE("a table's algorithm is the one that computes, and is what the choices say") {
  if (!has_device()) return;
  constexpr std::int64_t kSize = 256;
  Products p;
  GemmArgs args = p.product(kSize);
  args.d = p.matrix(2, DType::kF32, kSize, kSize);
  const std::vector<std::string> candidates = p.ops.gemm_candidates(args);
  REQUIRE(candidates.size() > 1);
  CHECK(p.ops.choose_gemms(std::vector{args}).front().algorithm == candidates[0]);
  const GemmChoice second{p.ops.gemm_product(args), candidates[1]};
  p.ops.use_gemms(std::vector{second}, "t.json");
  CHECK(p.ops.choose_gemms(std::vector{args}) == std::vector{second});

  // Small integers, whose sums are exact in FP32 in any order.
  const auto a = [](std::int64_t i, std::int64_t k) { return static_cast<float>((i * 7 + k * 3) % 9 - 4); };
  const auto b = [](std::int64_t j, std::int64_t k) { return static_cast<float>((j * 5 + k * 11) % 7 - 3); };
  const auto fill = [&](const Tensor& t, const auto& value) {
    std::vector<Bf16> host;
    for (std::int64_t r = 0; r < kSize; ++r) {
      for (std::int64_t k = 0; k < kSize; ++k) host.push_back(to_bf16(value(r, k)));
    }
    p.device.upload(*p.stream, t.data, host.data(), t.bytes());
  };
  fill(args.a, a);
  fill(args.b, b);
  p.ops.gemm(*p.stream, args);
  std::vector<float> got(static_cast<std::size_t>(kSize * kSize)), want;
  p.device.download(*p.stream, got.data(), args.d.data, args.d.bytes());
  p.device.synchronize(*p.stream);
  for (std::int64_t i = 0; i < kSize; ++i) {
    for (std::int64_t j = 0; j < kSize; ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < kSize; ++k) sum += a(i, k) * b(j, k);
      want.push_back(sum);
    }
  }
  CHECK(got == want);

  p.ops.use_gemms({}, "");
  CHECK(p.ops.choose_gemms(std::vector{args}).front().algorithm == candidates[0]);
}

TEST_CASE("an algorithm that the library cannot use for its product is refused with product and file") {
  if (!has_device()) return;
  Products p;
  const std::string product = p.ops.gemm_product(p.product(256));
  std::string garbage;
  for (int word = 0; word < 8; ++word) garbage += std::string(word > 0 ? " " : "") + "deadbeefdeadbeef";
  for (const std::string& algorithm : {garbage, std::string("deadbeefdeadbeef")}) {
    p.ops.use_gemms(std::vector<GemmChoice>{{product, algorithm}}, "t.json");
    REQUIRE_THROWS_WITH(p.ops.gemm(*p.stream, p.product(256)),
                        ContainsSubstring("t.json: cuBLASLt") && ContainsSubstring(product));
    CHECK_THROWS_AS(p.ops.choose_gemms(std::vector{p.product(256)}), DeviceError);
    p.ops.gemm(*p.stream, p.product(512));  // and the backend goes on
    p.device.synchronize();
  }
}

TEST_CASE("tuning finds an algorithm that is then used, for FP8 with a bias and for a gradient that adds") {
  if (!has_device()) return;
  Products p;
  GemmArgs forward;
  forward.a = p.matrix(0, DType::kE4M3, 256, 512);
  forward.b = p.matrix(1, DType::kE4M3, 512, 512);
  forward.a_scale_inv = forward.b_scale_inv = p.matrix(2, DType::kF32, 1, kScalePitch).cols(0, 1);
  forward.bias = p.matrix(2, DType::kBF16, 1, 512);
  forward.d = p.matrix(3, DType::kBF16, 256, 512);
  forward.fast_accumulation = true;
  GemmArgs gradient = p.product(256);
  gradient.accumulate = true;
  const std::vector<GemmArgs> products{forward, gradient, p.product(256)};
  std::vector<GemmChoice> tuned;
  tune_gemms(p.device, p.ops, p.ops, products, [&](const GemmTableEntry& e) {
    INFO(e.product << ": " << e.first_us << " us, " << e.us << " us");
    CHECK(e.us > 0);
    CHECK(e.us <= e.first_us);
    tuned.push_back({e.product, e.algorithm});
  });
  CHECK(tuned.size() == 2);
  p.ops.use_gemms(tuned, "t.json");
  std::vector<GemmChoice> chosen = p.ops.choose_gemms(products);
  CHECK(std::is_permutation(chosen.begin(), chosen.end(), tuned.begin(), tuned.end()));
}

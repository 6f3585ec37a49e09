// Prints GFLOP/s of gemm on one core: D[512, 512] over k = 512 and a layer's small shapes, for each operand type.
// Not a test: it asserts nothing. Best of many calls, packing included.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "core/fp8/codec.h"
#include "core/random.h"
#include "kernels/cpu/kernels.h"

namespace {

using namespace qe;

struct Matrix {
  Matrix(DType type, std::int64_t rows, std::int64_t cols, std::uint64_t seed)
      : bytes(static_cast<std::size_t>(rows * cols) * size_of(type)),
        view(make_tensor(bytes.data(), type, {rows, cols})) {
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const float v = static_cast<float>(philox(seed, 0, static_cast<std::uint64_t>(i)).w[0]) * 0x1p-31f - 1.0f;
      if (type == DType::kF32) view.as<float>()[i] = v;
      if (type == DType::kBF16) view.as<Bf16>()[i] = to_bf16(v);
      if (is_fp8(type)) view.as<std::uint8_t>()[i] = encode_fp8(type, v * 64.0f);
    }
  }
  std::vector<unsigned char> bytes;
  Tensor view;
};

double seconds_of(const GemmArgs& args, int calls) {
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < calls; ++i) {
    const auto start = std::chrono::steady_clock::now();
    cpu::gemm(args);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

void report(DType type, std::int64_t m, std::int64_t n, std::int64_t k) {
  Matrix a(type, m, k, 1), b(type, n, k, 2), d(DType::kBF16, m, n, 3), scale(DType::kF32, 1, 1, 4);
  GemmArgs args;
  args.a = a.view;
  args.b = b.view;
  args.d = d.view;
  if (is_fp8(type)) args.a_scale_inv = args.b_scale_inv = scale.view;
  const double s = seconds_of(args, 50);
  std::printf("%-5s m %4lld n %4lld k %4lld  %8.1f us  %6.1f GFLOP/s\n", name_of(type), static_cast<long long>(m),
              static_cast<long long>(n), static_cast<long long>(k), s * 1e6, 2e-9 * static_cast<double>(m * n * k) / s);
}

}  // namespace

int main() {
  for (const DType type : {DType::kE4M3, DType::kBF16, DType::kF32}) {
    report(type, 512, 512, 512);
    report(type, 256, 512, 128);
    report(type, 256, 128, 512);
    report(type, 512, 128, 256);
    report(type, 64, 384, 128);
  }
  return 0;
}

// quantize, quantize_weight and cast against the codec applied element by element.
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "core/random.h"
#include "kernels/cpu/operand_writer.h"
#include "tests/ops/device_arrays.h"

using namespace qe;
using qe::test::DeviceArrays;
using qe::test::on_every_backend;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Signs and magnitudes from 2^-14 to 2^10, so that subnormal, normal and saturated codes all occur.
std::vector<float> spread_values(std::int64_t n, DType type) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const RandomWords r = philox(99, 0, i);
    const float v = std::ldexp(1.0f + static_cast<float>(r.w[0]) * 0x1p-32f, static_cast<int>(r.w[1] % 25) - 14);
    values[i] = r.w[2] & 1 ? -v : v;
    if (type == DType::kBF16) values[i] = round_bf16(values[i]);
  }
  return values;
}

struct Fp8Operand {
  Operand tensors;
  float* scale;
  float* amax;
  Quantizer quantizer;
};
Fp8Operand fp8_operand(DeviceArrays& d, DType format, Shape shape, float scale, float amax, std::int64_t pad) {
  Fp8Operand o;
  o.tensors.rowwise = d.matrix(format, shape.rows, shape.cols, pad ? shape.cols + pad : 0);
  o.tensors.columnwise = d.matrix(format, shape.cols, shape.rows, pad ? shape.rows + pad : 0);
  o.tensors.scale_inv = d.matrix(DType::kF32, 1, 1);
  o.scale = d.array<float>({scale});
  o.amax = d.array<float>({amax});
  o.quantizer = {o.scale, o.amax};
  return o;
}

void require_codes(DeviceArrays& d, const Operand& out, const std::vector<float>& values, float scale) {
  const Shape shape = out.rowwise.shape;
  const std::vector<std::uint8_t> rowwise = d.codes(out.rowwise), columnwise = d.codes(out.columnwise);
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    for (std::int64_t c = 0; c < shape.cols; ++c) {
      const auto i = static_cast<std::size_t>(r * shape.cols + c);
      const std::uint8_t want = encode_fp8(out.rowwise.dtype, values[i] * scale);
      REQUIRE(rowwise[i] == want);
      REQUIRE(columnwise[static_cast<std::size_t>(c * shape.rows + r)] == want);
    }
  }
}

}  // namespace

TEST_CASE("quantize writes the codec's bytes in both layouts, the amax and the reciprocal scale") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType source : {DType::kBF16, DType::kF32}) {
      for (const DType format : {DType::kE4M3, DType::kE5M2}) {
        for (const Shape shape : {Shape{16, 32}, Shape{48, 16}, Shape{13, 19}, Shape{1, 7}}) {
          for (const std::int64_t pad : {0, 16}) {
            INFO(name_of(source) << " to " << name_of(format) << " [" << shape.rows << ", " << shape.cols << "]");
            const std::vector<float> values = spread_values(shape.elements(), source);
            const Tensor x = d.matrix(source, shape.rows, shape.cols, values, pad ? shape.cols + pad : 0);
            const Fp8Operand out = fp8_operand(d, format, shape, 0.37f, 0.0f, pad);
            d.ops().quantize(d.stream(), {x, out.tensors, out.quantizer, {}});
            require_codes(d, out.tensors, values, 0.37f);
            float amax = 0.0f;
            for (const float v : values) amax = std::max(amax, std::abs(v));
            CHECK(d.read(out.amax, 1)[0] == amax);
            CHECK(d.get(out.tensors.scale_inv)[0] == 1.0f / 0.37f);
            if (pad) CHECK((d.padding_intact(out.tensors.rowwise) && d.padding_intact(out.tensors.columnwise)));
          }
        }
      }
    }
  });
}

TEST_CASE("amax is that of the unscaled values and only ever grows") {
  on_every_backend([](DeviceArrays& d) {
    const Tensor x = d.matrix(DType::kBF16, 2, 2, {1.0f, -5.0f, 2.0f, 0.0f});
    const Fp8Operand below = fp8_operand(d, DType::kE4M3, {2, 2}, 16.0f, 3.0f, 0);
    d.ops().quantize(d.stream(), {x, below.tensors, below.quantizer, {}});
    CHECK(d.read(below.amax, 1)[0] == 5.0f);
    const Fp8Operand above = fp8_operand(d, DType::kE4M3, {2, 2}, 16.0f, 7.0f, 0);
    d.ops().quantize(d.stream(), {x, above.tensors, above.quantizer, {}});
    CHECK(d.read(above.amax, 1)[0] == 7.0f);
  });
}

TEST_CASE("a NaN becomes 0x7F without reaching amax; an Inf saturates and does reach it") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      const Tensor nan = d.matrix(DType::kBF16, 1, 4, {1.0f, kNaN, -2.0f, -kNaN});
      const Fp8Operand a = fp8_operand(d, format, {1, 4}, 1.0f, 0.0f, 0);
      d.ops().quantize(d.stream(), {nan, a.tensors, a.quantizer, {}});
      CHECK(d.codes(a.tensors.rowwise)[1] == 0x7f);
      CHECK(d.codes(a.tensors.columnwise)[3] == 0x7f);
      CHECK(d.read(a.amax, 1)[0] == 2.0f);

      const Tensor inf = d.matrix(DType::kF32, 1, 2, {kInf, -kInf});
      const Fp8Operand b = fp8_operand(d, format, {1, 2}, 1.0f, 0.0f, 0);
      d.ops().quantize(d.stream(), {inf, b.tensors, b.quantizer, {}});
      CHECK(d.get(b.tensors.rowwise) == std::vector<float>{fp8_max(format), -fp8_max(format)});
      CHECK(d.read(b.amax, 1)[0] == kInf);
    }
  });
}

TEST_CASE("evaluation passes no amax and gets the same codes") {
  on_every_backend([](DeviceArrays& d) {
    const std::vector<float> values = spread_values(16 * 16, DType::kBF16);
    const Tensor x = d.matrix(DType::kBF16, 16, 16, values);
    const Fp8Operand out = fp8_operand(d, DType::kE4M3, {16, 16}, 2.0f, 0.0f, 0);
    d.ops().quantize(d.stream(), {x, out.tensors, {out.scale, nullptr}, {}});
    require_codes(d, out.tensors, values, 2.0f);
    CHECK(d.read(out.amax, 1)[0] == 0.0f);
  });
}

TEST_CASE("the bias gradient gains the column sums of the source, whatever the result's type") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType result : {DType::kE5M2, DType::kBF16, DType::kF32}) {
      std::vector<float> values(32 * 16);
      std::vector<float> want(16, 100.0f);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(philox(12, 0, i).w[0] % 31) - 15.0f;
        want[i % 16] += values[i];
      }
      const Tensor x = d.matrix(DType::kBF16, 32, 16, values);
      const Tensor bias = d.matrix(DType::kF32, 1, 16, std::vector<float>(16, 100.0f));
      Fp8Operand out = fp8_operand(d, DType::kE5M2, {32, 16}, 1.0f, 0.0f, 0);
      if (!is_fp8(result)) out.tensors = {d.matrix(result, 32, 16), {}, {}};
      d.ops().quantize(d.stream(), {x, out.tensors, out.quantizer, bias});
      CHECK(d.get(bias) == want);
    }
  });
}

TEST_CASE("BF16 and FP32 results are a cast of the source and touch no scaling state") {
  on_every_backend([](DeviceArrays& d) {
    for (const DType source : {DType::kBF16, DType::kF32}) {
      for (const DType result : {DType::kBF16, DType::kF32}) {
        const std::vector<float> values = spread_values(9 * 11, source);
        const Tensor x = d.matrix(source, 9, 11, values, 12);
        const Tensor y = d.matrix(result, 9, 11, 16);
        d.ops().quantize(d.stream(), {x, {y, {}, {}}, {}, {}});
        std::vector<float> want = values;
        if (result == DType::kBF16) {
          for (float& v : want) v = round_bf16(v);
        }
        CHECK(d.get(y) == want);
        CHECK(d.padding_intact(y));
      }
    }
  });
}

TEST_CASE("a weight is rounded to BF16 before it is quantized, and its amax is the rounded value") {
  on_every_backend([](DeviceArrays& d) {
    // 1.0625 lies between the codes of 1 and 1.125: the master is just above it, its BF16 value is on it.
    const Tensor master = d.matrix(DType::kF32, 1, 4, {1.0625f + 0x1p-12f, -3.0f - 0x1p-9f, 0.5f, 0.0f});
    const Fp8Operand out = fp8_operand(d, DType::kE4M3, {1, 4}, 1.0f, 0.0f, 0);
    d.ops().quantize_weight(d.stream(), {master, out.tensors, out.quantizer});
    CHECK(d.get(out.tensors.rowwise) == std::vector<float>{1.0f, -3.0f, 0.5f, 0.0f});
    CHECK(d.codes(out.tensors.columnwise) == d.codes(out.tensors.rowwise));
    CHECK(d.read(out.amax, 1)[0] == 3.0f);
    CHECK(d.get(out.tensors.scale_inv)[0] == 1.0f);
  });
}

TEST_CASE("both layouts of a weight come from the same cast") {
  on_every_backend([](DeviceArrays& d) {
    std::vector<float> values = spread_values(48 * 32, DType::kF32);
    const Tensor master = d.matrix(DType::kF32, 48, 32, values);
    const Fp8Operand out = fp8_operand(d, DType::kE4M3, {48, 32}, 3.0f, 0.0f, 0);
    d.ops().quantize_weight(d.stream(), {master, out.tensors, out.quantizer});
    for (float& v : values) v = round_bf16(v);
    require_codes(d, out.tensors, values, 3.0f);
  });
}

TEST_CASE("a BF16 weight copy is rounded once and an FP32 one is exact") {
  on_every_backend([](DeviceArrays& d) {
    std::vector<float> values = spread_values(6 * 10, DType::kF32);
    const Tensor master = d.matrix(DType::kF32, 6, 10, values);
    const Tensor exact = d.matrix(DType::kF32, 6, 10), rounded = d.matrix(DType::kBF16, 6, 10);
    const Tensor cast_exact = d.matrix(DType::kF32, 6, 10), cast_rounded = d.matrix(DType::kBF16, 6, 10, 16);
    d.ops().quantize_weight(d.stream(), {master, {exact, {}, {}}, {}});
    d.ops().quantize_weight(d.stream(), {master, {rounded, {}, {}}, {}});
    d.ops().cast(d.stream(), master, cast_exact);
    d.ops().cast(d.stream(), master, cast_rounded);
    CHECK(d.get(exact) == values);
    CHECK(d.get(cast_exact) == values);
    for (float& v : values) v = round_bf16(v);
    CHECK(d.get(rounded) == values);
    CHECK(d.get(cast_rounded) == values);
    CHECK(d.padding_intact(cast_rounded));
  });
}

namespace {

QE_CPU_CLONES void encode_floats(DType format, std::uint32_t first, std::int64_t n, float* values,
                                 std::uint8_t* codes) {
  for (std::int64_t i = 0; i < n; ++i) values[i] = std::bit_cast<float>(first + static_cast<std::uint32_t>(i));
  cpu::detail::encode_row(format, values, 1.0f, n, codes);
}

}  // namespace

TEST_CASE("the CPU's vector encoder equals the codec on every float", "[slow]") {
  constexpr std::uint32_t kBlock = 1 << 14;
  for (const DType format : {DType::kE4M3, DType::kE5M2}) {
    std::uint64_t wrong[2] = {0, 0};
    const auto check_half = [&](std::uint32_t half) {
      std::vector<float> values(kBlock);
      std::vector<std::uint8_t> codes(kBlock);
      for (std::uint32_t block = 0; block < (1u << 31) / kBlock; ++block) {
        encode_floats(format, (half << 31) + block * kBlock, kBlock, values.data(), codes.data());
        for (std::size_t i = 0; i < codes.size(); ++i) wrong[half] += codes[i] != encode_fp8(format, values[i]);
      }
    };
    std::thread negative(check_half, 1u);
    check_half(0u);
    negative.join();
    INFO(name_of(format));
    CHECK(wrong[0] + wrong[1] == 0);
  }
}

// quantize, quantize_weight and cast against the codec applied element by element. Everything is exact on every
// backend: codes, amax, scale_inv and BF16 are defined to the bit, and the column sums are of integers.
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
  const std::vector<float> poison(static_cast<std::size_t>(shape.elements()), kNaN);
  o.tensors.rowwise = d.matrix(format, shape.rows, shape.cols, poison, pad ? shape.cols + pad : 0);
  o.tensors.columnwise = d.matrix(format, shape.cols, shape.rows, poison, pad ? shape.rows + pad : 0);
  o.tensors.scale_inv = d.matrix(DType::kF32, 1, 1, std::vector<float>{kNaN});
  o.scale = d.array<float>({scale});
  o.amax = d.array<float>({amax});
  o.quantizer = {o.scale, o.amax};
  return o;
}

void require_codes(DeviceArrays& d, const Operand& out, const std::vector<float>& values, float scale) {
  const Shape shape = out.rowwise.shape;
  const std::vector<std::uint8_t> rowwise = d.codes(out.rowwise), columnwise = d.codes(out.columnwise);
  std::int64_t wrong_rowwise = 0, wrong_columnwise = 0;
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    for (std::int64_t c = 0; c < shape.cols; ++c) {
      const auto i = static_cast<std::size_t>(r * shape.cols + c);
      const std::uint8_t want = encode_fp8(out.rowwise.dtype, values[i] * scale);
      wrong_rowwise += rowwise[i] != want;
      wrong_columnwise += columnwise[static_cast<std::size_t>(c * shape.rows + r)] != want;
    }
  }
  REQUIRE(wrong_rowwise == 0);
  REQUIRE(wrong_columnwise == 0);
}

float amax_of(const std::vector<float>& values) {
  float amax = 0.0f;
  for (const float v : values) amax = std::max(amax, std::abs(v));
  return amax;
}

// Quantizes spread values of a shape with a bias gradient, all by the codec and exact sums.
void require_quantize(DeviceArrays& d, DType source, DType format, Shape shape) {
  INFO(name_of(source) << " to " << name_of(format) << " [" << shape.rows << ", " << shape.cols << "]");
  const std::vector<float> values = spread_values(shape.elements(), source);
  const Tensor x = d.matrix(source, shape.rows, shape.cols, values);
  const Fp8Operand out = fp8_operand(d, format, shape, 0.37f, 0.0f, 0);
  d.ops().quantize(d.stream(), {x, out.tensors, out.quantizer, {}});
  require_codes(d, out.tensors, values, 0.37f);
  CHECK(d.read(out.amax, 1)[0] == amax_of(values));
  CHECK(d.get(out.tensors.scale_inv)[0] == 1.0f / 0.37f);
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
            CHECK(d.read(out.amax, 1)[0] == amax_of(values));
            CHECK(d.get(out.tensors.scale_inv)[0] == 1.0f / 0.37f);
            if (pad) CHECK((d.padding_intact(out.tensors.rowwise) && d.padding_intact(out.tensors.columnwise)));
          }
        }
      }
    }
  });
}

TEST_CASE("quantize is exact at the shapes of a step and where tiles are cut off") {
  on_every_backend([](DeviceArrays& d) {
    require_quantize(d, DType::kBF16, DType::kE5M2, {256, 4096});
    require_quantize(d, DType::kBF16, DType::kE4M3, {272, 1040});
    require_quantize(d, DType::kBF16, DType::kE4M3, {65, 129});
    require_quantize(d, DType::kF32, DType::kE5M2, {80, 72});
  });
}
TEST_CASE("quantize is exact at a layer's largest shapes", "[slow]") {
  on_every_backend([](DeviceArrays& d) {
    require_quantize(d, DType::kBF16, DType::kE4M3, {256, 11008});
    require_quantize(d, DType::kBF16, DType::kE5M2, {2048, 8192});
    require_quantize(d, DType::kF32, DType::kE4M3, {1000, 4100});
  });
}

TEST_CASE("a column range of a wider matrix is quantized alone, at any offset") {
  on_every_backend([](DeviceArrays& d) {
    const std::int64_t rows = 48, wide = 160;
    const std::vector<float> values = spread_values(rows * wide, DType::kBF16);
    const Tensor all = d.matrix(DType::kBF16, rows, wide, values);
    for (const std::int64_t first : {16, 8, 3}) {
      const std::int64_t cols = 64;
      INFO("from column " << first);
      std::vector<float> part;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) part.push_back(values[static_cast<std::size_t>(r * wide + first + c)]);
      }
      Fp8Operand out = fp8_operand(d, DType::kE4M3, {rows, cols}, 2.0f, 0.0f, 0);
      // The transpose as one microbatch of a group: a column range of a wider buffer too.
      const Tensor group = d.matrix(DType::kE4M3, cols, 3 * rows, spread_values(cols * 3 * rows, DType::kF32));
      const std::vector<std::uint8_t> before = d.codes(group);
      out.tensors.columnwise = group.cols(rows, rows);
      d.ops().quantize(d.stream(), {all.cols(first, cols), out.tensors, out.quantizer, {}});
      const std::vector<std::uint8_t> after = d.codes(group);
      std::int64_t touched = 0, wrong = 0;
      for (std::int64_t c = 0; c < cols; ++c) {
        for (std::int64_t i = 0; i < 3 * rows; ++i) {
          const auto at = static_cast<std::size_t>(c * 3 * rows + i);
          const bool inside = i >= rows && i < 2 * rows;
          if (!inside) touched += after[at] != before[at];
          if (inside) wrong += after[at] != encode_e4m3(part[static_cast<std::size_t>((i - rows) * cols + c)] * 2.0f);
        }
      }
      CHECK(touched == 0);
      CHECK(wrong == 0);
      CHECK(d.read(out.amax, 1)[0] == amax_of(part));
    }
  });
}

TEST_CASE("each layout can be had alone, and the column sums without either") {
  on_every_backend([](DeviceArrays& d) {
    const std::vector<float> values = spread_values(80 * 96, DType::kBF16);
    const Tensor x = d.matrix(DType::kBF16, 80, 96, values);
    const Fp8Operand both = fp8_operand(d, DType::kE4M3, {80, 96}, 4.0f, 0.0f, 0);
    const Fp8Operand apart = fp8_operand(d, DType::kE4M3, {80, 96}, 4.0f, 0.0f, 0);
    d.ops().quantize(d.stream(), {x, both.tensors, both.quantizer, {}});
    d.ops().quantize(d.stream(), {x, {apart.tensors.rowwise, {}, {}}, apart.quantizer, {}});
    d.ops().quantize(d.stream(), {x, {{}, apart.tensors.columnwise, {}}, apart.quantizer, {}});
    CHECK(d.codes(apart.tensors.rowwise) == d.codes(both.tensors.rowwise));
    CHECK(d.codes(apart.tensors.columnwise) == d.codes(both.tensors.columnwise));
    CHECK(std::isnan(d.get(apart.tensors.scale_inv)[0]));
    const Tensor ones = d.matrix(DType::kBF16, 80, 96, std::vector<float>(80 * 96, 1.0f));
    const Tensor bias = d.matrix(DType::kF32, 1, 96);
    d.ops().quantize(d.stream(), {ones, {}, {}, bias});
    CHECK(d.get(bias) == std::vector<float>(96, 80.0f));
  });
}

TEST_CASE("quantize gives the same bytes in every call") {
  on_every_backend([](DeviceArrays& d) {
    const Tensor x = d.matrix(DType::kBF16, 272, 208, spread_values(272 * 208, DType::kBF16));
    std::vector<std::vector<float>> sums;
    std::vector<std::vector<std::uint8_t>> codes;
    for (int call = 0; call < 2; ++call) {
      const Fp8Operand out = fp8_operand(d, DType::kE5M2, {272, 208}, 0.37f, 0.0f, 0);
      const Tensor bias = d.matrix(DType::kF32, 1, 208);
      d.ops().quantize(d.stream(), {x, out.tensors, out.quantizer, bias});
      sums.push_back(d.get(bias));
      codes.push_back(d.codes(out.tensors.columnwise));
    }
    CHECK(sums[0] == sums[1]);
    CHECK(codes[0] == codes[1]);
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

TEST_CASE("column sums of many blocks of rows are whole") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{1040, 48}, Shape{333, 37}}) {
      std::vector<float> values(static_cast<std::size_t>(shape.elements()));
      std::vector<float> want(static_cast<std::size_t>(shape.cols), 5.0f);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(philox(13, 0, i).w[0] % 31) - 15.0f;
        want[i % want.size()] += values[i];
      }
      const Tensor x = d.matrix(DType::kBF16, shape.rows, shape.cols, values);
      const Tensor bias = d.matrix(DType::kF32, 1, shape.cols, std::vector<float>(want.size(), 5.0f));
      const Fp8Operand out = fp8_operand(d, DType::kE5M2, shape, 1.0f, 0.0f, 0);
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

namespace {

// Elements that differ between what the device wrote for the floats [first, first + n) and the definition.
template <class Stored, class Define>
std::int64_t count_wrong(const std::vector<Stored>& got, std::uint32_t first, const Define& define) {
  std::vector<std::int64_t> wrong(std::max(1u, std::thread::hardware_concurrency()), 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = t * got.size() / wrong.size(); i < (t + 1) * got.size() / wrong.size(); ++i) {
        wrong[t] += got[i] != define(std::bit_cast<float>(first + static_cast<std::uint32_t>(i)));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  std::int64_t total = 0;
  for (const std::int64_t w : wrong) total += w;
  return total;
}

}  // namespace

TEST_CASE("the GPU's conversions equal the codec and the BF16 rounding on every float", "[slow]") {
  std::unique_ptr<DeviceArrays> d;
  try {
    d = std::make_unique<DeviceArrays>("cuda");
  } catch (const Error& e) {
    WARN("skipped: " << e.what());
    return;
  }
  constexpr std::int64_t kRows = 4096, kCols = 4096, kChunk = kRows * kCols;
  const Tensor x = d->matrix(DType::kF32, kRows, kCols), bf16 = d->matrix(DType::kBF16, kRows, kCols);
  const Tensor e4m3 = d->matrix(DType::kE4M3, kRows, kCols), e5m2 = d->matrix(DType::kE5M2, kRows, kCols);
  const Quantizer unscaled{d->array<float>({1.0f}), nullptr};
  std::vector<std::uint32_t> bits(kChunk);
  std::int64_t wrong[3] = {0, 0, 0};
  for (std::uint64_t first = 0; first < std::uint64_t{1} << 32; first += kChunk) {
    const auto start = static_cast<std::uint32_t>(first);
    for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = start + static_cast<std::uint32_t>(i);
    d->write(x.as<std::uint32_t>(), bits);
    d->ops().quantize(d->stream(), {x, {e4m3, {}, {}}, unscaled, {}});
    d->ops().quantize(d->stream(), {x, {e5m2, {}, {}}, unscaled, {}});
    d->ops().cast(d->stream(), x, bf16);
    wrong[0] += count_wrong(d->read(e4m3.as<std::uint8_t>(), bits.size()), start, encode_e4m3);
    wrong[1] += count_wrong(d->read(e5m2.as<std::uint8_t>(), bits.size()), start, encode_e5m2);
    wrong[2] +=
        count_wrong(d->read(bf16.as<std::uint16_t>(), bits.size()), start, [](float v) { return to_bf16(v).bits; });
  }
  CHECK(wrong[0] == 0);
  CHECK(wrong[1] == 0);
  CHECK(wrong[2] == 0);
}

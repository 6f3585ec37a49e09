// The CPU backend's GEMM: FP8, BF16 and FP32 operands, FP32 sums, the epilogue of GemmArgs.
//
// Every element of D is one FP32 accumulator over k in index order with std::fma, whatever the tile, so tile sizes are
// a matter of speed only. Operands are decoded to FP32 once: A as a whole (it is read by broadcast, so any strides do),
// B in panels of kPanel columns by kDepth of k, which stay in the first-level cache while all rows of A pass.
// Owns no quantization of the result and no choice of layouts.
#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/fp8/codec.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/operand_writer.h"
#include "kernels/cpu/tile.h"

namespace qe::cpu {
namespace {

constexpr int kDepth = 256;

template <int kRows>
QE_CPU_UNCHECKED QE_CPU_INLINE void multiply_tile(const float* a, std::int64_t a_row, std::int64_t a_depth,
                                                  const float* panel, std::int64_t depth, float* sums,
                                                  std::int64_t pitch) {
  float acc[kRows][kPanel];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kPanel; ++j) acc[i][j] = sums[i * pitch + j];
  }
  for (std::int64_t p = 0; p < depth; ++p) {
    for (int i = 0; i < kRows; ++i) {
      const float x = a[i * a_row + p * a_depth];
      // std::fma itself, without the library's wrapper: an unchecked function inlines no checked one.
      for (int j = 0; j < kPanel; ++j) acc[i][j] = __builtin_fmaf(x, panel[p * kPanel + j], acc[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kPanel; ++j) sums[i * pitch + j] = acc[i][j];
  }
}

template <int kRows>
QE_CPU_UNCHECKED QE_CPU_INLINE void multiply_rows(const Strided& a, std::int64_t m, const float* panel,
                                                  std::int64_t depth, float* sums, std::int64_t pitch) {
  std::int64_t i = 0;
  for (; i + kRows <= m; i += kRows) {
    if (a.depth == 1) {
      multiply_tile<kRows>(a.data + i * a.row, a.row, 1, panel, depth, sums + i * pitch, pitch);
    } else {
      multiply_tile<kRows>(a.data + i * a.row, a.row, a.depth, panel, depth, sums + i * pitch, pitch);
    }
  }
  for (; i < m; ++i) {
    multiply_tile<1>(a.data + i * a.row, a.row, a.depth, panel, depth, sums + i * pitch, pitch);
  }
}
// The accumulators of three rows fill sixteen vector registers of eight floats, those of eight rows half of thirty-two
// registers of sixteen.
QE_CPU_CLONES QE_CPU_UNCHECKED void multiply_narrow(const Strided& a, std::int64_t m, const float* panel,
                                                    std::int64_t depth, float* sums, std::int64_t pitch) {
  multiply_rows<3>(a, m, panel, depth, sums, pitch);
}
QE_CPU_CLONES QE_CPU_UNCHECKED void multiply_wide(const Strided& a, std::int64_t m, const float* panel,
                                                  std::int64_t depth, float* sums, std::int64_t pitch) {
  multiply_rows<8>(a, m, panel, depth, sums, pitch);
}

using DecodeTable = std::array<float, 256>;
constexpr DecodeTable make_table(DType type) {
  DecodeTable table{};
  for (int code = 0; code < 256; ++code) table[code] = decode_fp8(type, static_cast<std::uint8_t>(code));
  return table;
}
constexpr DecodeTable kE4M3 = make_table(DType::kE4M3);
constexpr DecodeTable kE5M2 = make_table(DType::kE5M2);

// to[i · stride] = element (row, first + i) for i < count.
QE_CPU_INLINE void decode(const Tensor& from, std::int64_t row, std::int64_t first, std::int64_t count,
                          float* __restrict to, std::int64_t stride) {
  const std::int64_t at = row * from.row_pitch + first;
  if (is_fp8(from.dtype)) {
    const float* table = from.dtype == DType::kE4M3 ? kE4M3.data() : kE5M2.data();
    const std::uint8_t* codes = from.as<std::uint8_t>() + at;
    for (std::int64_t i = 0; i < count; ++i) to[i * stride] = table[codes[i]];
  } else if (from.dtype == DType::kBF16) {
    const Bf16* values = from.as<Bf16>() + at;
    for (std::int64_t i = 0; i < count; ++i) to[i * stride] = to_float(values[i]);
  } else {
    const float* values = from.as<float>() + at;
    for (std::int64_t i = 0; i < count; ++i) to[i * stride] = values[i];
  }
}

QE_CPU_CLONES void decode_rows(const Tensor& from, float* to) {
  for (std::int64_t r = 0; r < from.shape.rows; ++r) {
    decode(from, r, 0, from.shape.cols, to + r * from.shape.cols, 1);
  }
}

// to[p][j] = B[column j of the panel, first + p], columns beyond n zero.
QE_CPU_CLONES void pack_panel(const Tensor& b, bool transposed, std::int64_t column, std::int64_t width,
                              std::int64_t first, std::int64_t depth, float* to) {
  if (width < kPanel) std::fill(to, to + depth * kPanel, 0.0f);
  if (transposed) {
    for (std::int64_t p = 0; p < depth; ++p) decode(b, first + p, column, width, to + p * kPanel, 1);
  } else {
    for (std::int64_t j = 0; j < width; ++j) decode(b, column + j, first, depth, to + j, kPanel);
  }
}

// A as FP32: in place when it is FP32 already, else decoded into the scratch.
Strided decode_a(const GemmArgs& args, Scratch& scratch) {
  Tensor a = args.a;
  if (a.dtype != DType::kF32) {
    scratch = make_scratch(a.shape.elements());
    decode_rows(a, scratch.get());
    a = make_tensor(scratch.get(), DType::kF32, a.shape);
  }
  return args.a_transposed ? Strided{a.as<float>(), 1, a.row_pitch} : Strided{a.as<float>(), a.row_pitch, 1};
}

float scale_of(const Tensor& scale_inv, std::int64_t block) {
  return scale_inv.empty() ? 1.0f : scale_inv.as<float>()[block * scale_inv.row_pitch];
}

// values[0, n) of a row of D: scaled sums in, D out.
QE_CPU_INLINE void epilogue_row(const GemmArgs& args, std::int64_t row, std::int64_t column, std::int64_t width,
                                float* __restrict values) {
  float other[kPanel];
  if (!args.residual.empty()) {
    decode(args.residual, row, column, width, other, 1);
    for (std::int64_t j = 0; j < width; ++j) values[j] += other[j];
  }
  if (!args.bias.empty()) {
    decode(args.bias, 0, column, width, other, 1);
    for (std::int64_t j = 0; j < width; ++j) values[j] += other[j];
  }
  if (args.accumulate) {
    decode(args.d, row, column, width, other, 1);
    for (std::int64_t j = 0; j < width; ++j) values[j] += other[j];
  }
  store_row(args.d.cols(column, width), row, values);
}

QE_CPU_CLONES void epilogue(const GemmArgs& args, std::int64_t column, std::int64_t width, float* sums) {
  for (std::int64_t i = 0; i < args.d.shape.rows; ++i) epilogue_row(args, i, column, width, sums + i * kPanel);
}

// The first block's scaled sums, or those of one more block added.
QE_CPU_CLONES void scale_block(float* __restrict total, const float* __restrict sums, std::int64_t count, float scale,
                               bool first) {
  if (first) {
    for (std::int64_t i = 0; i < count; ++i) total[i] = sums[i] * scale;
  } else {
    for (std::int64_t i = 0; i < count; ++i) total[i] = std::fma(sums[i], scale, total[i]);
  }
}

void check(const GemmArgs& args, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t blocks) {
  const Shape a = args.a_transposed ? Shape{k, m} : Shape{m, k};
  const Shape b = args.b_transposed ? Shape{k, n} : Shape{n, k};
  QE_EXPECTS(args.a.shape == a && args.b.shape == b, "the operands' shapes do not make D's");
  QE_EXPECTS(!args.a_transposed || !is_fp8(args.a.dtype), "an FP8 operand must be K-contiguous");
  QE_EXPECTS(!args.b_transposed || !is_fp8(args.b.dtype), "an FP8 operand must be K-contiguous");
  QE_EXPECTS(args.a_scale_inv.empty() == !is_fp8(args.a.dtype), "exactly the FP8 operands have a scale_inv");
  QE_EXPECTS(args.b_scale_inv.empty() == !is_fp8(args.b.dtype), "exactly the FP8 operands have a scale_inv");
  QE_EXPECTS(args.a_scale_inv.empty() || args.a_scale_inv.shape.rows == blocks, "A's scales do not match the blocks");
  QE_EXPECTS(args.b_scale_inv.empty() || args.b_scale_inv.shape.rows == blocks, "B's scales do not match the blocks");
  QE_EXPECTS(k % blocks == 0, "the blocks of K must be equal");
  QE_EXPECTS(args.d.dtype == DType::kF32 || args.d.dtype == DType::kBF16, "D is FP32 or BF16");
  QE_EXPECTS(!args.accumulate || (args.bias.empty() && args.residual.empty()), "accumulate has no bias and residual");
}

}  // namespace

void multiply_panel(const Strided& a, std::int64_t m, const float* panel, std::int64_t depth, float* sums,
                    std::int64_t pitch) {
  (has_wide_registers() ? multiply_wide : multiply_narrow)(a, m, panel, depth, sums, pitch);
}

void gemm(const GemmArgs& args) {
  const std::int64_t m = args.d.shape.rows;
  const std::int64_t n = args.d.shape.cols;
  const std::int64_t k = args.a_transposed ? args.a.shape.rows : args.a.shape.cols;
  const Tensor& scales = args.a_scale_inv.empty() ? args.b_scale_inv : args.a_scale_inv;
  const std::int64_t blocks = scales.empty() ? 1 : scales.shape.rows;
  check(args, m, n, k, blocks);

  Scratch decoded;
  const Strided a = decode_a(args, decoded);
  const Scratch panel = make_scratch(kDepth * kPanel);
  const Scratch sums = make_scratch(m * kPanel);
  const Scratch total = make_scratch(m * kPanel);
  const std::int64_t block_depth = k / blocks;

  for (std::int64_t column = 0; column < n; column += kPanel) {
    const std::int64_t width = std::min<std::int64_t>(kPanel, n - column);
    for (std::int64_t g = 0; g < blocks; ++g) {
      std::fill(sums.get(), sums.get() + m * kPanel, 0.0f);
      for (std::int64_t p = g * block_depth; p < (g + 1) * block_depth; p += kDepth) {
        const std::int64_t depth = std::min<std::int64_t>(kDepth, (g + 1) * block_depth - p);
        pack_panel(args.b, args.b_transposed, column, width, p, depth, panel.get());
        multiply_panel({a.data + p * a.depth, a.row, a.depth}, m, panel.get(), depth, sums.get(), kPanel);
      }
      const float scale = scale_of(args.a_scale_inv, g) * scale_of(args.b_scale_inv, g);
      scale_block(total.get(), sums.get(), m * kPanel, scale, g == 0);
    }
    epilogue(args, column, width, total.get());
  }
}

}  // namespace qe::cpu

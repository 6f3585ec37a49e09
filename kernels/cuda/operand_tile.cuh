// The fused quantize tail: FP32 values in registers become an Operand (codes, transposed codes, amax, scale_inv), or
// rows of BF16 or FP32. Owns no arithmetic on the values; elementwise_tile.cuh and layernorm.cu bring them.
//
// A thread holds a patch: four rows, eight columns. Rows leave straight from registers. For the transpose a patch's
// codes become eight words, one a column, each four rows; they meet in a TransposeTile and leave sixteen rows at a
// time.
//
// FP8 is the hardware's conversion, the same as core/fp8/codec.h on every float: saturating, NaN to 0x7F.
#pragma once

#include <cuda_fp8.h>

#include "core/fp8/codec.h"
#include "core/ops_args.h"
#include "kernels/cuda/rows.cuh"

namespace qe::cuda {

inline constexpr int kPatchRows = 4;
using Patch = float[kPatchRows][kLaneElements];

// Where and how an Operand is written, as a kernel sees it.
struct OperandTarget {
  void* rowwise;             // null: not wanted
  std::int64_t row_pitch;    // elements
  std::uint8_t* columnwise;  // null: not wanted
  std::int64_t column_pitch;
  float* scale_inv;    // null: not wanted
  const float* scale;  // FP8 only
  float* amax;         // null: not gathered
  int rows, cols;      // of the source
  DType type;
};

inline OperandTarget target_of(const Operand& out, const Quantizer& quantizer, const Shape& source) {
  const Tensor& given = out.rowwise.empty() ? out.columnwise : out.rowwise;
  const bool fp8 = is_fp8(given.dtype);
  QE_EXPECTS(fp8 || is_wide(given.dtype), "an operand is FP8, BF16 or FP32");
  QE_EXPECTS(out.rowwise.empty() || out.rowwise.shape == source, "an operand has the shape of its source");
  QE_EXPECTS(out.columnwise.empty() || out.columnwise.shape == (Shape{source.cols, source.rows}),
             "an operand's transpose has the transposed shape of its source");
  QE_EXPECTS(!fp8 || quantizer.scale != nullptr || given.empty(), "an FP8 operand needs its slot's scale");
  require_grid(source);
  OperandTarget t{};
  t.rowwise = out.rowwise.data;
  t.row_pitch = out.rowwise.row_pitch;
  t.rows = static_cast<int>(source.rows);
  t.cols = static_cast<int>(source.cols);
  t.type = given.dtype;
  if (!fp8) return t;
  t.columnwise = out.columnwise.as<std::uint8_t>();
  t.column_pitch = out.columnwise.row_pitch;
  t.scale_inv = out.scale_inv.as<float>();
  t.scale = quantizer.scale;
  t.amax = quantizer.amax;
  return t;
}
inline bool allows_vectors(const Operand& out) {
  return allows_vectors(out.rowwise) && allows_vectors(out.columnwise, 16);
}

// Codes of four values, the first in the low byte.
template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ std::uint32_t encode_four(const float* v, float scale) {
  const float2 low{__fmul_rn(v[0], scale), __fmul_rn(v[1], scale)};
  const float2 high{__fmul_rn(v[2], scale), __fmul_rn(v[3], scale)};
  return std::uint32_t{__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, kFormat)} |
         std::uint32_t{__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, kFormat)} << 16;
}

using PatchCodes = std::uint32_t[kPatchRows][2];  // four columns a word
template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ void encode_patch(const Patch& v, float scale, PatchCodes& codes) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    codes[i][0] = encode_four<kFormat>(v[i], scale);
    codes[i][1] = encode_four<kFormat>(v[i] + 4, scale);
  }
}

// columns[c] byte i = code of row i, column c.
__device__ __forceinline__ void transpose_patch(const PatchCodes& w, std::uint32_t (&columns)[kLaneElements]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::uint32_t a = __byte_perm(w[0][h], w[1][h], 0x5140), b = __byte_perm(w[2][h], w[3][h], 0x5140);
    const std::uint32_t c = __byte_perm(w[0][h], w[1][h], 0x7362), d = __byte_perm(w[2][h], w[3][h], 0x7362);
    columns[4 * h] = __byte_perm(a, b, 0x5410);
    columns[4 * h + 1] = __byte_perm(a, b, 0x7632);
    columns[4 * h + 2] = __byte_perm(c, d, 0x5410);
    columns[4 * h + 3] = __byte_perm(c, d, 0x7632);
  }
}

// Eight codes of one row.
template <bool kVector>
__device__ __forceinline__ void store_codes(std::uint8_t* row, int col, int cols, const std::uint32_t (&codes)[2]) {
  if constexpr (kVector) {
    if (col < cols) *reinterpret_cast<uint2*>(row + col) = {codes[0], codes[1]};
  } else {
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      if (col + k < cols) row[col + k] = static_cast<std::uint8_t>(codes[k / 4] >> (8 * (k % 4)));
    }
  }
}

// A patch of FP8 values into the rowwise codes; the words of the transpose come back in `columns`.
template <bool kVector>
__device__ __forceinline__ void write_codes(const OperandTarget& out, int row, int col, const Patch& v, float scale,
                                            std::uint32_t (&columns)[kLaneElements]) {
  PatchCodes codes;
  if (out.type == DType::kE4M3) {
    encode_patch<__NV_E4M3>(v, scale, codes);
  } else {
    encode_patch<__NV_E5M2>(v, scale, codes);
  }
  if (out.rowwise != nullptr) {
    auto* base = static_cast<std::uint8_t*>(out.rowwise);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      if (row + i < out.rows) store_codes<kVector>(base + (row + i) * out.row_pitch, col, out.cols, codes[i]);
    }
  }
  transpose_patch(codes, columns);
}

// A patch of BF16 or FP32 values.
template <bool kVector>
__device__ __forceinline__ void write_wide(const OperandTarget& out, int row, int col, const Patch& v) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    if (row + i >= out.rows) continue;
    const std::int64_t at = (row + i) * out.row_pitch;
    if (out.type == DType::kBF16) {
      store_eight<kVector>(static_cast<Bf16*>(out.rowwise) + at, col, out.cols, v[i]);
    } else {
      store_eight<kVector>(static_cast<float*>(out.rowwise) + at, col, out.cols, v[i]);
    }
  }
}

// Shared memory in which patches become sixteen-row pieces of columns. A piece's place is mixed with its column's
// group of eight and its chunk, so that a warp's words, one column apart in groups, lie in different banks.
template <int kCols, int kRows>
struct TransposeTile {
  static constexpr int kChunks = kRows / 16;
  static constexpr int kPieces = kCols * kChunks;
  uint4 pieces[kPieces];

  __device__ static int place(int column, int chunk) {
    const int mixed = (column ^ (column >> 3) ^ (chunk * (8 / kChunks))) & 7;
    return chunk * kCols + (column & ~7) + mixed;
  }
  // The words of the patch at rows 4 · quad and columns first_column (a multiple of 8) of the tile.
  __device__ void put(int first_column, int quad, const std::uint32_t (&columns)[kLaneElements]) {
    auto* words = reinterpret_cast<std::uint32_t*>(pieces);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) words[place(first_column + j, quad / 4) * 4 + quad % 4] = columns[j];
  }
  // The whole tile, whose corner is (row, col) of the source, by `threads` threads after all have put.
  template <bool kVector>
  __device__ void write(const OperandTarget& out, int row, int col, int thread, int threads) const {
    for (int p = thread; p < kPieces; p += threads) {
      const int column = p / kChunks, first = row + p % kChunks * 16;
      if (col + column >= out.cols || first >= out.rows) continue;
      const uint4 piece = pieces[place(column, p % kChunks)];
      std::uint8_t* to = out.columnwise + (col + column) * out.column_pitch + first;
      if constexpr (kVector) {
        *reinterpret_cast<uint4*>(to) = piece;
      } else {
        const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (first + i < out.rows) to[i] = static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)));
        }
      }
    }
  }
};

// max(amax, |patch|), NaN ignored: fmaxf returns its other argument.
__device__ __forceinline__ float amax_of(const Patch& v, float amax) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) amax = fmaxf(amax, fabsf(v[i][k]));
  }
  return amax;
}

// Non-negative floats order like their bits.
__device__ __forceinline__ std::uint32_t warp_amax(float amax) {
  return __reduce_max_sync(0xffffffffu, __float_as_uint(amax));
}
// One thread of a block, after the block's warps left their warp_amax.
__device__ __forceinline__ void raise_amax(float* amax, const std::uint32_t* of_warps, int warps) {
  std::uint32_t m = 0;
  for (int w = 0; w < warps; ++w) m = of_warps[w] > m ? of_warps[w] : m;
  if (m != 0) atomicMax(reinterpret_cast<unsigned int*>(amax), m);
}
// One thread of the grid.
__device__ __forceinline__ void write_scale_inv(const OperandTarget& out, float scale) {
  if (out.scale_inv != nullptr) *out.scale_inv = __frcp_rn(scale);
}

}  // namespace qe::cuda

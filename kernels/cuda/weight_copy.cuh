// The copy of a weight that its update writes from registers: BF16 or FP32 rows, or FP8 codes with their transpose,
// amax and scale_inv, bit for bit what quantize_weight makes of the stored master. Owns no update: adamw.cu's.
//
// A thread brings a tile's quads from row to row (parameter_tiles.cuh, ConsecutiveTile). Rows leave straight from
// registers; codes gather in a thread to words of four rows of one column, meet in shared memory, and leave as columns.
#pragma once

#include "core/ops_args.h"
#include "kernels/cuda/operand_tile.cuh"
#include "kernels/cuda/parameter_tiles.cuh"

namespace qe::cuda {

enum class CopyKind : std::int32_t { kNone, kF32, kBF16, kE4M3, kE5M2 };

// As a kernel sees it, in a table of items: no padding.
struct CopyTarget {
  void* rowwise;
  std::uint8_t* columnwise;  // FP8: null where not wanted, as the next three
  float* scale_inv;
  const float* scale;
  float* amax;
  std::int64_t row_pitch, column_pitch;
  CopyKind kind;
  std::int32_t wide_columns;  // sixteen rows of a column of the copy can be written in one access
};

inline CopyTarget copy_target(const Operand& copy, const Quantizer& quantizer, const Shape& source) {
  if (copy.rowwise.empty()) return {};
  const OperandTarget t = target_of(copy, quantizer, source);
  const auto kind = [&] {
    switch (t.type) {
      case DType::kE4M3:
        return CopyKind::kE4M3;
      case DType::kE5M2:
        return CopyKind::kE5M2;
      default:
        return t.type == DType::kBF16 ? CopyKind::kBF16 : CopyKind::kF32;
    }
  };
  return {t.rowwise,      t.columnwise, t.scale_inv,
          t.scale,        t.amax,       t.row_pitch,
          t.column_pitch, kind(),       allows_vectors(copy.columnwise, 16)};
}
// Can quads of the copy, and four rows of one of its columns, be written in one access each?
inline bool allows_quads(const Operand& copy) {
  return (copy.rowwise.empty() || allows_quads(copy.rowwise)) &&
         (copy.columnwise.empty() || allows_quads(copy.columnwise));
}

template <int kThreads>
struct CopyMemory {
  // Four rows of a column a word, a column's words beside each other and one more, which spreads the banks.
  std::uint32_t words[kMaxTileWidth * (kTileElements / kMaxTileWidth / 4 + 1)];
  std::uint32_t amaxes[kThreads / kWarp];
};

struct NoCopy {
  __device__ void put(int, const float (&)[kQuad]) const {}
  __device__ void finish() const {}
};

// Rows in BF16 or FP32.
template <int kThreads, bool kVector>
class WideCopy {
  using UpdateTile = ConsecutiveTile<kThreads>;

 public:
  __device__ __forceinline__ WideCopy(const CopyTarget& to, const UpdateTile& tile) : to_(to), tile_(tile) {}

  // The new weights of quad k.
  __device__ __forceinline__ void put(int k, const float (&weight)[kQuad]) const {
    const int inside = tile_.inside(k);
    if (to_.kind == CopyKind::kF32) {
      return store_quad<kVector>(tile_.at(static_cast<float*>(to_.rowwise), to_.row_pitch, k), inside, weight);
    }
    const std::uint32_t low = bf16_pair(weight[0], weight[1]), high = bf16_pair(weight[2], weight[3]);
    const Bf16 rounded[kQuad] = {{static_cast<std::uint16_t>(low)},
                                 {static_cast<std::uint16_t>(low >> 16)},
                                 {static_cast<std::uint16_t>(high)},
                                 {static_cast<std::uint16_t>(high >> 16)}};
    store_quad<kVector>(tile_.at(static_cast<Bf16*>(to_.rowwise), to_.row_pitch, k), inside, rounded);
  }
  __device__ void finish() const {}

 private:
  const CopyTarget& to_;
  const UpdateTile& tile_;
};

// FP8 codes and what belongs to them.
template <int kThreads, bool kVector>
class CodesCopy {
  using UpdateTile = ConsecutiveTile<kThreads>;

 public:
  // `first`: the block has the parameter's first tile.
  __device__ __forceinline__ CodesCopy(const CopyTarget& to, const UpdateTile& tile, CopyMemory<kThreads>& memory,
                                       bool first)
      : to_(to),
        tile_(tile),
        memory_(memory),
        row_(tile.at(static_cast<std::uint8_t*>(to.rowwise), to.row_pitch)),
        scale_(*to.scale),
        e4m3_(to.kind == CopyKind::kE4M3),
        first_(first) {}

  // The new weights of quad k; each k once, ascending.
  __device__ __forceinline__ void put(int k, const float (&weight)[kQuad]) {
    const std::uint32_t low = bf16_pair(weight[0], weight[1]), high = bf16_pair(weight[2], weight[3]);
    const float v[kQuad] = {__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u), __uint_as_float(high << 16),
                            __uint_as_float(high & 0xffff0000u)};
    const int inside = tile_.inside(k);
    if constexpr (kVector) {  // what is outside is zero
      amax_ = fmaxf(fmaxf(amax_, fmaxf(fabsf(v[0]), fabsf(v[1]))), fmaxf(fabsf(v[2]), fabsf(v[3])));
    } else {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) amax_ = e < inside ? fmaxf(amax_, fabsf(v[e])) : amax_;
    }
    const std::uint32_t codes = e4m3_ ? encode_four<__NV_E4M3>(v, scale_) : encode_four<__NV_E5M2>(v, scale_);
    if constexpr (kVector) {
      if (inside > 0) *reinterpret_cast<std::uint32_t*>(row_) = codes;
    } else {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        if (e < inside) row_[e] = static_cast<std::uint8_t>(codes >> (8 * e));
      }
    }
    row_ += to_.row_pitch;
    // The row's code of each column on top of those of the rows before it.
    columns_[0] = __byte_perm(columns_[0], codes, 0x4321);
    columns_[1] = __byte_perm(columns_[1], codes, 0x5321);
    columns_[2] = __byte_perm(columns_[2], codes, 0x6321);
    columns_[3] = __byte_perm(columns_[3], codes, 0x7321);
    if (k % 4 != 3) return;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) word(column_in_tile() + e, (tile_.row_in_tile + k) / 4) = columns_[e];
  }

  // After every quad, by all threads of the block.
  __device__ __forceinline__ void finish() const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::uint32_t amax = warp_amax(amax_);
    if (thread % kWarp == 0) memory_.amaxes[thread / kWarp] = amax;
    __syncthreads();
    if (thread == 0 && to_.amax != nullptr) raise_amax(to_.amax, memory_.amaxes, kThreads / kWarp);
    if (thread == 0 && first_ && to_.scale_inv != nullptr) *to_.scale_inv = __frcp_rn(scale_);
    if (to_.columnwise != nullptr) write_columns(thread);
  }

 private:
  // log2 of the words of a column of the tile.
  [[nodiscard]] __device__ __forceinline__ int words_log2() const { return kTileLog2 - 4 - tile_.quads_log2; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t& word(int column, int quad) const {
    return memory_.words[column * ((1 << words_log2()) + 1) + quad];
  }
  [[nodiscard]] __device__ __forceinline__ int column_in_tile() const {
    return (static_cast<int>(threadIdx.x) & ((1 << tile_.quads_log2) - 1)) * kQuad;
  }

  __device__ __forceinline__ void write_columns(int thread) const {
    const int first_row = tile_.row - tile_.row_in_tile, first_col = tile_.col - column_in_tile();
    const int log2 = words_log2();
    if (kVector && to_.wide_columns != 0 && log2 >= 2) {
      for (int i = thread; i < kTileElements / 16; i += kThreads) {
        const int column = i >> (log2 - 2), quad = (i & ((1 << (log2 - 2)) - 1)) * 4;
        const int col = first_col + column, row = first_row + 4 * quad;
        if (col >= tile_.cols || row >= tile_.rows) continue;
        const std::uint32_t* from = &word(column, quad);
        *reinterpret_cast<uint4*>(to_.columnwise + col * to_.column_pitch + row) = {from[0], from[1], from[2], from[3]};
      }
      return;
    }
    for (int i = thread; i < kTileElements / 4; i += kThreads) {
      const int column = i >> log2, quad = i & ((1 << log2) - 1);
      const int col = first_col + column, row = first_row + 4 * quad;
      if (col >= tile_.cols || row >= tile_.rows) continue;
      std::uint8_t* at = to_.columnwise + col * to_.column_pitch + row;
      const std::uint32_t codes = word(column, quad);
      if constexpr (kVector) {
        *reinterpret_cast<std::uint32_t*>(at) = codes;
      } else {
        for (int e = 0; e < 4 && row + e < tile_.rows; ++e) at[e] = static_cast<std::uint8_t>(codes >> (8 * e));
      }
    }
  }

  const CopyTarget& to_;
  const UpdateTile& tile_;
  CopyMemory<kThreads>& memory_;
  std::uint8_t* row_;
  float scale_;
  bool e4m3_, first_;
  float amax_ = 0.0f;
  std::uint32_t columns_[kQuad] = {};
};

}  // namespace qe::cuda

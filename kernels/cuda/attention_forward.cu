// Causal attention forward in one pass over the keys: scores of 64 keys at a time, a running maximum and sum of every
// query row, BF16 probabilities against the values. Products and softmax are summed in FP32.
//
// A row's arithmetic does not depend on how many rows a block has, on other sequences or on the device, only on its own
// keys in ascending tiles: every row sees key 0 first, so its maximum is finite from the first tile on. Tiles behind a
// warp's last row are skipped; rows behind the sequence's end are computed from zeros and not stored.
//
// exp is 2^x with log2(e) in the factor of the scores: relative error 2^-22, plus that of the FP32 scores.
// Probabilities are rounded to BF16 for the product alone; the sum that divides it, and lse, keep FP32.
//
// The FP8 operand of the product behind attention is made from the rows as they are stored, while they are still in
// shared memory. Sixteen rows at a time: sequences that are not whole sixteens are left to the quantize kernel.
#include <cuda_runtime.h>

#include <limits>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/operand_tile.cuh"

namespace qe::cuda {
namespace {

struct ForwardArguments {
  AttentionShape shape;
  HeadRows<const Bf16> q, k, v;
  HeadRows<Bf16> out;
  HeadRows<float> lse;
  OperandTarget quantized;  // scale null: none
};

// Softmax of a warp's rows so far. Sums are this lane's columns only until finish().
template <int kHeadDim, int kRowTiles>
struct RunningSoftmax {
  Sums<kRowTiles, kHeadDim> out;
  float max[kRowTiles][2], sum[kRowTiles][2];

  __device__ RunningSoftmax() {
    clear(out);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half] = -std::numeric_limits<float>::infinity();
        sum[m][half] = 0.0f;
      }
    }
  }

  // Scores of the next keys → their unnormalised probabilities; what was summed before is scaled to the new maximum.
  __device__ void take(Sums<kRowTiles, kTileRows>& scores, float scale_log2) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row_max = max[m][half];
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n) {
          row_max = fmaxf(row_max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
        const float shift = -row_max * scale_log2;
        const float correction = exp2_approximate((max[m][half] - row_max) * scale_log2);
        max[m][half] = row_max;
        float tile_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][n][e] = exp2_approximate(fmaf(scores[m][n][e], scale_log2, shift));
            tile_sum += scores[m][n][e];
          }
        }
        sum[m][half] = fmaf(sum[m][half], correction, tile_sum);
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          out[m][n][2 * half] *= correction;
          out[m][n][2 * half + 1] *= correction;
        }
      }
    }
  }

  // Sums over all lanes of a row, then inverse[m][half] = 1 / sum.
  __device__ void finish(float (&inverse)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& s = sum[m][half];
        s += __shfl_xor_sync(0xffffffffu, s, 1);
        s += __shfl_xor_sync(0xffffffffu, s, 2);
        inverse[m][half] = 1.0f / s;
      }
    }
  }
};

// Keys behind a row's own token get −inf. first_row and first_key are positions in the sequence.
template <int kRowTiles>
__device__ void hide_later_keys(Sums<kRowTiles, kTileRows>& scores, int first_row, int first_key) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int last = first_row + 16 * m + e / 2 * 8 + lane_id() / 4 - (first_key + lane_id() % 4 * 2 + e % 2);
#pragma unroll
      for (int n = 0; n < kTileRows / 8; ++n) {
        if (8 * n > last) scores[m][n][e] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

template <int kRowTiles>
__device__ void store_lse(const float (&max)[kRowTiles][2], const float (&sum)[kRowTiles][2], float scale, float* lse,
                          int first_row, int length) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane_id() / 4;
      if (lane_id() % 4 == 0 && row < length) lse[row] = fmaf(max[m][half], scale, logf(sum[m][half]));
    }
  }
}

constexpr int kCodeRows = 16;  // of a piece of the transpose

// One head of one sequence of the operand.
template <int kHeadDim>
__device__ OperandTarget slice(OperandTarget operand, std::int64_t token, int head, int length) {
  if (operand.rowwise != nullptr) {
    operand.rowwise = static_cast<std::uint8_t*>(operand.rowwise) + token * operand.row_pitch + head * kHeadDim;
  }
  if (operand.columnwise != nullptr) operand.columnwise += head * kHeadDim * operand.column_pitch + token;
  operand.rows = length;
  operand.cols = kHeadDim;
  return operand;
}

// The FP8 codes of a block's rows, first_query and on, from the tile through which each warp has stored its own.
// `transposed` is shared memory that no warp reads any more. A block does this once: loops stay rolled, since more code
// would only have to be fetched.
template <int kHeadDim, int kRowTiles>
__device__ void quantize_rows(const OperandTarget& to, float scale, const unsigned char* tile, int first_query,
                              TransposeTile<kHeadDim, kRowTiles * kTileRows>& transposed) {
  __shared__ std::uint32_t warp_amaxes[kWarps];
  const int group = lane_id() % 8, quad = lane_id() / 8;
  float amax = 0.0f;
#pragma unroll 1
  for (int m = 0; m < kRowTiles; ++m) {
    const int own_rows = (warp_id() * kRowTiles + m) * kCodeRows, row = own_rows + quad * kPatchRows;
    if (first_query + own_rows >= to.rows) break;  // rows behind the end are not zeros and may not reach amax
#pragma unroll 1
    for (int col = group * kLaneElements; col < kHeadDim; col += 8 * kLaneElements) {
      Patch v;
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) {
        const unsigned char* chunk = tile + chunk_address<kHeadDim>(0, row + i, col / kLaneElements);
        to_floats(Eight<Bf16>{*reinterpret_cast<const uint4*>(chunk)}, v[i]);
      }
      amax = amax_of(v, amax);
      std::uint32_t columns[kLaneElements];
      write_codes<true>(to, first_query + row, col, v, scale, columns);
      if (to.columnwise != nullptr) transposed.put(col, row / kPatchRows, columns);
    }
  }
  const std::uint32_t own_amax = warp_amax(amax);
  if (lane_id() == 0) warp_amaxes[warp_id()] = own_amax;
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (to.columnwise != nullptr) transposed.template write<true>(to, first_query, 0, thread, kThreads);
  if (to.amax != nullptr && thread == 0) raise_amax(to.amax, warp_amaxes, kWarps);
}

template <int kHeadDim, int kRowTiles>
inline constexpr int kForwardBytes = (kTileRows * kRowTiles + 4 * kTileRows) * kRowBytes<kHeadDim>;

// One row tile a warp leaves registers for the queries' fragments; two share every key that is read instead.
template <int kHeadDim, int kRowTiles>
__device__ auto query_fragments(std::uint32_t address) {
  if constexpr (kRowTiles == 1) {
    return HeldFragments<kHeadDim>(address);
  } else {
    return TileFragments<kHeadDim>{address};
  }
}

// Grid: x = head, head by head of each sequence; y = query blocks, the longest first.
template <int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(kThreads, 2) attend(const __grid_constant__ ForwardArguments args) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float quantize_scale;
  constexpr int kQueries = kTileRows * kRowTiles, kTileBytes = kTileRows * kRowBytes<kHeadDim>;
  const AttentionShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.x) % shape.num_heads;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) / shape.num_heads * shape.length;
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries;
  const int own_rows = warp_id() * 16 * kRowTiles, first_row = first_query + own_rows;
  const int tiles = (min(first_query + kQueries, shape.length) + kTileRows - 1) / kTileRows;
  const auto q = slice<kHeadDim>(args.q, token, head);
  const auto k = slice<kHeadDim>(args.k, token, head / shape.group),
             v = slice<kHeadDim>(args.v, token, head / shape.group);

  // Queries, then two stages of keys and values.
  const std::uint32_t queries = shared_address(shared), stages = queries + kRowTiles * kTileBytes;
  const auto load_stage = [&](int tile) {
    const std::uint32_t stage = stages + tile % 2 * (2 * kTileBytes);
    load_tile<kHeadDim, kTileRows>(stage, k, tile * kTileRows, shape.length);
    load_tile<kHeadDim, kTileRows>(stage + kTileBytes, v, tile * kTileRows, shape.length);
  };
  load_tile<kHeadDim, kQueries>(queries, q, first_query, shape.length);
  load_stage(0);
  // Read while the copies run, and kept out of the registers, which the loop needs.
  if (args.quantized.scale != nullptr && threadIdx.x == 0) quantize_scale = *args.quantized.scale;
  wait_for_copies();
  __syncthreads();

  const auto fragments = query_fragments<kHeadDim, kRowTiles>(row_fragments<kHeadDim>(queries, own_rows));
  RunningSoftmax<kHeadDim, kRowTiles> softmax;
  for (int tile = 0; tile < tiles; ++tile) {
    // Behind the last barrier nobody reads the other stage.
    if (tile + 1 < tiles) load_stage(tile + 1);
    const std::uint32_t stage = stages + tile % 2 * (2 * kTileBytes);
    const int first_key = tile * kTileRows;
    if (first_key < first_row + 16 * kRowTiles) {
      Sums<kRowTiles, kTileRows> scores;
      Weights<kRowTiles, kTileRows> weights;
      multiply_transposed<kHeadDim>(fragments, column_fragments<kHeadDim>(stage), scores);
      if (first_key + kTileRows - 1 > first_row) hide_later_keys(scores, first_row, first_key);
      softmax.take(scores, shape.scale_log2);
      round_to_weights(scores, weights);
      add_product<kHeadDim>(weights, row_fragments<kHeadDim>(stage + kTileBytes, 0), softmax.out);
    }
    wait_for_copies();
    __syncthreads();
  }

  float inverse[kRowTiles][2];
  softmax.finish(inverse);
  store_lse(softmax.max, softmax.sum, shape.scale, args.lse.data + head * args.lse.pitch + token, first_row,
            shape.length);
  store_rows<kHeadDim>(softmax.out, inverse, shared, own_rows, slice<kHeadDim>(args.out, token, head), first_query,
                       shape.length);
  if (args.quantized.scale == nullptr) return;
  // Behind the loop's last barrier nobody reads keys and values.
  using Transposed = TransposeTile<kHeadDim, kQueries>;
  static_assert(sizeof(Transposed) <= 4 * kTileBytes);
  quantize_rows<kHeadDim, kRowTiles>(slice<kHeadDim>(args.quantized, token, head, shape.length), quantize_scale, shared,
                                     first_query, *reinterpret_cast<Transposed*>(shared + kRowTiles * kTileBytes));
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) write_scale_inv(args.quantized, quantize_scale);
}

template <int kHeadDim, int kRowTiles>
void launch_attend(const Launch& launch, const ForwardArguments& args) {
  constexpr int kQueries = kTileRows * kRowTiles;
  const dim3 grid(static_cast<unsigned>(args.shape.num_heads * args.shape.sequences),
                  static_cast<unsigned>((args.shape.length + kQueries - 1) / kQueries));
  launch_tiles(attend<kHeadDim, kRowTiles>, grid, kForwardBytes<kHeadDim, kRowTiles>, launch.stream, args);
}

template <int kHeadDim>
void launch_for(const Launch& launch, const ForwardArguments& args) {
  // Larger blocks read each key for twice as many rows, once there are enough of them for every multiprocessor.
  const std::int64_t large_blocks = (std::int64_t{args.shape.length} + 2 * kTileRows - 1) / (2 * kTileRows) *
                                    args.shape.num_heads * args.shape.sequences;
  if (large_blocks >= 2 * launch.multiprocessors) {
    launch_attend<kHeadDim, 2>(launch, args);
  } else {
    launch_attend<kHeadDim, 1>(launch, args);
  }
}

}  // namespace

void attention_forward(const Launch& launch, const AttentionArgs& a) {
  check_attention(a);
  const DType type = a.quantized.rowwise.empty() ? a.quantized.columnwise.dtype : a.quantized.rowwise.dtype;
  const bool fused =
      !a.quantized.empty() && is_fp8(type) && a.sequence_length % kCodeRows == 0 && allows_vectors(a.quantized);
  const ForwardArguments args{AttentionShape(a),
                              head_rows<const Bf16>(a.q),
                              head_rows<const Bf16>(a.k),
                              head_rows<const Bf16>(a.v),
                              head_rows<Bf16>(a.out),
                              head_rows<float>(a.lse),
                              fused ? target_of(a.quantized, a.quantizer, a.out.shape) : OperandTarget{}};
  if (a.head_dim == 64) {
    launch_for<64>(launch, args);
  } else {
    launch_for<128>(launch, args);
  }
  if (!a.quantized.empty() && !fused) quantize(launch, {a.out, a.quantized, a.quantizer, {}});
}

}  // namespace qe::cuda

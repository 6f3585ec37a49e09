// Causal attention backward: a kernel for delta = Σ out · grad_out of every row, then one launch whose blocks own
// either 64 keys of a key head (grad_k and grad_v, over the query heads of its group in order and their queries
// ascending) or 64 queries of a head (grad_q, over the keys ascending). Each gradient has one owner and one order of
// summation: the scores are computed twice so that no sum ever needs an atomic.
//
// Both kinds of block are the same program with the operands' parts changed. With `a` the tile that stays and `b` the
// tiles that are streamed: scores = a1 · b1ᵀ, their gradient from a2 · b2ᵀ, and the gradients are weights of a warp's
// own rows times b1 or b2. So weights never leave the registers.
//
//             a1   a2         b1   b2
//   keys      k    v          q    grad_out      grad_k += scale · dSᵀ · q,   grad_v += Pᵀ · grad_out
//   queries   q    grad_out   k    v             grad_q += scale · dS · k
//
// P = 2^(scale_log2 · score − log2(e) · lse), dS = P (dP − delta), in FP32; both are rounded to BF16 for the last
// products alone. Rows behind the sequence's end are zeros: they add nothing to others and are not stored.
#include <cuda_runtime.h>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels.h"

namespace qe::cuda {
namespace {

constexpr float kLog2e = std::numbers::log2e_v<float>;

struct BackwardArguments {
  AttentionShape shape;
  HeadRows<const Bf16> q, k, v, out, grad_out;
  HeadRows<Bf16> grad_q, grad_k, grad_v;
  HeadRows<const float> lse;
  HeadRows<float> delta;
};

// Shared memory: a1, a2, two stages of {b1, b2}, two stages of {lse, delta} of the streamed queries.
template <int kHeadDim>
inline constexpr int kTileBytes = kTileRows* kRowBytes<kHeadDim>;
inline constexpr int kRowSumBytes = 2 * kTileRows * static_cast<int>(sizeof(float));
template <int kHeadDim>
inline constexpr int kBackwardBytes = 6 * kTileBytes<kHeadDim> + 2 * kRowSumBytes;

template <int kHeadDim>
struct Tiles {
  unsigned char* shared;
  std::uint32_t base = shared_address(shared);
  __device__ std::uint32_t a1() const { return base; }
  __device__ std::uint32_t a2() const { return base + kTileBytes<kHeadDim>; }
  __device__ std::uint32_t b1(int stage) const { return base + (2 + 2 * (stage % 2)) * kTileBytes<kHeadDim>; }
  __device__ std::uint32_t b2(int stage) const { return b1(stage) + kTileBytes<kHeadDim>; }
  __device__ std::uint32_t row_sums(int stage) const {
    return base + 6 * kTileBytes<kHeadDim> + stage % 2 * kRowSumBytes;
  }
  __device__ const float* row_sums_data(int stage) const {
    return reinterpret_cast<const float*>(shared + 6 * kTileBytes<kHeadDim> + stage % 2 * kRowSumBytes);
  }
};

// lse in units of log2 and delta of this lane's four elements of a tile of 8 columns.
struct RowSums {
  float lse[4], delta[4];
};
// Rows are queries: the same for every tile.
struct SumsOfRows {
  RowSums sums;
  __device__ SumsOfRows(const float* lse, const float* delta, int first_row, int length) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half + lane_id() / 4;
      const float row_lse = row < length ? lse[row] * kLog2e : 0.0f, row_delta = row < length ? delta[row] : 0.0f;
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        sums.lse[e] = row_lse;
        sums.delta[e] = row_delta;
      }
    }
  }
  __device__ const RowSums& of_tile(int) const { return sums; }
};
// Columns are queries: from shared memory, all lse and then all delta.
struct SumsOfColumns {
  const float* data;
  __device__ RowSums of_tile(int n) const {
    const float2 lse = *reinterpret_cast<const float2*>(data + 8 * n + lane_id() % 4 * 2);
    const float2 delta = *reinterpret_cast<const float2*>(data + kTileRows + 8 * n + lane_id() % 4 * 2);
    const float x = lse.x * kLog2e, y = lse.y * kLog2e;
    return {{x, y, x, y}, {delta.x, delta.y, delta.x, delta.y}};
  }
};

// Scores → P; a2 · b2ᵀ → dS. On the diagonal keys behind the query get zeros: `hidden` sees the row and the column of
// an element in the tile.
template <class Sums_, class Hidden>
__device__ void differentiate(Sums<1, kTileRows>& scores, Sums<1, kTileRows>& grads, const Sums_& row_sums,
                              float scale_log2, bool diagonal, const Hidden& hidden) {
  const int first_row = 16 * warp_id() + lane_id() / 4, first_column = lane_id() % 4 * 2;
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
    const RowSums s = row_sums.of_tile(n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float p = exp2_approximate(fmaf(scores[0][n][e], scale_log2, -s.lse[e]));
      if (diagonal && hidden(first_row + e / 2 * 8, 8 * n + first_column + e % 2)) p = 0.0f;
      scores[0][n][e] = p;
      grads[0][n][e] = p * (grads[0][n][e] - s.delta[e]);
    }
  }
}

// scores and grads of one streamed tile, as BF16 weights of the warp's rows.
template <int kHeadDim, class RowSumsOf, class Hidden>
__device__ void tile_weights(const Tiles<kHeadDim>& tiles, int stage, const RowSumsOf& row_sums, float scale_log2,
                             bool diagonal, const Hidden& hidden, Weights<1, kTileRows>& p, Weights<1, kTileRows>& ds) {
  Sums<1, kTileRows> scores, grads;
  const int own_rows = 16 * warp_id();
  multiply_transposed<kHeadDim>(TileFragments<kHeadDim>{row_fragments<kHeadDim>(tiles.a1(), own_rows)},
                                column_fragments<kHeadDim>(tiles.b1(stage)), scores);
  multiply_transposed<kHeadDim>(TileFragments<kHeadDim>{row_fragments<kHeadDim>(tiles.a2(), own_rows)},
                                column_fragments<kHeadDim>(tiles.b2(stage)), grads);
  differentiate(scores, grads, row_sums, scale_log2, diagonal, hidden);
  round_to_weights(scores, p);
  round_to_weights(grads, ds);
}

// Starts copying lse and delta of kTileRows queries.
__device__ void load_row_sums(std::uint32_t to, const BackwardArguments& args, std::int64_t token, int head,
                              int first_query) {
  const int row = first_query + static_cast<int>(threadIdx.x) % kTileRows;
  const bool inside = row < args.shape.length;
  const float* sums =
      threadIdx.x < kTileRows ? args.lse.data + head * args.lse.pitch : args.delta.data + head * args.delta.pitch;
  copy_async_4(to + threadIdx.x * sizeof(float), sums + token + (inside ? row : 0), inside);
}

// grad_k and grad_v of keys [64 block, 64 block + 64).
template <int kHeadDim>
__device__ void key_gradients(const BackwardArguments& args, unsigned char* shared, int block, int kv_head,
                              std::int64_t token) {
  const AttentionShape& shape = args.shape;
  const Tiles<kHeadDim> tiles{shared};
  const int first_key = block * kTileRows, own_rows = 16 * warp_id();
  const int count = ((shape.length + kTileRows - 1) / kTileRows - block) * shape.group;
  // The tile to be loaded next.
  int head = kv_head * shape.group, first_query = first_key;
  const auto load_stage = [&](int stage) {
    load_tile<kHeadDim, kTileRows>(tiles.b1(stage), slice<kHeadDim>(args.q, token, head), first_query, shape.length);
    load_tile<kHeadDim, kTileRows>(tiles.b2(stage), slice<kHeadDim>(args.grad_out, token, head), first_query,
                                   shape.length);
    load_row_sums(tiles.row_sums(stage), args, token, head, first_query);
    first_query += kTileRows;
    if (first_query < shape.length) return;
    first_query = first_key;
    ++head;
  };
  load_tile<kHeadDim, kTileRows>(tiles.a1(), slice<kHeadDim>(args.k, token, kv_head), first_key, shape.length);
  load_tile<kHeadDim, kTileRows>(tiles.a2(), slice<kHeadDim>(args.v, token, kv_head), first_key, shape.length);
  load_stage(0);

  Sums<1, kHeadDim> grad_k, grad_v;
  clear(grad_k);
  clear(grad_v);
  int query = first_key;  // of the tile that is computed
  for (int i = 0; i < count; ++i) {
    wait_for_copies();
    __syncthreads();
    const bool diagonal = query == first_key;
    query = first_query;
    if (i + 1 < count) load_stage(i + 1);
    Weights<1, kTileRows> p, ds;
    tile_weights(
        tiles, i, SumsOfColumns{tiles.row_sums_data(i)}, shape.scale_log2, diagonal,
        [](int key, int q) { return key > q; }, p, ds);
    add_product<kHeadDim>(p, row_fragments<kHeadDim>(tiles.b2(i), 0), grad_v);
    add_product<kHeadDim>(ds, row_fragments<kHeadDim>(tiles.b1(i), 0), grad_k);
  }

  const float one[1][2] = {{1.0f, 1.0f}}, scale[1][2] = {{shape.scale, shape.scale}};
  store_rows<kHeadDim>(grad_k, scale, shared, own_rows, slice<kHeadDim>(args.grad_k, token, kv_head), first_key,
                       shape.length);
  store_rows<kHeadDim>(grad_v, one, shared + kTileBytes<kHeadDim>, own_rows,
                       slice<kHeadDim>(args.grad_v, token, kv_head), first_key, shape.length);
}

// grad_q of queries [64 block, 64 block + 64).
template <int kHeadDim>
__device__ void query_gradients(const BackwardArguments& args, unsigned char* shared, int block, int head,
                                std::int64_t token) {
  const AttentionShape& shape = args.shape;
  const Tiles<kHeadDim> tiles{shared};
  const int first_query = block * kTileRows, own_rows = 16 * warp_id(), kv_head = head / shape.group;
  const auto k = slice<kHeadDim>(args.k, token, kv_head), v = slice<kHeadDim>(args.v, token, kv_head);
  const auto load_stage = [&](int i) {
    load_tile<kHeadDim, kTileRows>(tiles.b1(i), k, i * kTileRows, shape.length);
    load_tile<kHeadDim, kTileRows>(tiles.b2(i), v, i * kTileRows, shape.length);
  };
  load_tile<kHeadDim, kTileRows>(tiles.a1(), slice<kHeadDim>(args.q, token, head), first_query, shape.length);
  load_tile<kHeadDim, kTileRows>(tiles.a2(), slice<kHeadDim>(args.grad_out, token, head), first_query, shape.length);
  load_stage(0);
  const SumsOfRows row_sums(args.lse.data + head * args.lse.pitch + token,
                            args.delta.data + head * args.delta.pitch + token, first_query + own_rows, shape.length);

  Sums<1, kHeadDim> grad_q;
  clear(grad_q);
  for (int i = 0; i <= block; ++i) {
    wait_for_copies();
    __syncthreads();
    if (i < block) load_stage(i + 1);
    Weights<1, kTileRows> p, ds;
    tile_weights(
        tiles, i, row_sums, shape.scale_log2, i == block, [](int query, int key) { return key > query; }, p, ds);
    add_product<kHeadDim>(ds, row_fragments<kHeadDim>(tiles.b1(i), 0), grad_q);
  }
  const float scale[1][2] = {{shape.scale, shape.scale}};
  store_rows<kHeadDim>(grad_q, scale, shared, own_rows, slice<kHeadDim>(args.grad_q, token, head), first_query,
                       shape.length);
}

// Grid: x = the key heads of each sequence, then the query heads of each; y = blocks of 64 rows, the longest first.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) attend_backward(const __grid_constant__ BackwardArguments args) {
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionShape& shape = args.shape;
  const int owner = static_cast<int>(blockIdx.x), key_owners = shape.num_kv_heads * shape.sequences;
  const int block = static_cast<int>(blockIdx.y);
  if (owner < key_owners) {
    key_gradients<kHeadDim>(args, shared, block, owner % shape.num_kv_heads,
                            std::int64_t{owner / shape.num_kv_heads} * shape.length);
  } else {
    const int query_owner = owner - key_owners;
    query_gradients<kHeadDim>(args, shared, static_cast<int>(gridDim.y) - 1 - block, query_owner % shape.num_heads,
                              std::int64_t{query_owner / shape.num_heads} * shape.length);
  }
}

// delta of one head; head_dim / 8 lanes a token. Grid: x = blocks of tokens, y = heads.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) row_products(const __grid_constant__ BackwardArguments args) {
  constexpr int kLanes = kHeadDim / 8;
  const int head = static_cast<int>(blockIdx.y), chunk = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t tokens = std::int64_t{args.shape.sequences} * args.shape.length;
  const std::int64_t token = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  float sum = 0.0f;
  if (token < tokens) {
    const auto out = slice<kHeadDim>(args.out, token, head), grad = slice<kHeadDim>(args.grad_out, token, head);
    Bf16 x[8], y[8];
    *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(out.data + chunk * 8);
    *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(grad.data + chunk * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(to_float(x[i]), to_float(y[i]), sum);
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (token < tokens && chunk == 0) args.delta.data[head * args.delta.pitch + token] = sum;
}

template <int kHeadDim>
void launch_backward(const Launch& launch, const BackwardArguments& args) {
  const AttentionShape& shape = args.shape;
  const std::int64_t tokens = std::int64_t{shape.sequences} * shape.length;
  constexpr int kTokensOfBlock = kThreads * 8 / kHeadDim;
  launch_tiles(row_products<kHeadDim>,
               dim3(static_cast<unsigned>((tokens + kTokensOfBlock - 1) / kTokensOfBlock),
                    static_cast<unsigned>(shape.num_heads)),
               0, launch.stream, args);
  launch_tiles(attend_backward<kHeadDim>,
               dim3(static_cast<unsigned>((shape.num_kv_heads + shape.num_heads) * shape.sequences),
                    static_cast<unsigned>((shape.length + kTileRows - 1) / kTileRows)),
               kBackwardBytes<kHeadDim>, launch.stream, args);
}

}  // namespace

void attention_backward(const Launch& launch, const AttentionBackwardArgs& a) {
  const AttentionArgs& f = a.forward;
  check_attention(f);
  check_rows(a.grad_out, query_shape(f), "grad_out");
  check_rows(a.grad_q, query_shape(f), "grad_q");
  check_rows(a.grad_k, key_shape(f), "grad_k");
  check_rows(a.grad_v, key_shape(f), "grad_v");
  check_row_sums(a.delta, f);
  const BackwardArguments args{.shape = AttentionShape(f),
                               .q = head_rows<const Bf16>(f.q),
                               .k = head_rows<const Bf16>(f.k),
                               .v = head_rows<const Bf16>(f.v),
                               .out = head_rows<const Bf16>(f.out),
                               .grad_out = head_rows<const Bf16>(a.grad_out),
                               .grad_q = head_rows<Bf16>(a.grad_q),
                               .grad_k = head_rows<Bf16>(a.grad_k),
                               .grad_v = head_rows<Bf16>(a.grad_v),
                               .lse = head_rows<const float>(f.lse),
                               .delta = head_rows<float>(a.delta)};
  if (f.head_dim == 64) {
    launch_backward<64>(launch, args);
  } else {
    launch_backward<128>(launch, args);
  }
}

}  // namespace qe::cuda

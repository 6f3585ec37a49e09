// Token and learned position embedding. Does not own token checks: ids are checked when the data is read.
//
// Backward without atomics, in the order of additions that core/ops_args.h names: a first kernel sorts the tokens by
// id, equal ids in token order, by counting for each token how many come before it; in a second each id's rows are
// summed by the block at its first place, and each position's rows are added by a block of their own.
#include <algorithm>
#include <cstdint>

#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace qe::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kRowsAhead = 8;  // rows of one sum whose loads are in flight together

constexpr int kSortWarps = 8;  // of a block that places kWarp tokens, each warp comparing with its share of the ids
constexpr int kStagedIds = 2048;

// A place of the sorted tokens.
struct Place {
  std::int32_t token;
  std::int32_t end;  // the first place of the next larger id
};

// The columns that this thread works on, of the row that blockIdx.x names.
__device__ __forceinline__ int first_column() {
  return static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kLaneElements;
}

template <class T>
struct ForwardView {
  const std::int32_t* tokens;
  MicrobatchCell microbatch;
  int count;
  int sequence_length;
  int cols;
  MatrixView<const T> table;
  MatrixView<const float> positions;
  MatrixView<T> out;
};

template <bool kVector, class T>
__global__ void __launch_bounds__(kMaxThreads) add_token_and_position(ForwardView<T> v) {
  const int t = static_cast<int>(blockIdx.x), col = first_column();
  if (col >= v.cols) return;
  const std::int32_t id = v.tokens[std::int64_t{*v.microbatch} * v.count + t];
  float token[kLaneElements], position[kLaneElements];
  to_floats(load_eight<kVector>(v.table.row(id), col, v.cols, true), token);
  to_floats(load_eight<kVector>(v.positions.row(t % v.sequence_length), col, v.cols, true), position);
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) token[k] += position[k];
  store_eight<kVector>(v.out.row(t), col, v.cols, token);
}

__global__ void __launch_bounds__(kSortWarps* kWarp)
    sort_by_id(const std::int32_t* tokens, MicrobatchCell microbatch, int count, Place* places) {
  __shared__ alignas(16) std::int32_t staged[kStagedIds];
  __shared__ Place part[kSortWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int32_t* ids = tokens + std::int64_t{*microbatch} * count;
  const int t = static_cast<int>(blockIdx.x) * kWarp + lane;
  const std::int32_t id = t < count ? ids[t] : 0;
  int before = 0, not_after = 0;  // tokens that come before this one; tokens whose id is not larger
  const auto compare = [&](std::int32_t other, int at) {
    before += other < id + (at < t ? 1 : 0) ? 1 : 0;
    not_after += other <= id ? 1 : 0;
  };
  for (int first = 0; first < count; first += kStagedIds) {
    const int here = min(kStagedIds, count - first);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kStagedIds; i += kSortWarps * kWarp) {
      staged[i] = i < here ? ids[first + i] : std::numeric_limits<std::int32_t>::max();
    }
    __syncthreads();
    for (int i = 4 * warp; i < here; i += 4 * kSortWarps) {
      const int4 four = *reinterpret_cast<const int4*>(staged + i);
      compare(four.x, first + i);
      compare(four.y, first + i + 1);
      compare(four.z, first + i + 2);
      compare(four.w, first + i + 3);
    }
  }
  part[warp][lane] = {before, not_after};
  __syncthreads();
  if (warp > 0 || t >= count) return;
  for (int w = 1; w < kSortWarps; ++w) {
    before += part[w][lane].token;
    not_after += part[w][lane].end;
  }
  places[before] = {t, not_after};
}

// sum += rows token_of(0), token_of(1), …, token_of(count − 1), in this order.
template <bool kVector, class T, class TokenOf>
__device__ __forceinline__ void add_rows(const MatrixView<const T>& rows, int col, int cols, int count,
                                         const TokenOf& token_of, float (&sum)[kLaneElements]) {
  for (int first = 0; first < count; first += kRowsAhead) {
    Eight<T> ahead[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const bool inside = first + i < count;
      ahead[i] = load_eight<kVector>(rows.row(inside ? token_of(first + i) : 0), col, cols, inside);
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (first + i >= count) break;
      float row[kLaneElements];
      to_floats(ahead[i], row);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) sum[k] += row[k];
    }
  }
}

template <class T>
struct BackwardView {
  const std::int32_t* tokens;
  MicrobatchCell microbatch;
  int count;
  int sequence_length;
  int cols;
  MatrixView<const T> grad_out;
  MatrixView<float> grad_token;
  MatrixView<float> grad_position;
  float* touched;  // null: not counted
  const Place* places;
};

template <bool kVector, class T>
__device__ __forceinline__ void add_position(const BackwardView<T>& v, int position, int col) {
  float sum[kLaneElements];
  float* row = v.grad_position.row(position);
  to_floats(load_eight<kVector>(row, col, v.cols, true), sum);
  const int sequences = (v.count - position + v.sequence_length - 1) / v.sequence_length;
  add_rows<kVector>(
      v.grad_out, col, v.cols, sequences, [&](int s) { return position + s * v.sequence_length; }, sum);
  store_eight<kVector>(row, col, v.cols, sum);
}

template <bool kVector, class T>
__device__ __forceinline__ void add_id(const BackwardView<T>& v, int place, int col) {
  if (place > 0 && v.places[place - 1].end > place) return;  // not the first place of its id
  const Place first = v.places[place];
  float sum[kLaneElements] = {}, total[kLaneElements];
  add_rows<kVector>(
      v.grad_out, col, v.cols, first.end - place, [&](int k) { return v.places[place + k].token; }, sum);
  const std::int32_t id = v.tokens[std::int64_t{*v.microbatch} * v.count + first.token];
  if (v.touched != nullptr && col == 0) v.touched[id] += 1.0f;
  float* row = v.grad_token.row(id);
  to_floats(load_eight<kVector>(row, col, v.cols, true), total);
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) total[k] += sum[k];
  store_eight<kVector>(row, col, v.cols, total);
}

// Blocks 0 … sequence_length − 1 take a position each, the others a place of the sorted tokens each.
template <bool kVector, class T>
__global__ void __launch_bounds__(kMaxThreads) add_gradients(BackwardView<T> v) {
  const int block = static_cast<int>(blockIdx.x), col = first_column();
  if (col >= v.cols) return;
  if (block < v.sequence_length) {
    if (block < v.count) add_position<kVector>(v, block, col);
  } else {
    add_id<kVector>(v, block - v.sequence_length, col);
  }
}

LaunchShape grid_of_rows(const Launch& launch, std::int64_t rows, std::int64_t cols) {
  const int lanes = tiles(cols, kLaneElements);
  const int threads = std::min(kMaxThreads, tiles(lanes, kWarp) * kWarp);
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(tiles(lanes, threads)));
  return {.grid = grid, .threads = threads, .stream = launch.stream};
}

template <class T>
void forward(const Launch& launch, const EmbeddingForwardArgs& a) {
  const bool vector = allows_vectors(a.token_table) && allows_vectors(a.position_table) && allows_vectors(a.out);
  const ForwardView<T> view = {.tokens = a.tokens,
                               .microbatch = a.microbatch,
                               .count = static_cast<int>(a.out.shape.rows),
                               .sequence_length = a.sequence_length,
                               .cols = static_cast<int>(a.out.shape.cols),
                               .table = view_of<const T>(a.token_table),
                               .positions = view_of<const float>(a.position_table),
                               .out = view_of<T>(a.out)};
  launch_kernel(grid_of_rows(launch, view.count, view.cols),
                vector ? add_token_and_position<true, T> : add_token_and_position<false, T>, view);
}

template <class T>
void backward(const Launch& launch, const EmbeddingBackwardArgs& a) {
  const bool vector = allows_vectors(a.grad_out) && allows_vectors(a.grad_token) && allows_vectors(a.grad_position);
  const BackwardView<T> view = {.tokens = a.tokens,
                                .microbatch = a.microbatch,
                                .count = static_cast<int>(a.grad_out.shape.rows),
                                .sequence_length = a.sequence_length,
                                .cols = static_cast<int>(a.grad_out.shape.cols),
                                .grad_out = view_of<const T>(a.grad_out),
                                .grad_token = view_of<float>(a.grad_token),
                                .grad_position = view_of<float>(a.grad_position),
                                .touched = a.touched.as<float>(),
                                .places = launch.scratch.as<Place>()};
  launch_kernel({.grid = dim3(static_cast<unsigned>(tiles(view.count, kWarp))),
                 .threads = kSortWarps * kWarp,
                 .stream = launch.stream},
                sort_by_id, a.tokens, a.microbatch, view.count, launch.scratch.as<Place>());
  launch_kernel(grid_of_rows(launch, std::int64_t{view.sequence_length} + view.count, view.cols),
                vector ? add_gradients<true, T> : add_gradients<false, T>, view);
}

void require_tables(const Tensor& token, const Tensor& position, const Tensor& rows, int sequence_length) {
  require_grid(rows.shape);
  QE_EXPECTS(is_wide(rows.dtype), "the embedding's activations are BF16 or FP32");
  QE_EXPECTS(token.shape.cols == rows.shape.cols && position.shape.cols == rows.shape.cols,
             "the embedding's tables have the activations' columns");
  QE_EXPECTS(sequence_length > 0 && position.shape.rows >= sequence_length,
             "the position table has a row for every position");
  QE_EXPECTS(position.dtype == DType::kF32, "the position table and its gradient are FP32");
}

}  // namespace

void embedding_forward(const Launch& launch, const EmbeddingForwardArgs& a) {
  require_tables(a.token_table, a.position_table, a.out, a.sequence_length);
  QE_EXPECTS(a.out.shape.rows % a.sequence_length == 0, "a microbatch is a whole number of sequences");
  QE_EXPECTS(a.token_table.dtype == a.out.dtype, "the token table is of the activations' type");
  if (a.out.shape.elements() == 0) return;
  a.out.dtype == DType::kBF16 ? forward<Bf16>(launch, a) : forward<float>(launch, a);
}

void embedding_backward(const Launch& launch, const EmbeddingBackwardArgs& a) {
  require_tables(a.grad_token, a.grad_position, a.grad_out, a.sequence_length);
  QE_EXPECTS(a.grad_token.dtype == DType::kF32, "embedding gradients are FP32 main gradients");
  QE_EXPECTS(a.touched.empty() || (a.touched.dtype == DType::kF32 && a.touched.shape.cols == a.grad_token.shape.rows),
             "an FP32 count for every id");
  if (a.grad_out.shape.elements() == 0) return;
  QE_EXPECTS(static_cast<std::size_t>(a.grad_out.shape.rows) * sizeof(Place) <= launch.scratch.bytes,
             "the sorted tokens fit the scratch memory");
  a.grad_out.dtype == DType::kBF16 ? backward<Bf16>(launch, a) : backward<float>(launch, a);
}

}  // namespace qe::cuda

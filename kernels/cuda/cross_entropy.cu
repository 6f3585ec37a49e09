// Softmax cross-entropy over the logits of a microbatch, and its gradient in the logits' own memory.
// Whatever padding columns hold enters neither maximum nor sum.
//
// One block a row. A row that fits shared memory is read once and written once; a longer one is read three times.
// Cases, as in the sum's definition: NaN is passed over by the maximum and comes back through the exponentials; a row
// without target has loss 0 and, where a gradient is written, gradient 0.
#include <algorithm>
#include <cstdint>
#include <numbers>

#include "core/error.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/mma_sync.cuh"
#include "kernels/cuda/rows.cuh"

namespace qe::cuda {
namespace {

constexpr int kMaxThreads = 1024;
// A multiprocessor has 228 KiB of shared memory, a block at most 227, and each block costs one more.
constexpr std::size_t kMaxKept = std::size_t{224} << 10;
constexpr std::size_t kHalfKept = std::size_t{112} << 10;  // two such blocks overlap each other's phases

template <class T>
struct Problem {
  MatrixView<T> logits;
  int rows;
  int cols;
  int vocabulary;
  const std::int32_t* targets;
  MicrobatchCell microbatch;
  const float* gradient_scale;
  bool write_gradient;
  float* row_loss;  // [rows]
};

// e^difference of two logits. Of FP32 ones within a unit of the last place. BF16 ones have 8 bits, so two instructions
// will do, which are off by 2^-24 of the difference and two units of the last place; twice a logit, they are what the
// kernel's time is made of.
__device__ __forceinline__ float exponential(float, float difference) { return expf(difference); }
__device__ __forceinline__ float exponential(Bf16, float difference) {
  return exp2_approximate(difference * std::numbers::log2e_v<float>);
}

// Eight logits from column `col`; padding columns as −Inf, whose exponential is zero.
template <class T>
__device__ __forceinline__ void to_logits(const Eight<T>& e, int col, int vocabulary, float (&v)[kLaneElements]) {
  to_floats(e, v);
  if (col + kLaneElements <= vocabulary) return;
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) {
    if (col + k >= vocabulary) v[k] = -std::numeric_limits<float>::infinity();
  }
}

// A row, either in `kept` (filled by the thread that reads it) or in global memory. Pieces are of eight columns.
template <bool kVector, bool kKept, class T>
struct Row {
  T* data;
  Eight<T>* kept;
  int cols;
  int vocabulary;

  __device__ __forceinline__ int pieces() const { return (vocabulary + kLaneElements - 1) / kLaneElements; }
  __device__ __forceinline__ void load(int piece, float (&v)[kLaneElements]) const {
    const int col = piece * kLaneElements;
    to_logits(kKept ? kept[piece] : load_eight<kVector>(data, col, cols, true), col, vocabulary, v);
  }
};

// Also fills `kept`.
template <bool kVector, bool kKept, class T>
__device__ __forceinline__ float maximum_of(const Row<kVector, kKept, T>& row) {
  constexpr int kAhead = kVector ? 4 : 1;  // pieces whose loads are in flight together
  const int pieces = row.pieces(), threads = static_cast<int>(blockDim.x);
  float maximum = -std::numeric_limits<float>::infinity();
  for (int first = static_cast<int>(threadIdx.x); first < pieces; first += kAhead * threads) {
    Eight<T> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = first + i * threads;
      ahead[i] = load_eight<kVector>(row.data, piece * kLaneElements, row.cols, piece < pieces);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = first + i * threads;
      if (piece >= pieces) break;
      if constexpr (kKept) row.kept[piece] = ahead[i];
      float v[kLaneElements];
      to_logits(ahead[i], piece * kLaneElements, row.vocabulary, v);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) maximum = fmaxf(maximum, v[k]);
    }
  }
  return reduce_block<Larger>(maximum, -std::numeric_limits<float>::infinity());
}

template <bool kVector, bool kKept, class T>
__device__ __forceinline__ float sum_of_exponentials(const Row<kVector, kKept, T>& row, float maximum) {
  float sums[kLaneElements] = {};
  for (int piece = static_cast<int>(threadIdx.x); piece < row.pieces(); piece += static_cast<int>(blockDim.x)) {
    float v[kLaneElements];
    row.load(piece, v);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) sums[k] += exponential(T{}, v[k] - maximum);
  }
  const float sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  return reduce_block<Add>(sum, 0.0f);
}

// exp(logit − maximum) · factor, at_target in the target's column, zero in padding columns.
template <bool kVector, bool kKept, class T>
__device__ __forceinline__ void write_gradient(const Row<kVector, kKept, T>& row, float maximum, float factor,
                                               std::int32_t target, float at_target) {
  const int pieces = row.pieces();
  for (int piece = static_cast<int>(threadIdx.x); piece * kLaneElements < row.cols;
       piece += static_cast<int>(blockDim.x)) {
    const int col = piece * kLaneElements;
    float v[kLaneElements] = {};
    if (piece < pieces) {
      row.load(piece, v);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) v[k] = exponential(T{}, v[k] - maximum) * factor;
      if (col + kLaneElements > row.vocabulary || col / kLaneElements == target / kLaneElements) {
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) {
          if (col + k == target) v[k] = at_target;
          if (col + k >= row.vocabulary) v[k] = 0.0f;
        }
      }
    }
    store_eight<kVector>(row.data, col, row.cols, v);
  }
}

template <bool kVector, class T>
__device__ __forceinline__ void clear(T* row, int cols) {
  const float zeros[kLaneElements] = {};
  for (int col = static_cast<int>(threadIdx.x) * kLaneElements; col < cols;
       col += static_cast<int>(blockDim.x) * kLaneElements) {
    store_eight<kVector>(row, col, cols, zeros);
  }
}

template <bool kVector, bool kKept, class T>
__global__ void __launch_bounds__(kMaxThreads) row_losses(Problem<T> p) {
  extern __shared__ uint4 kept[];
  const int r = static_cast<int>(blockIdx.x);
  const Row<kVector, kKept, T> row = {p.logits.row(r), reinterpret_cast<Eight<T>*>(kept), p.cols, p.vocabulary};
  const std::int32_t target = p.targets[std::int64_t{*p.microbatch} * p.rows + r];
  if (target < 0) {
    if (threadIdx.x == 0) p.row_loss[r] = 0.0f;
    if (p.write_gradient) clear<kVector>(row.data, row.cols);
    return;
  }
  float target_logit;  // read before the gradient takes its place
  if constexpr (sizeof(T) == 2) {
    target_logit = to_float(row.data[target]);
  } else {
    target_logit = row.data[target];
  }
  const float maximum = maximum_of(row);
  const float sum = sum_of_exponentials(row, maximum);
  if (threadIdx.x == 0) p.row_loss[r] = logf(sum) - (target_logit - maximum);
  if (!p.write_gradient) return;
  const float scale = *p.gradient_scale;
  const float at_target = (exponential(T{}, target_logit - maximum) / sum - 1.0f) * scale;
  write_gradient(row, maximum, scale / sum, target, at_target);
}

__global__ void __launch_bounds__(kMaxThreads)
    add_losses(const float* row_loss, int rows, MicrobatchCell microbatch, float* loss) {
  float sum = 0.0f;
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += kMaxThreads) sum += row_loss[r];
  sum = reduce_block<Add>(sum, 0.0f);
  if (threadIdx.x == 0) loss[*microbatch] = sum;
}

template <bool kVector, bool kKept, class T>
void launch_rows(const Launch& launch, const Problem<T>& problem, int threads, std::size_t kept) {
  const auto kernel = row_losses<kVector, kKept, T>;
  QE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMaxKept)));
  kernel<<<static_cast<unsigned>(problem.rows), static_cast<unsigned>(threads), kept, launch.stream>>>(problem);
  QE_CUDA_CHECK(cudaGetLastError());
}

// Threads and shared memory follow from type and vocabulary alone, and with them the order of a row's sum.
template <class T>
void launch_losses(const Launch& launch, const CrossEntropyArgs& a) {
  const Problem<T> problem = {.logits = view_of<T>(a.logits),
                              .rows = static_cast<int>(a.logits.shape.rows),
                              .cols = static_cast<int>(a.logits.shape.cols),
                              .vocabulary = static_cast<int>(a.vocab_size),
                              .targets = a.targets,
                              .microbatch = a.microbatch,
                              .gradient_scale = a.gradient_scale,
                              .write_gradient = a.write_gradient,
                              .row_loss = launch.scratch.as<float>()};
  const int pieces = tiles(a.vocab_size, kLaneElements);
  const std::size_t bytes = static_cast<std::size_t>(pieces) * sizeof(Eight<T>);
  const int most = bytes <= kHalfKept ? kMaxThreads / 2 : kMaxThreads;
  const int threads = std::min(most, tiles(pieces, kWarp) * kWarp);
  const bool vector = allows_vectors(a.logits);
  if (bytes <= kMaxKept) {
    vector ? launch_rows<true, true>(launch, problem, threads, bytes)
           : launch_rows<false, true>(launch, problem, threads, bytes);
  } else {
    vector ? launch_rows<true, false>(launch, problem, threads, 0)
           : launch_rows<false, false>(launch, problem, threads, 0);
  }
  launch_kernel({.grid = dim3(1), .threads = kMaxThreads, .stream = launch.stream}, add_losses, problem.row_loss,
                problem.rows, a.microbatch, a.loss);
}

}  // namespace

void cross_entropy(const Launch& launch, const CrossEntropyArgs& a) {
  require_grid(a.logits.shape);
  QE_EXPECTS(is_wide(a.logits.dtype), "cross_entropy takes BF16 or FP32 logits");
  QE_EXPECTS(a.logits.shape.rows > 0, "a microbatch has tokens");
  QE_EXPECTS(a.vocab_size > 0 && a.vocab_size <= a.logits.shape.cols, "the vocabulary fits into the logits' columns");
  QE_EXPECTS(static_cast<std::size_t>(a.logits.shape.rows) * sizeof(float) <= launch.scratch.bytes,
             "the rows' losses fit the scratch memory");
  a.logits.dtype == DType::kBF16 ? launch_losses<Bf16>(launch, a) : launch_losses<float>(launch, a);
}

}  // namespace qe::cuda

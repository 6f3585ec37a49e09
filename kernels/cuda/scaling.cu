// Scales of FP8 tensors: the delayed update of a chain's slots with the effect token, the dynamic scale of one tensor.
// What a scale is made from its amax is core/fp8/scale_rule.h, shared with the other backends.
#include <algorithm>

#include "core/fp8/scale_rule.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/operand_tile.cuh"

namespace qe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEntries = 4;  // of a history in one thread at a time

// The largest of every thread's value, in every thread. All threads of the block call it.
__device__ std::uint32_t block_max(std::uint32_t value) {
  __shared__ std::uint32_t of_warps[kWarps];
  const std::uint32_t m = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = m;
  __syncthreads();
  std::uint32_t all = 0;
  for (int w = 0; w < kWarps; ++w) all = of_warps[w] > all ? of_warps[w] : all;
  return all;
}

// A block a slot, the first of them counts the token. The history moves by one towards index 1: entries are read
// kThreads · kEntries at a time, ascending, and written after all threads have read, so none is overwritten before it
// moved. Bytes: 8 an entry.
__global__ void __launch_bounds__(kThreads) update_slots(const UpdateScalesArgs a) {
  const int thread = static_cast<int>(threadIdx.x), length = a.history_length;
  if (a.token != nullptr && blockIdx.x == 0 && thread == 0) *a.token += 1;
  if (a.slots == 0) return;
  float* history = a.history + static_cast<std::int64_t>(blockIdx.x) * length;
  const float current = history[0];
  if (current == 0.0f) return;
  float largest = current > 0.0f ? current : 0.0f;  // NaN entries count as 0
  for (int first = 1; first < length; first += kThreads * kEntries) {
    float entries[kEntries];
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      const int i = first + k * kThreads + thread;
      entries[k] = i < length ? history[i] : 0.0f;
      largest = entries[k] > largest ? entries[k] : largest;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      const int i = first + k * kThreads + thread;
      if (i > 1 && i < length) history[i - 1] = entries[k];
    }
  }
  const std::uint32_t window = block_max(__float_as_uint(largest));
  if (thread != 0) return;
  if (length > 1) history[length - 1] = current;
  history[0] = 0.0f;
  const float m = a.algorithm == AmaxAlgorithm::kMax ? __uint_as_float(window) : current;
  a.scale[blockIdx.x] = scale_from_amax(m, a.scale[blockIdx.x], a.format, a.margin);
}

constexpr int kLoads = 4;  // of eight elements in flight in a thread

// partials [blocks] = amax of what each block read. Bytes an element: BF16 2, FP32 4 read.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) gather_amax(const MatrixView<const T> x, const int rows, const int cols,
                                                        const bool round, std::uint32_t* partials) {
  float amax = 0.0f;
  const int step = kThreads * kLaneElements;
  const int chunks = (cols + step * kLoads - 1) / (step * kLoads);  // of a row; a block takes every gridDim.x-th
  for (std::int64_t chunk = blockIdx.x; chunk < static_cast<std::int64_t>(rows) * chunks; chunk += gridDim.x) {
    const int row = static_cast<int>(chunk / chunks);
    const int first = static_cast<int>(chunk % chunks) * step * kLoads + static_cast<int>(threadIdx.x) * kLaneElements;
    Eight<T> raw[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) raw[k] = load_eight<kVector>(x.row(row), first + k * step, cols, true);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      float v[kLaneElements];
      to_floats(raw[k], v);
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) amax = fmaxf(amax, fabsf(v[i]));
    }
  }
  if (round) amax = round_bf16(amax);  // rounding is monotonic
  const std::uint32_t all = block_max(__float_as_uint(amax));
  if (threadIdx.x == 0) partials[blockIdx.x] = all;
}

__global__ void __launch_bounds__(kThreads)
    scale_from_partials(const std::uint32_t* partials, const int count, const float largest, float* scale) {
  std::uint32_t m = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) m = partials[i] > m ? partials[i] : m;
  const float amax = __uint_as_float(block_max(m));
  if (threadIdx.x == 0) *scale = largest / fmaxf(amax, 1e-12f);
}

template <class T>
void gather(const Launch& launch, const Tensor& given, bool round, int blocks) {
  Tensor x = given;
  if (x.contiguous() && x.shape.elements() < (std::int64_t{1} << 30))
    x = make_tensor(x.data, x.dtype, {1, x.shape.elements()});
  require_grid(x.shape);
  launch_kernel({dim3(static_cast<unsigned>(blocks)), kThreads, 1, launch.stream},
                allows_vectors(x) ? &gather_amax<T, true> : &gather_amax<T, false>, view_of<const T>(x),
                static_cast<int>(x.shape.rows), static_cast<int>(x.shape.cols), round,
                launch.scratch.as<std::uint32_t>());
}

}  // namespace

void update_scales(const Launch& launch, const UpdateScalesArgs& a) {
  if (a.slots == 0 && a.token == nullptr) return;
  QE_EXPECTS(a.slots >= 0 && a.history_length >= 1 && is_fp8(a.format), "slots have an FP8 format and a history");
  launch_kernel({dim3(static_cast<unsigned>(std::max(a.slots, 1))), kThreads, 1, launch.stream}, &update_slots, a);
}

// Two launches: block maxima into scratch memory, then the scale. A tensor of zeros gets qmax / 1e-12; one with an Inf
// gets 0, whose scale_inv of Inf carries it into the loss.
void dynamic_scale(const Launch& launch, const DynamicScaleArgs& a) {
  QE_EXPECTS(is_fp8(a.format) && is_wide(a.x.dtype), "dynamic_scale takes an FP32 or BF16 matrix and an FP8 format");
  const int blocks =
      std::min(tiles(a.x.shape.elements(), kThreads * kLaneElements * kLoads), 8 * launch.multiprocessors);
  QE_EXPECTS(static_cast<std::size_t>(blocks) * sizeof(std::uint32_t) <= launch.scratch.bytes,
             "scratch holds the maxima");
  if (a.x.dtype == DType::kBF16) {
    gather<Bf16>(launch, a.x, a.round_to_bf16, blocks);
  } else {
    gather<float>(launch, a.x, a.round_to_bf16, blocks);
  }
  launch_kernel({dim3(1), kThreads, 1, launch.stream}, &scale_from_partials, launch.scratch.as<std::uint32_t>(), blocks,
                fp8_max(a.format), a.scale);
}

}  // namespace qe::cuda

// Pieces of matrix rows in and out of registers: eight elements of one row at a time, FP32 working values from and to
// BF16 and FP32 storage, and the launch of a kernel. Owns the conversions (core/dtype.h's bits); what is computed and
// the FP8 tail (operand_tile.cuh) are not here.
//
// kVector: pointers, pitches and columns allow 16-byte accesses (allows_vectors), so eight elements are all inside the
// matrix or all outside. Without it every element is tested: any shape and pitch, slowly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "core/dtype.h"
#include "core/error.h"
#include "core/tensor.h"
#include "kernels/cuda/check.h"

namespace qe::cuda {

inline constexpr int kLaneElements = 8;  // of one row, in one thread: 16 bytes of BF16, 32 of FP32
inline constexpr int kWarp = 32;

// A matrix as a kernel sees it.
template <class T>
struct MatrixView {
  T* data;
  std::int64_t pitch;  // elements
  __device__ T* row(int r) const { return data + r * pitch; }
};
template <class T>
MatrixView<T> view_of(const Tensor& t) {
  return {t.as<T>(), t.row_pitch};
}

template <class T>
struct Eight;  // eight stored elements
template <>
struct Eight<Bf16> {
  uint4 words;
};
template <>
struct Eight<float> {
  float4 low, high;
};

// Elements [col, col + 8) of a row; those outside the matrix (or of a row outside it) are zero.
template <bool kVector, class T>
__device__ __forceinline__ Eight<T> load_eight(const T* row, int col, int cols, bool inside) {
  Eight<T> e{};
  if constexpr (kVector) {
    if (inside && col < cols) {
      const auto* from = reinterpret_cast<const uint4*>(row + col);
      if constexpr (sizeof(T) == 2) {
        e.words = from[0];
      } else {
        e.low = reinterpret_cast<const float4*>(from)[0];
        e.high = reinterpret_cast<const float4*>(from)[1];
      }
    }
  } else {
    T* to = reinterpret_cast<T*>(&e);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      if (inside && col + k < cols) to[k] = row[col + k];
    }
  }
  return e;
}

__device__ __forceinline__ void to_floats(const Eight<Bf16>& e, float (&v)[8]) {
  const std::uint32_t words[4] = {e.words.x, e.words.y, e.words.z, e.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void to_floats(const Eight<float>& e, float (&v)[8]) {
  v[0] = e.low.x, v[1] = e.low.y, v[2] = e.low.z, v[3] = e.low.w;
  v[4] = e.high.x, v[5] = e.high.y, v[6] = e.high.z, v[7] = e.high.w;
}

// Two values as BF16, the first in the low half; a NaN loses its sign and payload.
__device__ __forceinline__ std::uint32_t bf16_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return std::uint32_t{__bfloat16_as_ushort(pair.x)} | std::uint32_t{__bfloat16_as_ushort(pair.y)} << 16;
}
// to_bf16's bits: values with a NaN among them take its longer way. One branch, so that all eight convert together.
__device__ __forceinline__ Eight<Bf16> to_eight(Bf16, const float (&v)[8]) {
  bool nan = false;
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) nan |= v[k] != v[k];
  std::uint32_t words[4];
  if (!nan) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = bf16_pair(v[2 * i], v[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = to_bf16(v[2 * i]).bits | std::uint32_t{to_bf16(v[2 * i + 1]).bits} << 16;
  }
  return {{words[0], words[1], words[2], words[3]}};
}
__device__ __forceinline__ Eight<float> to_eight(float, const float (&v)[8]) {
  return {{v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}};
}

// Into elements [col, col + 8) of a row of the matrix; those outside it are not touched.
template <bool kVector, class T>
__device__ __forceinline__ void store_eight(T* row, int col, int cols, const Eight<T>& e) {
  if constexpr (kVector) {
    if (col >= cols) return;
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint4*>(row + col) = e.words;
    } else {
      reinterpret_cast<float4*>(row + col)[0] = e.low;
      reinterpret_cast<float4*>(row + col)[1] = e.high;
    }
  } else {
    const T* from = reinterpret_cast<const T*>(&e);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      if (col + k < cols) row[col + k] = from[k];
    }
  }
}
template <bool kVector, class T>
__device__ __forceinline__ void store_eight(T* row, int col, int cols, const float (&v)[8]) {
  store_eight<kVector>(row, col, cols, to_eight(T{}, v));  // rounded once
}

// Can this matrix be read and written sixteen bytes at a time? An empty one hinders nothing.
inline bool allows_vectors(const Tensor& t, std::int64_t multiple = kLaneElements) {
  if (t.empty()) return true;
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  const auto pitch_bytes = static_cast<std::uintptr_t>(t.row_pitch) * size_of(t.dtype);
  return address % 16 == 0 && (t.shape.rows <= 1 || pitch_bytes % 16 == 0) && t.shape.cols % multiple == 0;
}

inline bool is_wide(DType type) { return type == DType::kF32 || type == DType::kBF16; }

// Rows and columns are counted in int, tiles of rows in the grid's second dimension.
inline void require_grid(const Shape& s) {
  QE_EXPECTS(s.rows <= (std::int64_t{1} << 20) && s.cols <= (std::int64_t{1} << 30),
             "a matrix of at most 2^20 rows and 2^30 columns fits the grid");
}
inline int tiles(std::int64_t elements, int tile) {
  return elements <= 0 ? 1 : static_cast<int>((elements + tile - 1) / tile);
}

struct LaunchShape {
  dim3 grid;
  int threads;
  dim3 cluster = 1;  // neighbouring blocks that reach into each other's shared memory
  cudaStream_t stream;
};
template <class... Parameters, class... Arguments>
void launch_kernel(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.stream = shape.stream;
  config.attrs = &cluster;
  config.numAttrs = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1 ? 1 : 0;
  QE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace qe::cuda

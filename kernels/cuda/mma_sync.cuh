// The instructions that tensor-core kernels of one warp at a time are made of: asynchronous copies into shared memory,
// loads of matrix fragments, BF16 products. Knows no tile and no layout of shared memory.
//
// Fragments of m16n8k16, lane = 4 g + t: A {(g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)} as (row, k), two
// neighbouring k a register; B {(2t, g), (2t + 8, g)} as (k, column); sums {(g, 2t), (g, 2t + 1), (g + 8, 2t),
// (g + 8, 2t + 1)} as (row, column).
#pragma once

#include <cstdint>

namespace qe::cuda {

__device__ inline std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes from global to shared memory, both 16-byte aligned; zeros, and nothing is read, where !inside.
__device__ inline void copy_async_16(std::uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}
__device__ inline void copy_async_4(std::uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0));
}
// This thread's copies are done; others' are after the next barrier.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 give the rows' addresses of matrix i. Lane 4 g + t gets
// row g, columns 2t and 2t + 1 of each; transposed: rows 2t and 2t + 1 of column g.
__device__ inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// sum[16, 8] += A[16, 16] · B[16, 8], BF16 products summed in FP32.
__device__ inline void multiply_add(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values rounded to nearest-even BF16, the first in the low half.
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x within 2 units in the last place; results below the normal numbers are 0, of −inf too.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace qe::cuda

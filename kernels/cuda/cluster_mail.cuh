// Values from one block of a cluster into another's shared memory, where the receiver counts the bytes. A barrier of
// the cluster for each meeting would do, but its release waits until the whole card sees what the thread wrote, and its
// acquire empties L1. No barrier is needed at the end either: who waits for all that is sent to it may leave, and
// nobody reads another block's memory. A cluster has at least two blocks: one launched alone cannot send to itself.
#pragma once

#include <cstdint>

#include "kernels/cuda/mma_sync.cuh"

namespace qe::cuda {

// In shared memory, for one delivery.
struct Mailbox {
  std::uint64_t arrived;  // an mbarrier in its first phase

  // By one thread, before announce_block.
  __device__ void open() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived)) : "memory");
  }
  // By one thread, after await_blocks: how many bytes are sent to this block; some may have come already.
  __device__ void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrived)), "r"(bytes)
                 : "memory");
  }
  // Until all of them are here. The default scope, this block's, is enough for shared memory; the cluster's would empty
  // L1.
  __device__ void wait() const {
    std::uint32_t complete = 0;
    while (complete == 0) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(complete)
          : "r"(shared_address(&arrived))
          : "memory");
    }
  }
};

// All threads of a block call both, with other work between them: after the second every block of the cluster has
// started and opened its mailboxes.
__device__ __forceinline__ void announce_block() {
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void await_blocks() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The same place in a block of the cluster.
__device__ __forceinline__ std::uint32_t address_in(const void* here, int block) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  return there;
}

// Into `here` of that block, counted by its mailbox. After await_blocks.
__device__ __forceinline__ void send(int block, const float* here, const Mailbox& mailbox, float value) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_in(here, block)),
      "r"(__float_as_uint(value)), "r"(address_in(&mailbox.arrived, block))
      : "memory");
}
__device__ __forceinline__ void send(int block, const float4* here, const Mailbox& mailbox, const float (&v)[4]) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address_in(here, block)),
               "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])),
               "r"(__float_as_uint(v[3])), "r"(address_in(&mailbox.arrived, block))
               : "memory");
}

}  // namespace qe::cuda

// PTX instructions of whole.cuh besides those of dense_ptx.cuh.
#pragma once

#include <elman/decode_ptx.cuh>

namespace elman::whole {

// A word of an exchange, stored and loaded whole: a number and its step.
__device__ __forceinline__ void store_word(unsigned long long* p, unsigned long long v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void load_word(unsigned long long& v, const unsigned long long* p) {
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
}
// A number in shared memory that another warp of the block waits for. The warp's accesses to shared memory before its barrier
// must be complete before this store, which PTX promises only for a release. A multiprocessor ensures it anyway: it performs
// accesses to shared memory in issue order, and copies have arrived when their wait ends. A release adds MEMBAR.ALL.CTA, which
// also waits for words to other blocks.
__device__ __forceinline__ void tell(unsigned* p, unsigned v) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(ptx::shared_address(p)), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned look_at(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(ptx::shared_address(p)) : "memory");
  return v;
}
// Barrier of some warps of the block.
__device__ __forceinline__ void meet_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace elman::whole

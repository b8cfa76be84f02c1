// The machine operations of whole.cuh beside those of dense_ptx.cuh.
#pragma once

#include <elman/decode_ptx.cuh>

namespace elman::whole {

// A word of an exchange, whole: a number and the step that it belongs to.
__device__ __forceinline__ void store_word(unsigned long long* p, unsigned long long v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void load_word(unsigned long long& v, const unsigned long long* p) {
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
}
// A number in shared memory that another warp of the block waits for. PTX promises only of a release what is wanted: what the warp read or wrote in shared
// memory before it met is done before this store. A multiprocessor does that anyway, as it takes accesses to shared memory in the order of issue, and copies
// have come when their wait ends. A release adds MEMBAR.ALL.CTA, which waits for words to other blocks, too.
__device__ __forceinline__ void tell(unsigned* p, unsigned v) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(ptx::shared_address(p)), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned look_at(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(ptx::shared_address(p)) : "memory");
  return v;
}
// Some warps of the block meet.
__device__ __forceinline__ void meet_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace elman::whole

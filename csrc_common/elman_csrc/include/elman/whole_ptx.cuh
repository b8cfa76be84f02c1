// The machine operations of whole.cuh beside those of dense_ptx.cuh.
#pragma once

#include <elman/decode_ptx.cuh>

namespace elman::whole {

// A word of an exchange, whole: a number and the step that it belongs to.
__device__ __forceinline__ void store_word(unsigned long long* p, unsigned long long v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Two neighbours; each is whole.
__device__ __forceinline__ void load_words(unsigned long long (&v)[2], const unsigned long long* p) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(p) : "memory");
}

}  // namespace elman::whole

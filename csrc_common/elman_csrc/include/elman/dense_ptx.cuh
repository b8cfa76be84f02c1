// PTX instructions of the dense skeleton, and the three storage types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "portable.h"

namespace elman {

// ---- storage types: contents of a 4-byte word, and rounding of the state into it --------------------------------------
// The hardware conversions write every NaN as 0x7fff, so no stored word is ever the sentinel 0xffffffff.
template <class Elem>
struct Storage;

template <>
struct Storage<__nv_bfloat16> {
  static constexpr int per_word = 2;
  using Math = Fast;
  static __device__ void unpack(unsigned v, float* x) {
    x[0] = __uint_as_float(v << 16);
    x[1] = __uint_as_float(v & 0xffff0000u);
  }
  static __device__ unsigned pack(const float* x) {
    unsigned v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x[1]), "f"(x[0]));
    return v;
  }
};

template <>
struct Storage<__half> {
  static constexpr int per_word = 2;
  using Math = Fast;
  static __device__ void unpack(unsigned v, float* x) {
    const float2 f = __half22float2(*reinterpret_cast<__half2*>(&v));
    x[0] = f.x;
    x[1] = f.y;
  }
  static __device__ unsigned pack(const float* x) {
    unsigned v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x[1]), "f"(x[0]));
    return v;
  }
};

template <>
struct Storage<float> {
  static constexpr int per_word = 1;
  using Math = Exact;
  static __device__ void unpack(unsigned v, float* x) { x[0] = __uint_as_float(v); }
  static __device__ unsigned pack(const float* x) {
    const unsigned v = __float_as_uint(x[0]);
    return v == 0xffffffffu ? 0x7fffffffu : v;  // a copied NaN may carry any payload
  }
};

namespace ptx {

// ---- tensor cores ------------------------------------------------------------------------------------------------------
template <class Elem>
__device__ __forceinline__ void mma_16x8x16(float* c, const unsigned* a, unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- memory shared by the whole grid -------------------------------------------------------------------------------------
__device__ __forceinline__ void load_relaxed(uint4& v, const void* p) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ void load_relaxed(uint4& v, const void* p, unsigned wanted) {  // leaves v unchanged if not wanted
  asm volatile("{ .reg .pred w; setp.ne.u32 w, %5, 0; @w ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(wanted)
               : "memory");
}
__device__ __forceinline__ void store_relaxed(void* p, unsigned v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ---- shared memory, by address ---------------------------------------------------------------------------------------------
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char bytes[];
  return bytes;
}
__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void store_shared(unsigned to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
template <int n>
__device__ __forceinline__ void store_shared(unsigned to, const float (&v)[n]) {
  if constexpr (n == 4)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
  else
    for (int i = 0; i < n; ++i) store_shared(to + 4 * i, v[i]);
}
__device__ __forceinline__ void load_shared(float (&v)[1], unsigned from) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[2], unsigned from) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[3], unsigned from) {  // there is no load of twelve bytes
  asm volatile("ld.shared.f32 %0, [%3]; ld.shared.f32 %1, [%3+4]; ld.shared.f32 %2, [%3+8];"
               : "=&f"(v[0]), "=&f"(v[1]), "=f"(v[2])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[4], unsigned from) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
}
// Keeps a value in its register. Otherwise the compiler recomputes addresses in the middle of the critical path.
__device__ __forceinline__ void pin(unsigned& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void pin(float& v) { asm volatile("" : "+f"(v)); }
template <class T>
__device__ __forceinline__ void pin(T*& v) {
  asm volatile("" : "+l"(v));
}

// The same for kernels short of registers, where even ptxas would recompute the value: it cannot see through a shuffle.
__device__ __forceinline__ void hold(unsigned& v) { v = __shfl_sync(~0u, v, threadIdx.x % 32); }
template <class T>
__device__ __forceinline__ void hold(T*& p) {
  p = reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(p), threadIdx.x % 32));
}

// ---- clusters ------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ unsigned in_block(unsigned address, int rank) {  // the same place in another block of the cluster
  unsigned r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
__device__ __forceinline__ void store_async(unsigned to, uint4 v, unsigned barrier) {  // counts 16 bytes at the receiver's barrier
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_passed(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace ptx
}  // namespace elman

// Warp instructions without a C++ equivalent. elman_csrc/emulated has the same functions for a processor.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include <elman/dense_ptx.cuh>

namespace elman::matrix {

using ptx::mma_16x8x16;

__device__ __forceinline__ void team_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Stores to shared memory from some lanes, without a branch.
__device__ __forceinline__ void store_if(bool mine, float* to, float x) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.f32 [%1], %2;}" ::"r"(int(mine)),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "f"(x)
               : "memory");
}
__device__ __forceinline__ void store_if(bool mine, unsigned* to, unsigned x) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.u32 [%1], %2;}" ::"r"(int(mine)),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "r"(x)
               : "memory");
}

// Signals without waiting.
__device__ __forceinline__ void tell_barrier(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Moves registers from helpers to own warps, if the architecture can. All warps of a warpgroup must execute each move.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define ELMAN_REGISTERS_MOVE 1
#else
#define ELMAN_REGISTERS_MOVE 0
#endif
template <int registers>
__device__ __forceinline__ void take_registers() {
#if ELMAN_REGISTERS_MOVE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}
template <int registers>
__device__ __forceinline__ void give_registers() {
#if ELMAN_REGISTERS_MOVE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

// C[16,8] += A[16,8] B[8,8], fp32 sums of tf32 products. Lane (g, t) = (lane / 4, lane % 4) holds A(g, t), A(g+8, t), A(g, t+4),
// A(g+8, t+4); B(t, g), B(t+4, g); C(g, 2t), C(g, 2t+1), C(g+8, 2t), C(g+8, 2t+1).
__device__ __forceinline__ void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
                 "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// C[16,8] += A[16,4] B[4,8], likewise. Lane (g, t) holds A(g, t), A(g+8, t); B(t, g); C as above.
__device__ __forceinline__ void mma_tf32(float& c0, float& c1, float& c2, float& c3, float a0, float a1, float b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(b)));
}
// C[16,8] += A[16,8] B[8,8], fp32 sums of 16-bit products. Lane (g, t) holds A(g, 2t … + 1), A(g+8, 2t …); B(2t …, g); C as above.
template <class Elem>
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], const unsigned (&a)[2], unsigned b) {
  if constexpr (std::is_same_v<Elem, __nv_bfloat16>)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b));
  else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b));
}
// The part of x that the tensor cores cut off.
__device__ __forceinline__ float cut_off(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
// 8 x 8 elements of 16 bits: lane (g, t) gives row g, columns 2t and 2t + 1, and gets rows 2t and 2t + 1 of column g.
__device__ __forceinline__ unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Stores four of them to 32 lines of 16 bytes in shared memory, eight lines each; `to` is the lane's line.
__device__ __forceinline__ void store_matrices(uint4* to, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
#else
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; i++) reinterpret_cast<unsigned*>(to - lane)[32 * i + lane] = x[i];
#endif
}
// Loads them back, or each one transposed.
template <bool transposed>
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const uint4* from) {
  const unsigned line = static_cast<unsigned>(__cvta_generic_to_shared(from));
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(line)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(line)
                 : "memory");
}

}  // namespace elman::matrix

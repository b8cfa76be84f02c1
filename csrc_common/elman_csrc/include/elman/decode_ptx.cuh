// PTX instructions of decode.cuh.
#pragma once

#include <elman/dense_ptx.cuh>

namespace elman::decode {

using ptx::mma_16x8x16;

template <class Elem>
__device__ __forceinline__ Elem narrow(float x) {
  return static_cast<Elem>(x);
}
template <class Elem>
__device__ __forceinline__ float wide(Elem x) {
  return static_cast<float>(x);
}

// Lets later kernels in the stream start, if they were launched to do so. They wait for this kernel's results themselves.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until everything that earlier kernels have written is visible.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Loads weights, which one block reads once.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Loads data that another kernel may have written since this one began: it bypasses the L1 cache and must follow the wait.
__device__ __forceinline__ uint4 load_fresh(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ float load_fresh(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ bool load_fresh(const unsigned char* p) {
  unsigned short v;
  asm volatile("ld.global.cg.u8 %0, [%1];" : "=h"(v) : "l"(p));
  return v != 0;
}
template <class Elem>
__device__ __forceinline__ float load_fresh(const Elem* p) {
  unsigned short v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
  float out[2];
  Storage<Elem>::unpack(v, out);
  return out[0];
}

}  // namespace elman::decode

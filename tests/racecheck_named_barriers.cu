// Whether racecheck understands named barriers: the same program four times. Two warps write a buffer ahead of two that read
// it, and all meet at barrier 1 each round. own: the writers also meet among themselves once, at barrier 2, whose number is in
// a register or in the instruction.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

enum class Own { no, in_register, in_instruction };

__device__ void meet(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

template <Own own, bool racing = false>
__global__ void rounds(float* out, int n) {
  __shared__ float x[2][64];
  const int i = threadIdx.x % 64;
  if (threadIdx.x >= 64) {
    if (own == Own::in_register) meet(2, 64);
    if (own == Own::in_instruction) asm volatile("bar.sync 2, 64;" ::: "memory");
    x[0][i] = i;
    meet(1, 128);
    for (int r = 0; r < n; r++) {
      x[(r + 1) & 1][i] = r + i;
      if (!racing) meet(1, 128);
    }
  } else {
    float sum = 0;
    meet(1, 128);
    for (int r = 0; r < n; r++) {
      sum += x[r & 1][63 - i];
      if (!racing) meet(1, 128);
    }
    out[i] = sum;
  }
}

int main(int, char** arguments) {
  float* out;
  cudaMalloc(&out, 64 * sizeof(float));
  switch (std::atoi(arguments[1])) {
    case 0:
      rounds<Own::no><<<1, 128>>>(out, 6);
      break;
    case 1:
      rounds<Own::in_register><<<1, 128>>>(out, 6);
      break;
    case 2:
      rounds<Own::in_instruction><<<1, 128>>>(out, 6);
      break;
    case 3:
      rounds<Own::no, true><<<1, 128>>>(out, 6);
      break;
  }
  const cudaError_t error = cudaDeviceSynchronize();
  std::puts(cudaGetErrorString(error));
  return error != cudaSuccess;
}

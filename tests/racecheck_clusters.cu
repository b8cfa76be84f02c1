// Whether racecheck sees the order made by st.async, with which E23's blocks exchange: the same program five times, on a
// cluster of two blocks. Each round, two warps write sums, which the first warp reads after __syncthreads. It sends a number to
// both blocks, and all threads wait for both numbers before they write again. test_kernels_races.py says which of these race:
// `unordered` and, strictly by PTX, `by_one`.
#include <cuda_runtime.h>

#include <elman/dense_ptx.cuh>

#include <cstdio>
#include <cstdlib>

namespace ptx = elman::ptx;

enum class Sent {
  with_barrier,  // all threads of a block also meet
  by_each,  // every thread that reads also sends
  after_meeting,  // two lanes send for the warp, after it has met
  by_one,  // they send a sum over the warp, made by shuffles
  unordered  // no thread sends or waits
};
constexpr int kBlocks = 2, kHalf = 64 * 4, kBarriers = kHalf + 2 * kBlocks * 32 * 16;

struct Args {
  float* out;
  int rounds;
};

template <Sent sent>
__global__ void rounds(const __grid_constant__ Args g) {
  char* const shared = ptx::dynamic_shared();
  float* const sums = reinterpret_cast<float*>(shared);
  const unsigned base = ptx::shared_address(shared);
  const int i = threadIdx.x;
  constexpr bool each = sent == Sent::with_barrier || sent == Sent::by_each;
  const auto barrier = [&](int r) { return base + kBarriers + r % 2 * 8; };
  const auto expect = [&](int r) { ptx::barrier_expect(barrier(r), kBlocks * (each ? 32 : 1) * 16); };
  const auto send = [&](int r, int to, float x) {
    const unsigned v = __float_as_uint(x), at = base + kHalf + ((r % 2 * kBlocks + blockIdx.x) * 32 + (each ? i : 0)) * 16;
    ptx::store_async(ptx::in_block(at, to), make_uint4(v, v, v, v), ptx::in_block(barrier(r), to));
  };
  if (i == 0)
    for (int r = 0; r < 2; r++) ptx::barrier_init(barrier(r), 1), expect(r);
  ptx::cluster_sync();
  float sum = 0;
  for (int r = 0; r < g.rounds; r++) {
    sums[i] = static_cast<float>(r + i);
    __syncthreads();
    if (i < 32) sum += sums[i] + sums[32 + i];
    if (sent == Sent::unordered) continue;
    if (i < 32) {
      if (each) send(r, 0, sum), send(r, 1, sum);
      float all = sum;
      for (int lane = 16; lane && !each; lane /= 2) all += __shfl_xor_sync(~0u, all, lane);
      if (sent == Sent::after_meeting) __syncwarp();
      if (!each && i < kBlocks) send(r, i, all);
    }
    while (!ptx::barrier_passed(barrier(r), r / 2 % 2)) {
    }
    if (i == 0) expect(r + 2);
    if (sent == Sent::with_barrier) __syncthreads();
  }
  if (i < 32) g.out[blockIdx.x * 32 + i] = sum;
  ptx::cluster_sync();
}

int main(int, char** arguments) {
  Args g{nullptr, 6};
  cudaMalloc(reinterpret_cast<void**>(&g.out), kBlocks * 32 * sizeof(float));
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = kBlocks, cluster[0].val.clusterDim.y = cluster[0].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks), config.blockDim = dim3(64), config.dynamicSmemBytes = kBarriers + 16;
  config.attrs = cluster, config.numAttrs = 1;
  void (*const kernels[])(Args) = {rounds<Sent::with_barrier>, rounds<Sent::by_each>, rounds<Sent::after_meeting>,
                                   rounds<Sent::by_one>, rounds<Sent::unordered>};
  int error = cudaLaunchKernelEx(&config, kernels[std::atoi(arguments[1])], g);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  std::puts(error == cudaSuccess ? "ran" : "failed");
  return error != cudaSuccess;
}

// The backward of causal_conv.cuh.
#pragma once

#include "causal_conv.cuh"

namespace elman::conv {

// Gradients on their way: of the inputs in the window, and of the weights.
template <class Elem, int K, int V, bool silu, bool marked>
struct Gradients {
  Walk<Elem, K, V, 2, marked> walk;
  float dw[K + 1][V] = {};  // of the taps, and of the bias
  float behind[K - 1][V] = {};

  __device__ Gradients(const Args<Elem>& g, char* shared) : walk(g, shared) {}

  __device__ void leave(int time, const float* dx) {  // that of one input is complete; a chunk writes those of its own
    const Args<Elem>& g = walk.g;
    if (time >= walk.t0 && time < walk.t1) Packed<Elem, V>::store(g.dx.at(time, walk.b) + walk.c, dx);
    else if (time < 0 && time != kNowhere && walk.t0 == 0 && g.dwindow)
      Packed<float, V>::store(g.dwindow + walk.in_window(time), dx);
  }
  __device__ void leave_all() {
#pragma unroll
    for (int j = 0; j < K - 1; ++j) {
      leave(walk.times[j], behind[j]);
#pragma unroll
      for (int v = 0; v < V; ++v) behind[j][v] = 0.f;
    }
    walk.forget();
  }
  // Step t, the i-th of a round; `mine`: of the chunk. `oldest`: what is now complete.
  __device__ void step(int i, int t, bool mine, float* oldest) {
    float x[V], dz[V];
    walk.ahead.get(i, 0, x), walk.ahead.get(i, 1, dz);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (silu) {
        const float z = walk.before_silu(x, v);
        const Gate<float> s = Storage<Elem>::Math::gate(z);
        dz[v] *= s.open + z * s.open * s.shut;
      }
      const float of_weights = mine ? dz[v] : 0.f;
#pragma unroll
      for (int j = 0; j < K; ++j) dw[j][v] += of_weights * (j < K - 1 ? walk.window[j < K - 1 ? j : 0][v] : x[v]);
      dw[K][v] += of_weights;
      oldest[v] = behind[0][v] + walk.w[0][v] * dz[v];
#pragma unroll
      for (int j = 0; j < K - 2; ++j) behind[j][v] = behind[j + 1][v] + walk.w[j + 1][v] * dz[v];
      behind[K - 2][v] = walk.w[K - 1][v] * dz[v];
    }
    walk.push(t, x);
  }
  __device__ void run() {
    const Args<Elem>& g = walk.g;
    const int end = marked ? g.T : min(g.T, walk.t1 + K - 1);
    int left = K - 1;  // steps after the chunk that its inputs still wait for
    walk.begin(end);
    for (int t = walk.t0; t < end && left > 0; t += kRound) {
      walk.round(t, end);
      if (t + kRound <= walk.t1 && walk.times[0] >= walk.t0 && walk.plain()) {
        // Code without a branch: steps without marks, of the chunk, which complete inputs of the chunk.
#pragma unroll
        for (int i = 0; i < kRound; ++i) {
          const int time = marked ? walk.times[0] : t + i - (K - 1);
          float oldest[V];
          step(i, t + i, true, oldest);
          Packed<Elem, V>::store(g.dx.at(time, walk.b) + walk.c, oldest);
        }
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < kRound && t + i < end && left > 0; ++i) {
        const bool mine = t + i < walk.t1;
        if (walk.marks.begins(i)) {
          leave_all();
          if (!mine) left = 0;
        }
        float oldest[V] = {};
        if (walk.marks.is_held(i)) {
          if (mine) leave(t + i, oldest);
        } else if (mine || left-- > 0) {
          const int time = walk.times[0];
          step(i, t + i, mine, oldest);
          leave(time, oldest);
        }
      }
    }
    if (left == 0) return;
#pragma unroll
    for (int j = 0; j < K - 1; ++j)  // the end of time
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (g.dlast) behind[j][v] += g.dlast[walk.in_window(j - (K - 1)) + v];
    leave_all();
  }
};

template <class Elem, int K, int V, bool silu, bool marked>
__device__ void backward(const Args<Elem>& g, char* shared) {
  Gradients<Elem, K, V, silu, marked> of(g, shared);
  if (of.walk.there) of.run();
  const int tiles = of.walk.tiles(g), lane = of.walk.lane;
  __pipeline_wait_prior(0);
  float* sums = reinterpret_cast<float*>(shared);  // of each warp, where the inputs were
#pragma unroll
  for (int j = 0; j <= K; ++j) {  // the warps of a block add up, in order
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.x * V + v] = of.dw[j][v];
    __syncthreads();
    if (threadIdx.x >= kLanes) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float sum = 0.f;
      for (int i = 0; i < kWarps; ++i) sum += sums[(i * kLanes + lane) * V + v];
      g.shares[(std::ptrdiff_t(blockIdx.x / tiles) * (K + 1) + j) * g.C + of.walk.c + v] = sum;
    }
  }
}

}  // namespace elman::conv

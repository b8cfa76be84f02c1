// The backward of causal_conv.cuh. It also walks forward: step t adds to the gradients of the K inputs that it read, and
// completes the oldest of them. The gradient of the weights stays in registers until the warps of a block add up theirs.
#pragma once

#include <cuda_pipeline.h>

#include "causal_conv.cuh"

namespace elman::conv {

constexpr int kRound = 4;  // steps whose inputs are requested together

// Prefetched inputs, x and dy. Each lane copies its own through shared memory, which takes no registers and no barrier.
template <class Elem, int V>
class Ahead {
 public:
  static constexpr int rounds = 4, of_lane = V * sizeof(Elem), of_step = kThreads * of_lane;
  static constexpr int bytes = rounds * kRound * 2 * of_step;
  __device__ Ahead(const Args<Elem>& g, int t, int b, int c, char* shared)
      : g_(g), x_(g.x.at(t, b) + c), dy_(g.dy.at(t, b) + c), shared_(shared + threadIdx.x * of_lane) {}
  // Requests the next round, of which `steps` steps exist.
  __device__ void ask(int steps) {
    const auto one = [&](int i) {
      copy(at(filled_, i, 0), x_), x_ += g_.x.t;
      copy(at(filled_, i, 1), dy_), dy_ += g_.dy.t;
    };
    if (steps >= kRound) {
#pragma unroll
      for (int i = 0; i < kRound; ++i) one(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) one(i);
    }
    __pipeline_commit();
    filled_ = (filled_ + 1) % rounds;
  }
  __device__ void wait() {
    __pipeline_wait_prior(rounds - 2);
    read_ = (read_ + 1) % rounds;
  }
  __device__ void get(int i, int array, float* x) const { Packed<Elem, V>::unpack(Packed<Elem, V>::load(at(read_, i, array)), x); }

 private:
  __device__ char* at(int round, int i, int array) const { return shared_ + ((round * kRound + i) * 2 + array) * of_step; }
  static __device__ void copy(char* to, const Elem* from) {
    if constexpr (of_lane >= 4) __pipeline_memcpy_async(to, from, of_lane);
    else *reinterpret_cast<Elem*>(to) = *from;
  }
  const Args<Elem>& g_;
  const Elem *x_, *dy_;  // the next request
  char* shared_;
  int filled_ = 0, read_ = rounds - 1;
};

// Unfinished gradients: of the inputs in the window, and of the weights.
template <class Elem, int K, int V, bool silu, bool marked>
struct Gradients {
  Walk<Elem, K, V, marked> walk;
  Ahead<Elem, V> ahead;
  MarksAhead<Args<Elem>, kLanes> marks_ahead;
  float dw[K + 1][V] = {};  // taps, then bias
  float behind[K - 1][V] = {};

  __device__ Gradients(const Args<Elem>& g, char* shared)
      : walk(g), ahead(g, walk.t0, walk.b, walk.c, shared), marks_ahead(g, walk.b, walk.lane) {}
  __device__ void begin() {  // the chunk has all requested steps, or no step follows it
    for (int i = 0; i < ahead.rounds - 1; ++i) ahead.ask(walk.t1 - walk.t0 - i * kRound);
    if (marked) marks_ahead.load(walk.t0), marks_ahead.load(walk.t0 + kLanes);
  }
  // Whether the whole chunk is padding and no window waits for a gradient.
  __device__ bool padding() const {
    return marked && !(walk.t0 == 0 && walk.g.dwindow) && walk.first(walk.t0, 1, walk.t1) >= walk.t1;
  }
  // The end of the steps that read the chunk's inputs: K - 1 existing steps after it, or fewer if a document starts.
  __device__ int end() const {
    const int T = walk.g.T;
    if (!marked) return min(T, walk.t1 + K - 1);
    int end = walk.t1, from = end;
    Marks behind = walk.look(from, 1);
    for (int t = from, left = K - 1; left > 0 && t < T; ++t) {
      if (t - from == kLanes) t = from = walk.first(t, 1, T), behind = walk.look(t, 1);
      if (t == T) break;
      if (behind.begins(t - from)) return t + 1;
      if (!behind.is_held(t - from)) --left, end = t + 1;
    }
    return end;
  }
  __device__ void round(int t, int end) {  // the inputs of kRound steps from t on have arrived
    ahead.wait();
    ahead.ask(end - t - (ahead.rounds - 1) * kRound);
    if (!marked) return;
    walk.marks.held >>= kRound, walk.marks.starts >>= kRound;
    if ((t - walk.t0) % kLanes == 0) walk.marks = marks_ahead.next(t + 2 * kLanes);
  }

  __device__ void leave(int time, const float* dx) {  // the gradient of an input is complete; a chunk writes only its own inputs'
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
  // Step t, the i-th of a round. mine: it belongs to the chunk. oldest: the gradient that is now complete.
  __device__ void step(int i, int t, bool mine, float* oldest) {
    float x[V], dz[V];
    ahead.get(i, 0, x), ahead.get(i, 1, dz);
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
    int left = K - 1;  // steps after the chunk that its inputs still wait for
    begin();
    if (padding()) {
      for (int t = walk.t0; t < walk.t1; ++t) leave(t, behind[0]);
      return;
    }
    const int end = this->end();
    walk.find_window();
    for (int t = walk.t0; t < end && left > 0; t += kRound) {
      round(t, end);
      if (t + kRound <= walk.t1 && walk.times[0] >= walk.t0 && walk.plain(kRound)) {
        // Without a branch: the chunk's own steps without marks, which complete the chunk's own inputs.
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
  float* sums = reinterpret_cast<float*>(shared);  // each warp's sums, in place of the inputs
#pragma unroll
  for (int j = 0; j <= K; ++j) {  // adds up the warps of a block, in order
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.x * V + v] = of.dw[j][v];
    __syncthreads();
    if (threadIdx.x >= kLanes) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float sum = 0.f;
      for (int i = 0; i < kWarps; ++i) sum += sums[(i * kLanes + lane) * V + v];
      const int c = of.walk.c + v;
      g.shares[std::ptrdiff_t(blockIdx.x / tiles) * (K + 1) * g.C +
               (j < K ? std::ptrdiff_t(c) * K + j : std::ptrdiff_t(g.C) * K + c)] = sum;
    }
  }
}

}  // namespace elman::conv

// A causal depthwise convolution over time on the GPU (what it computes: causal_conv_call.h). Nothing recurs, so time is cut into chunks:
// a warp walks one chunk of one row, 32 V adjacent channels at once, and keeps the last K - 1 inputs in registers. All that it reads
// twice are the K - 1 steps around a chunk. The backward walks forward too: step t adds to the gradients of the K inputs that it has
// read, and the oldest of those is then complete; the weights' gradient stays in registers until the warps of a block add theirs up.
#pragma once

#include <cuda_pipeline.h>
#include <elman/launch.cuh>

#include <type_traits>

#include "marks.cuh"
#include "packed.cuh"

namespace elman::conv {

constexpr int kLanes = 32, kWarps = 4, kThreads = kLanes * kWarps;
constexpr int kRound = 4;  // steps whose inputs are asked for together
constexpr int kNowhere = -(1 << 30);  // time of an input that a start has set to zero

template <class Elem>
struct Args {
  int T, B, C, chunk;  // chunk: steps of a warp
  Rows<const Elem> x, dy;
  Rows<Elem> y, dx;
  const float *weight, *bias, *window, *dlast;  // [C,K], [C] or null, [B,K-1,C] or null, [B,K-1,C] or null
  float *last, *dwindow, *shares;  // [B,K-1,C] or null, [B,K-1,C] or null, [S,K+1,C]
  const unsigned char *mask, *starts;  // [T,B] or null
};

// Inputs of rounds to come, of x and for the backward of dy. Each lane copies its own through shared memory: that takes no registers
// and no barrier.
template <class Elem, int V, int arrays>
class Ahead {
 public:
  static constexpr int rounds = 4, of_lane = V * sizeof(Elem), of_step = kThreads * of_lane;
  static constexpr int bytes = rounds * kRound * arrays * of_step;
  __device__ explicit Ahead(char* shared) : shared_(shared + threadIdx.x * of_lane) {}
  // For the next round, of which `steps` exist.
  __device__ void ask(const Elem* x, std::ptrdiff_t x_step, const Elem* dy, std::ptrdiff_t dy_step, int steps) {
    const auto one = [&](int i) {
      copy(at(filled_, i, 0), x), x += x_step;
      if (arrays > 1) copy(at(filled_, i, arrays - 1), dy), dy += dy_step;
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
  __device__ char* at(int round, int i, int array) const { return shared_ + ((round * kRound + i) * arrays + array) * of_step; }
  static __device__ void copy(char* to, const Elem* from) {
    if constexpr (of_lane >= 4) __pipeline_memcpy_async(to, from, of_lane);
    else *reinterpret_cast<Elem*>(to) = *from;
  }
  char* shared_;
  int filled_ = 0, read_ = rounds - 1;
};

// One warp's chunk of one row, and what a lane holds of it: V channels from c on. Lanes beyond the last channel do what the last one
// inside does.
template <class Elem, int K, int V, int arrays, bool marked>
struct Walk {
  const Args<Elem>& g;
  int lane = threadIdx.x % kLanes, b, c, t0, t1;
  bool there;
  float w[K][V], bias[V] = {};
  float window[K - 1][V] = {};  // the inputs before the next step, oldest first
  int times[K - 1];  // theirs; below 0: of g.window
  Ahead<Elem, V, arrays> ahead;
  const Elem *next_x = nullptr, *next_dy = nullptr;  // what is asked for next
  MarksAhead<Args<Elem>, kLanes> marks_ahead;
  Marks marks;

  __device__ static int tiles(const Args<Elem>& g) { return (g.C + kLanes * V - 1) / (kLanes * V); }
  __device__ Walk(const Args<Elem>& args, char* shared) : g(args), ahead(shared), marks_ahead(args, row(args), lane) {
    b = row(g), t0 = unit(g) / g.B * g.chunk, t1 = min(g.T, t0 + g.chunk);
    c = min((int(blockIdx.x % tiles(g)) * kLanes + lane) * V, g.C - V);
    there = t0 < g.T;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < K; ++j) w[j][v] = g.weight[std::ptrdiff_t(c + v) * K + j];
      if (g.bias) bias[v] = g.bias[c + v];
    }
  }
  __device__ std::ptrdiff_t in_window(int time) const { return (std::ptrdiff_t(b) * (K - 1) + time + K - 1) * g.C + c; }

  __device__ void ask(int steps) {
    ahead.ask(next_x, g.x.t, next_dy, g.dy.t, steps);
    next_x += kRound * g.x.t;
    if (arrays > 1) next_dy += kRound * g.dy.t;
  }
  __device__ void begin(int end) {
    next_x = g.x.at(t0, b) + c;
    if (arrays > 1) next_dy = g.dy.at(t0, b) + c;
    for (int i = 0; i < ahead.rounds - 1; ++i) ask(end - t0 - i * kRound);
    if (marked) marks_ahead.load(t0), marks_ahead.load(t0 + kLanes);
    find_window();
  }
  __device__ void round(int t, int end) {  // the inputs of kRound steps from t on are there
    ahead.wait();
    ask(end - t - (ahead.rounds - 1) * kRound);
    if (!marked) return;
    marks.held >>= kRound, marks.starts >>= kRound;
    if ((t - t0) % kLanes == 0) marks = marks_ahead.next(t + 2 * kLanes);
  }
  __device__ bool plain() const { return !marked || ((marks.held | marks.starts) & ((1u << kRound) - 1)) == 0; }

  __device__ void find_window() {  // the last K - 1 inputs before t0
    int t = t0 - 1;
    bool cut = false;  // by a start: what lies before it is zero
#pragma unroll
    for (int j = K - 2; j >= 0; --j) {
      bool begins = false;
      for (; marked && !cut && t >= 0; --t) {
        begins = g.starts && g.starts[std::ptrdiff_t(t) * g.B + b];
        if (!g.mask || g.mask[std::ptrdiff_t(t) * g.B + b]) break;
        cut = begins;
      }
      times[j] = cut ? kNowhere : t;
      if (cut) continue;
      if (t >= 0) Packed<Elem, V>::unpack(Packed<Elem, V>::load(g.x.at(t, b) + c), window[j]);
      else if (g.window)
#pragma unroll
        for (int v = 0; v < V; ++v) window[j][v] = g.window[in_window(t) + v];
      cut = t >= 0 && begins;
      --t;
    }
  }
  __device__ void forget() {
#pragma unroll
    for (int j = 0; j < K - 1; ++j) {
      times[j] = kNowhere;
#pragma unroll
      for (int v = 0; v < V; ++v) window[j][v] = 0.f;
    }
  }
  __device__ void push(int t, const float* x) {
#pragma unroll
    for (int j = 0; j < K - 1; ++j) {
      times[j] = j < K - 2 ? times[j + 1 < K - 1 ? j + 1 : j] : t;
#pragma unroll
      for (int v = 0; v < V; ++v) window[j][v] = j < K - 2 ? window[j + 1 < K - 1 ? j + 1 : j][v] : x[v];
    }
  }
  __device__ float before_silu(const float* x, int v) const {
    float z = bias[v];
#pragma unroll
    for (int j = 0; j < K; ++j) z += w[j][v] * (j < K - 1 ? window[j < K - 1 ? j : 0][v] : x[v]);
    return z;
  }

 private:
  __device__ static int unit(const Args<Elem>& g) { return blockIdx.x / tiles(g) * kWarps + threadIdx.x / kLanes; }
  __device__ static int row(const Args<Elem>& g) { return unit(g) % g.B; }
};

template <class Elem, int K, int V, bool silu, bool marked>
__device__ void forward(const Args<Elem>& g, char* shared) {
  decode::let_next_begin();
  Walk<Elem, K, V, 1, marked> walk(g, shared);
  if (!walk.there) return;
  decode::wait_for_previous();
  walk.begin(walk.t1);
  // `plain`: steps of the chunk without marks, which is code without a branch.
  const auto steps = [&](int t, auto plain) {
    Elem* to = g.y.at(t, walk.b) + walk.c;
#pragma unroll
    for (int i = 0; i < kRound; ++i, to += g.y.t) {
      if (!plain.value && t + i >= walk.t1) break;
      float x[V], y[V] = {};
      if (!plain.value && walk.marks.begins(i)) walk.forget();
      if (plain.value || !walk.marks.is_held(i)) {
        walk.ahead.get(i, 0, x);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float z = walk.before_silu(x, v);
          y[v] = silu ? z * Storage<Elem>::Math::gate(z).open : z;
        }
        walk.push(t + i, x);
      }
      Packed<Elem, V>::store(to, y);
    }
  };
  for (int t = walk.t0; t < walk.t1; t += kRound) {
    walk.round(t, walk.t1);
    if (t + kRound <= walk.t1 && walk.plain()) steps(t, std::true_type());
    else steps(t, std::false_type());
  }
  if (!g.last || walk.t1 < g.T) return;
  __syncwarp();  // all lanes have read the window, which may be the same memory
#pragma unroll
  for (int j = 0; j < K - 1; ++j) Packed<float, V>::store(g.last + walk.in_window(j - (K - 1)), walk.window[j]);
}

}  // namespace elman::conv

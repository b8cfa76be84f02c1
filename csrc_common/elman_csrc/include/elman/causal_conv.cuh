// A causal depthwise convolution over time on the GPU (equation: causal_conv_call.h). There is no recurrence, so time is cut into chunks. A warp walks one
// chunk of one row, 32 V adjacent channels at once, and keeps the last K - 1 inputs in registers. Only the K - 1 steps around a chunk are read twice. The
// forward requests all inputs of kSteps steps before it computes, and neighbours in the grid are neighbours in memory; it takes little longer than a copy.
#pragma once

#include <elman/launch.cuh>

#include <type_traits>

#include "marks.cuh"
#include "packed.cuh"

namespace elman::conv {

constexpr int kLanes = 32, kWarps = 4, kThreads = kLanes * kWarps;
constexpr int kSteps = 16;  // steps of the forward whose inputs are requested together
constexpr int kNowhere = -(1 << 30);  // time of an input that a start has set to zero

template <class Elem>
struct Args {
  int T, B, C, chunk;  // chunk: steps per warp
  Rows<const Elem> x, dy;
  Rows<Elem> y, dx;
  const float *weight, *bias, *window, *dlast;  // [C,K], [C] or null, [B,K-1,C] or null, [B,K-1,C] or null
  float *last, *dwindow, *shares;  // [B,K-1,C] or null, [B,K-1,C] or null, [S,K+1,C]
  const unsigned char *mask, *starts;  // [T,B] or null
};

// One warp's chunk of one row. A lane holds V channels from c on; lanes beyond the last channel repeat the last lane inside.
template <class Elem, int K, int V, bool marked>
struct Walk {
  const Args<Elem>& g;
  int lane = threadIdx.x % kLanes, b, c, t0, t1;
  bool there;
  float w[K][V], bias[V] = {};
  float window[K - 1][V] = {};  // the inputs before the next step, oldest first
  int times[K - 1];  // their times; below 0: from g.window
  Marks marks;

  __device__ static int tiles(const Args<Elem>& g) { return (g.C + kLanes * V - 1) / (kLanes * V); }
  __device__ explicit Walk(const Args<Elem>& args) : g(args) {
    const int unit = blockIdx.x / tiles(g) * kWarps + threadIdx.x / kLanes, chunks = (g.T + g.chunk - 1) / g.chunk;
    const bool by_row = g.x.t < g.x.b;  // whether the next step is nearer in memory than the next row
    b = by_row ? unit / chunks : unit % g.B, t0 = (by_row ? unit % chunks : unit / g.B) * g.chunk, t1 = min(g.T, t0 + g.chunk);
    c = min((int(blockIdx.x % tiles(g)) * kLanes + lane) * V, g.C - V);
    there = b < g.B && t0 < g.T;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < K; ++j) w[j][v] = g.weight[std::ptrdiff_t(c + v) * K + j];
      if (g.bias) bias[v] = g.bias[c + v];
    }
  }
  __device__ std::ptrdiff_t in_window(int time) const { return (std::ptrdiff_t(b) * (K - 1) + time + K - 1) * g.C + c; }

  __device__ bool plain(int steps) const { return !marked || ((marks.held | marks.starts) & ((1u << steps) - 1)) == 0; }

  // The marks of 32 steps, one per lane: bit i is step t + i, or step t - i if `way` is -1.
  __device__ Marks look(int t, int way) const {
    const int at = t + way * lane;
    const bool inside = at >= 0 && at < g.T;
    const std::ptrdiff_t i = std::ptrdiff_t(at) * g.B + b;
    return {__ballot_sync(~0u, inside && g.mask && !g.mask[i]), __ballot_sync(~0u, inside && g.starts && g.starts[i])};
  }
  // Returns the first step from t on, or back from t, that exists or begins a document; `stop` or beyond if there is none. Padding may be long, so 64
  // steps are read together.
  __device__ int first(int t, int way, int stop) const {
    for (; way * (stop - t) > 0; t += way * 2 * kLanes) {
      const Marks near = look(t, way), far = look(t + way * kLanes, way);
      if (const unsigned found = ~near.held | near.starts) return t + way * (__ffs(found) - 1);
      if (const unsigned found = ~far.held | far.starts) return t + way * (kLanes + __ffs(found) - 1);
    }
    return stop;
  }
  __device__ void find_times() {  // times of the last K - 1 inputs before t0
    int t = t0 - 1, from = t;
    Marks before = look(t, -1);  // 32 steps back from `from`
    bool cut = false;  // a start was met: all inputs before it are zero
#pragma unroll 1
    for (int n = 0; n < K - 1; ++n, --t) {
      bool begins = false;
      for (; !cut && t >= 0; --t) {
        if (from - t == kLanes) t = from = first(t, -1, -1), before = look(t, -1);
        begins = before.begins(from - t);
        if (!before.is_held(from - t)) break;
        cut = begins;
      }
#pragma unroll
      for (int j = K - 2; j > 0; --j) times[j] = times[j - 1];
      times[0] = cut ? kNowhere : t;
      cut = cut || begins;
    }
  }
  __device__ void find_window() {
    if (marked) find_times();
    int t = t0 - 1;
#pragma unroll
    for (int j = K - 2; j >= 0; --j, --t) {
      if (!marked) times[j] = t;
      if (times[j] >= 0) Packed<Elem, V>::unpack(Packed<Elem, V>::load(g.x.at(times[j], b) + c), window[j]);
      else if (g.window && times[j] != kNowhere)
#pragma unroll
        for (int v = 0; v < V; ++v) window[j][v] = g.window[in_window(times[j]) + v];
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
};

template <class Elem, int K, int V, bool silu, bool marked>
__device__ void forward(const Args<Elem>& g) {
  decode::let_next_begin();
  Walk<Elem, K, V, marked> walk(g);
  if (!walk.there) return;
  decode::wait_for_previous();
  MarksAhead<Args<Elem>, kSteps> marks_ahead(g, walk.b, walk.lane);
  if (marked) marks_ahead.load(walk.t0), marks_ahead.load(walk.t0 + kSteps);
  bool found = false;  // the window
  for (int t = walk.t0; t < walk.t1; t += kSteps) {
    typename Packed<Elem, V>::Raw raw[kSteps];
    // plain: these steps of the chunk have no marks, so the code has no branch.
    const auto ask = [&](auto plain) {
      const Elem* from = g.x.at(t, walk.b) + walk.c;
#pragma unroll
      for (int i = 0; i < kSteps; ++i, from += g.x.t)
        if (plain.value || t + i < walk.t1) raw[i] = Packed<Elem, V>::load(from);
    };
    const auto steps = [&](auto plain) {
      Elem* to = g.y.at(t, walk.b) + walk.c;
#pragma unroll
      for (int i = 0; i < kSteps; ++i, to += g.y.t) {
        if (!plain.value && t + i >= walk.t1) break;
        float x[V], y[V] = {};
        if (!plain.value && walk.marks.begins(i)) walk.forget();
        if (plain.value || !walk.marks.is_held(i)) {
          Packed<Elem, V>::unpack(raw[i], x);
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
    const bool whole = t + kSteps <= walk.t1;
    if (whole) ask(std::true_type());
    else ask(std::false_type());
    if (marked) walk.marks = marks_ahead.next(t + 2 * kSteps);
    // In padding the search leads far back, so it waits for a step that needs the window: one that exists, a start, or the last one.
    const bool padding = marked && walk.marks.held == (1u << kSteps) - 1 && !walk.marks.starts && walk.t1 < g.T;
    if (!found && !padding) walk.find_window(), found = true;
    if (whole && walk.plain(kSteps)) steps(std::true_type());
    else steps(std::false_type());
  }
  if (!g.last || walk.t1 < g.T) return;
  __syncwarp();  // all lanes have read the window, which may be the same memory
#pragma unroll
  for (int j = 0; j < K - 1; ++j) Packed<float, V>::store(g.last + walk.in_window(j - (K - 1)), walk.window[j]);
}

}  // namespace elman::conv

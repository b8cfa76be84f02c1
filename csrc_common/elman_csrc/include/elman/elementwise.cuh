// The elementwise skeleton on the GPU: forward, backward and a step of decoding (equations: elementwise_cell.h).
// A warp walks all time steps of its channels, segment by segment (elementwise_ring.cuh). The backward takes segments from the last to the first: it
// recomputes a segment's states from the checkpoint before it, keeps them in registers, and walks back. The steps of a segment
// are straight-line code, so that work without the state runs ahead of it.
#pragma once

#include <elman/launch.cuh>

#include <type_traits>

#include "elementwise_ring.cuh"

namespace elman::elementwise {

template <class Cell>
__device__ __forceinline__ void load_initial(const float* initial, int d, int c, float* h) {
#pragma unroll
  for (int k = 0; k < Cell::states; ++k) h[k] = initial ? initial[std::ptrdiff_t(k) * d + c] : 0.f;
}

// Values that a lane keeps for each of its V channels. A channel's values are adjacent, so the cell sees an array.
template <class Cell, int V>
struct Channels {
  float p[V][kVectors<Cell>] = {}, h[V][Cell::states] = {}, initial[V][Cell::states] = {};
  template <class G>
  __device__ Channels(const G& g, const Place<V>& at, const float* states, bool marked) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int k = 0; k < Cell::vectors; ++k) p[v][k] = g.p[k][at.c + v];
#pragma unroll
      for (int k = 0; k < Cell::states; ++k) h[v][k] = states[at.state(g, k) + v];
      if (marked) load_initial<Cell>(g.initial, g.d, at.c + v, initial[v]);
    }
  }
};

// `marked`: there is a mask or there are starts.
template <class Elem, class Cell, int V, int S, bool marked>
__device__ void forward(const Args<Elem, Cell>& g, char* shared) {
  using Math = typename Storage<Elem>::Math;
  using Inputs = Ring<Elem, V, S, Cell::streams, 0>;
  const Place<V> at(g);
  Inputs ring(shared);
  MarksAhead<Args<Elem, Cell>, S> ahead(g, at.b, at.lane);
  const int segments = (g.T + S - 1) / S;
  const auto ask = [&](int segment) {
    if (segment < segments) {
      const int t0 = segment * S, steps = min(S, g.T - t0);
#pragma unroll
      for (int k = 0; k < Cell::streams; ++k) ring.ask(g.x[k], k, t0, steps, g.d, g.pieces, at);
    }
    ring.asked();
  };
  for (int i = 0; i < Inputs::stages - 1; ++i) ask(i);
  if (marked) ahead.load(0), ahead.load(S);
  Channels<Cell, V> mine(g, at, g.h0, marked);

  const auto store_states = [&](float* to, std::ptrdiff_t leading) {
#pragma unroll
    for (int k = 0; k < Cell::states; ++k) {
      float all[V];
#pragma unroll
      for (int v = 0; v < V; ++v) all[v] = mine.h[v][k];
      Packed<float, V>::store(to + at.state(g, leading + k), all);
    }
  };
  const auto walk = [&](int t0, int steps, Marks marks, auto whole) {
    Elem* y = g.y.at(t0, at.b) + at.c;
#pragma unroll
    for (int s = 0; s < S; ++s, y += g.y.t) {
      if (!whole.value && s >= steps) break;
      if (s % kSteps == 0 && g.checkpoints) store_states(g.checkpoints, std::ptrdiff_t((t0 + s) / kSteps) * Cell::states);
      const bool begins = marked && marks.begins(s), held = marked && marks.is_held(s);
      float x[Cell::streams][V], out[V];
#pragma unroll
      for (int k = 0; k < Cell::streams; ++k) ring.get(k, s, at, x[k]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float* h = mine.h[v];
        float of_channel[Cell::streams];
#pragma unroll
        for (int k = 0; k < Cell::streams; ++k) of_channel[k] = x[k][v];
#pragma unroll
        for (int k = 0; k < Cell::states; ++k) h[k] = begins ? mine.initial[v][k] : h[k];
        const ElementwiseOut<Cell, float> made = Cell::template forward<Math>(h, of_channel, mine.p[v]);
        out[v] = held ? 0.f : made.y;
#pragma unroll
        for (int k = 0; k < Cell::states; ++k) h[k] = held ? h[k] : made.h[k];
      }
      Packed<Elem, V>::store(y, out);
    }
  };
  for (int segment = 0; segment < segments; ++segment) {
    ring.wait();
    ask(segment + Inputs::stages - 1);
    const Marks marks = marked ? ahead.next((segment + 2) * S) : Marks{};
    const int t0 = segment * S, steps = min(S, g.T - t0);
    if (steps == S) walk(t0, steps, marks, std::true_type());
    else walk(t0, steps, marks, std::false_type());
  }
  store_states(g.last, 0);
}

template <class Elem, class Cell, int V, int S, bool marked>
__device__ void backward(const Args<Elem, Cell>& g, char* shared) {
  using Math = typename Storage<Elem>::Math;
  using Inputs = Ring<Elem, V, S, Cell::streams + 1, Cell::states>;
  const Place<V> at(g);
  Inputs ring(shared);
  MarksAhead<Args<Elem, Cell>, S> ahead(g, at.b, at.lane);
  const int segments = (g.T + S - 1) / S;
  const auto ask = [&](int segment) {
    if (segment >= 0) {
      const int t0 = segment * S, steps = min(S, g.T - t0);
#pragma unroll
      for (int k = 0; k < Cell::streams; ++k) ring.ask(g.x[k], k, t0, steps, g.d, g.pieces, at);
      ring.ask(g.gy, Cell::streams, t0, steps, g.d, g.pieces, at);
#pragma unroll
      for (int k = 0; k < Cell::states; ++k)
        ring.ask_carried(g.checkpoints + at.state(g, std::ptrdiff_t(t0 / kSteps) * Cell::states + k), k, at);
    }
    ring.asked();
  };
  for (int i = 0; i < Inputs::stages - 1; ++i) ask(segments - 1 - i);
  if (marked) ahead.load((segments - 1) * S), ahead.load((segments - 2) * S);
  Channels<Cell, V> mine(g, at, g.g_last, marked);  // h: the gradient of the state
  float dp[V][kVectors<Cell>] = {}, dinitial[V][Cell::states] = {};

  const auto walk = [&](int t0, int steps, Marks marks, auto whole) {
    float h[S + 1][V][Cell::states], of_segment[V][kVectors<Cell>] = {};
    const auto held = [&](int s) { return marked && marks.is_held(s); };
    const auto begins = [&](int s) { return marked && marks.begins(s); };
    const auto inputs = [&](int s, int v, float* x, float* prev) {
#pragma unroll
      for (int k = 0; k < Cell::streams; ++k) {
        float all[V];
        ring.get(k, s, at, all);
        x[k] = all[v];
      }
#pragma unroll
      for (int k = 0; k < Cell::states; ++k) prev[k] = begins(s) ? mine.initial[v][k] : h[s][v][k];
    };
#pragma unroll
    for (int k = 0; k < Cell::states; ++k) {
      float all[V];
      ring.get_carried(k, at, all);
#pragma unroll
      for (int v = 0; v < V; ++v) h[0][v][k] = all[v];
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (!whole.value && s >= steps) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float x[Cell::streams], prev[Cell::states];
        inputs(s, v, x, prev);
        const ElementwiseOut<Cell, float> made = Cell::template forward<Math>(prev, x, mine.p[v]);
#pragma unroll
        for (int k = 0; k < Cell::states; ++k) h[s + 1][v][k] = held(s) ? prev[k] : made.h[k];
      }
    }
    Elem* to[Cell::streams];
#pragma unroll
    for (int k = 0; k < Cell::streams; ++k) to[k] = g.dx[k].at(t0 + steps - 1, at.b) + at.c;
#pragma unroll
    for (int s = S - 1; s >= 0; --s) {
      if (!whole.value && s >= steps) continue;
      float dx[Cell::streams][V], gy[V];
      ring.get(Cell::streams, s, at, gy);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float x[Cell::streams], prev[Cell::states], *gh = mine.h[v];
        inputs(s, v, x, prev);
        const ElementwiseGrad<Cell, float> made = Cell::template backward<Math>(gy[v], gh, h[s + 1][v], prev, x, mine.p[v]);
#pragma unroll
        for (int k = 0; k < Cell::vectors; ++k) of_segment[v][k] += held(s) ? 0.f : made.p[k];
#pragma unroll
        for (int k = 0; k < Cell::streams; ++k) dx[k][v] = held(s) ? 0.f : made.x[k];
#pragma unroll
        for (int k = 0; k < Cell::states; ++k) {
          const float before = held(s) ? gh[k] : made.prev[k];
          dinitial[v][k] += begins(s) ? before : 0.f;
          gh[k] = begins(s) ? 0.f : before;
        }
      }
#pragma unroll
      for (int k = 0; k < Cell::streams; ++k, to[k - 1] -= g.dx[k - 1].t) Packed<Elem, V>::store(to[k], dx[k]);
    }
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < Cell::vectors; ++k) dp[v][k] += of_segment[v][k];
  };
  for (int segment = segments - 1; segment >= 0; --segment) {
    ring.wait();
    ask(segment - (Inputs::stages - 1));
    const Marks marks = marked ? ahead.next((segment - 2) * S) : Marks{};
    const int t0 = segment * S, steps = min(S, g.T - t0);
    if (steps == S) walk(t0, steps, marks, std::true_type());
    else walk(t0, steps, marks, std::false_type());
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int k = 0; k < Cell::states; ++k) g.dh0[at.state(g, k) + v] = mine.h[v][k];
#pragma unroll
    for (int k = 0; k < Cell::vectors; ++k) g.dvector[at.state(g, k) + v] = dp[v][k];
#pragma unroll
    for (int k = 0; k < Cell::states; ++k)
      if (g.dinitial) g.dinitial[at.state(g, k) + v] = dinitial[v][k];
  }
}

// One time step; a thread has one channel of one row. `last` may be `h0`.
template <class Elem, class Cell>
__device__ void step(const Args<Elem, Cell>& g) {
  decode::let_next_begin();
  const std::ptrdiff_t plane = std::ptrdiff_t(g.B) * g.d, i = std::ptrdiff_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= plane) return;
  const int b = static_cast<int>(i / g.d), c = static_cast<int>(i % g.d);
  float p[kVectors<Cell>] = {}, h[Cell::states], x[Cell::streams], y = 0.f;
#pragma unroll
  for (int k = 0; k < Cell::vectors; ++k) p[k] = g.p[k][c];
  decode::wait_for_previous();
#pragma unroll
  for (int k = 0; k < Cell::streams; ++k) x[k] = decode::load_fresh(g.x[k].at(0, b) + c);
#pragma unroll
  for (int k = 0; k < Cell::states; ++k) h[k] = decode::load_fresh(g.h0 + k * plane + i);
  if (g.starts && decode::load_fresh(g.starts + b)) load_initial<Cell>(g.initial, g.d, c, h);
  if (!g.mask || decode::load_fresh(g.mask + b)) {
    const ElementwiseOut<Cell, float> made = Cell::template forward<typename Storage<Elem>::Math>(h, x, p);
    y = made.y;
#pragma unroll
    for (int k = 0; k < Cell::states; ++k) h[k] = made.h[k];
  }
  g.y.at(0, b)[c] = decode::narrow<Elem>(y);
#pragma unroll
  for (int k = 0; k < Cell::states; ++k) g.last[k * plane + i] = h[k];
}

}  // namespace elman::elementwise

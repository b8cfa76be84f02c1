// The pointwise half of one time step, for sizes that no persistent launch holds. A step is two launches: the caller's GEMM, then a
// kernel of this file. One thread per channel; [B,d] tensors are contiguous.
#pragma once

#include "dense_args.h"
#include "dense_cell.h"
#include <elman/dense_ptx.cuh>

namespace elman::dense {

template <class Elem>
__device__ float as_float(Elem x) {
  return static_cast<float>(x);
}

// product: W h_{t-1} [B,d]. state: h_{t-1} in, h_t out, float [B,d]. `t` is the step. packed: as in dense_word.cuh.
template <class Cell, class Elem, bool packed>
__global__ void step_forward(const __grid_constant__ DenseArgs<Elem, Cell::extras> g, int d, int t, const float* product,
                             float* state) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
  if (c >= d) return;
  const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(b) * d + c, plane = static_cast<std::ptrdiff_t>(g.B) * d;
  float e[Cell::extras > 0 ? Cell::extras : 1];
  for (int i = 0; i < Cell::extras; ++i) e[i] = as_float(g.extra[i].data[t * g.extra[i].t + b * g.extra[i].b + c]);
  const bool fresh = packed && g.starts[static_cast<std::ptrdiff_t>(t) * g.B + b];
  const float before = fresh ? 0.f : state[row], u = as_float(g.u.data[t * g.u.t + b * g.u.b + c]);
  const float a = (fresh ? 0.f : product[row]) + u;
  const auto out = Cell::template forward<typename Storage<Elem>::Math, float>(a, before, e);
  if constexpr (UsesA<Cell>::value) g.a[t * plane + row] = static_cast<Elem>(a);
  const bool live = !g.mask || g.mask[static_cast<std::ptrdiff_t>(t) * g.B + b];
  const float h = live ? out.h : before;
  state[row] = h;
  g.history[(t + 1) * plane + row] = static_cast<Elem>(h);
  g.y[t * plane + row] = static_cast<Elem>(live ? out.y : 0.f);
}

// product: W^T da_{t+1}. carry: the part of gh that does not pass through W; in for step t+1, out for step t.
template <class Cell, class Elem, bool packed>
__global__ void step_backward(const __grid_constant__ DenseArgs<Elem, Cell::extras> g, int d, int t, const float* product,
                              float* carry) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
  if (c >= d) return;
  const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(b) * d + c, plane = static_cast<std::ptrdiff_t>(g.B) * d;
  float e[Cell::extras > 0 ? Cell::extras : 1];
  for (int i = 0; i < Cell::extras; ++i) e[i] = as_float(g.extra[i].data[t * g.extra[i].t + b * g.extra[i].b + c]);
  const auto begins = [&](int t) { return packed && t < g.T && g.starts[static_cast<std::ptrdiff_t>(t) * g.B + b]; };
  const float gh = begins(t + 1) ? 0.f : product[row] + carry[row], gy = as_float(g.gy.data[t * g.gy.t + b * g.gy.b + c]);
  const float h = as_float(g.history[(t + 1) * plane + row]), h_prev = begins(t) ? 0.f : as_float(g.history[t * plane + row]);
  const float a = UsesA<Cell>::value ? as_float(g.a[t * plane + row]) : 0.f;
  const auto out = dense_cell_backward<Cell, typename Storage<Elem>::Math, float>(gy, gh, h, h_prev, a, e);
  const bool live = !g.mask || g.mask[static_cast<std::ptrdiff_t>(t) * g.B + b];
  g.da[t * plane + row] = static_cast<Elem>(live ? out.da : 0.f);
  for (int i = 0; i < Cell::extras; ++i) g.dextra[i][t * plane + row] = static_cast<Elem>(live ? out.dextra[i] : 0.f);
  carry[row] = live ? (Cell::uses_prev ? out.dprev : 0.f) : gh;
}

}  // namespace elman::dense

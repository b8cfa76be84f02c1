// The dense skeleton on the host: the equations of dense_cell.h, one loop after the other, in float or double.
// It is a test instrument: on any machine it checks a cell header, every transpose and the order of operations of the backward.
// Products are summed in double, so in float all error is the cell's.
#pragma once

#include <cstdint>
#include <vector>

#include "dense_cell.h"

namespace elman {

// A [T,B,d] tensor whose channels are adjacent; strides count elements.
template <class T>
struct View {
  T* data;
  std::int64_t stride_t, stride_b;
  T* row(std::int64_t t, std::int64_t b) const { return data + t * stride_t + b * stride_b; }
};

template <class T, int extras>
struct DenseHost {
  std::int64_t steps, batch, width, block;  // block: width of a block of a block-diagonal W, or the whole width
  View<const T> extra[extras > 0 ? extras : 1];
  const T* w;                 // [d,block], rows are outputs
  T* history;                 // [T+1,B,d]: h_0, then h_1 .. h_T; written by the forward, read by the backward
  T* a;                       // [T,B,d], where the cell uses it
  const unsigned char *mask, *starts;  // [T,B], 0 = hold the state; 1 = the state is 0 before the step; null: neither anywhere

  T* state(std::int64_t t, std::int64_t b) const { return history + (t * batch + b) * width; }
  bool held(std::int64_t t, std::int64_t b) const { return mask != nullptr && mask[t * batch + b] == 0; }
  // The state before a step, as the step sees it.
  std::vector<T> before(std::int64_t t, std::int64_t b) const {
    const bool fresh = starts != nullptr && starts[t * batch + b];
    return fresh ? std::vector<T>(width) : std::vector<T>(state(t, b), state(t, b) + width);
  }
  void gather(std::int64_t t, std::int64_t b, std::int64_t i, T* e) const {
    for (int k = 0; k < extras; ++k) e[k] = extra[k].row(t, b)[i];
  }
};

// h0 [B,d] -> y [T,B,d], last [B,d] and the history. A held row repeats its state and gives y = 0.
template <class Cell, class T>
void dense_forward(const DenseHost<T, Cell::extras>& run, View<const T> u, const T* h0, View<T> y, T* last) {
  const std::int64_t d = run.width;
  for (std::int64_t b = 0; b < run.batch; ++b)
    for (std::int64_t i = 0; i < d; ++i) run.state(0, b)[i] = h0[b * d + i];
  for (std::int64_t t = 0; t < run.steps; ++t)
    for (std::int64_t b = 0; b < run.batch; ++b) {
      const std::vector<T> before = run.before(t, b);
      const T* in = u.row(t, b);
      T *after = run.state(t + 1, b), *out = y.row(t, b);
      for (std::int64_t i = 0; i < d; ++i) {
        if (run.held(t, b)) {
          after[i] = before[i];
          out[i] = T(0);
          if (UsesA<Cell>::value) run.a[(t * run.batch + b) * d + i] = T(0);
          continue;
        }
        double sum = in[i];
        for (std::int64_t k = 0; k < run.block; ++k)
          sum += double(run.w[i * run.block + k]) * before[i / run.block * run.block + k];
        const T a = T(sum);
        if (UsesA<Cell>::value) run.a[(t * run.batch + b) * d + i] = a;
        T e[Cell::extras > 0 ? Cell::extras : 1] = {};
        run.gather(t, b, i, e);
        const DenseOut<T> made = Cell::template forward<Exact>(a, before[i], e);
        after[i] = made.h;
        out[i] = made.y;
      }
    }
  for (std::int64_t b = 0; b < run.batch; ++b)
    for (std::int64_t i = 0; i < d; ++i) last[b * d + i] = run.state(run.steps, b)[i];
}

// gy [T,B,d], g_last [B,d] -> da [T,B,d] (which is du), the gradients of the extras, dh0 [B,d].
// The gradient of W is computed after the loop, by the caller: one product, sum_t da_t^T h_{t-1}.
template <class Cell, class T>
void dense_backward(const DenseHost<T, Cell::extras>& run, View<const T> gy, const T* g_last, View<T> da, const View<T>* dextra,
                    T* dh0) {
  const std::int64_t d = run.width;
  for (std::int64_t i = 0; i < run.batch * d; ++i) dh0[i] = g_last[i];  // dh0 carries gh_t backward
  std::vector<T> through(d);
  for (std::int64_t t = run.steps - 1; t >= 0; --t)
    for (std::int64_t b = 0; b < run.batch; ++b) {
      const std::vector<T> before = run.before(t, b);
      const T *h = run.state(t + 1, b), *g = gy.row(t, b);
      T *gh = dh0 + b * d, *delta = da.row(t, b);
      const bool fresh = run.starts != nullptr && run.starts[t * run.batch + b];
      if (run.held(t, b)) {
        for (std::int64_t i = 0; i < d; ++i) {
          delta[i] = T(0);
          for (int k = 0; k < Cell::extras; ++k) dextra[k].row(t, b)[i] = T(0);
          if (fresh) gh[i] = T(0);
        }
        continue;
      }
      for (std::int64_t i = 0; i < d; ++i) {
        T e[Cell::extras > 0 ? Cell::extras : 1] = {};
        run.gather(t, b, i, e);
        const DenseGrad<T, Cell::extras> made = dense_cell_backward<Cell, Exact>(
            g[i], gh[i], h[i], before[i], UsesA<Cell>::value ? run.a[(t * run.batch + b) * d + i] : T(0), e);
        delta[i] = made.da;
        through[i] = Cell::uses_prev ? made.dprev : T(0);
        for (int k = 0; k < Cell::extras; ++k) dextra[k].row(t, b)[i] = made.dextra[k];
      }
      for (std::int64_t i = 0; i < d; ++i) {
        double sum = through[i];
        const std::int64_t begin = i / run.block * run.block;
        for (std::int64_t k = begin; k < begin + run.block; ++k) sum += double(run.w[k * run.block + i - begin]) * delta[k];
        gh[i] = fresh ? T(0) : T(sum);
      }
    }
}

}  // namespace elman

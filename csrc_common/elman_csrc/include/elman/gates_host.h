// Gated cells on the host: the equations of gates_cell.h, one loop after the other, in float or double. Products are summed in double.
#pragma once

#include "gates_call.h"
#include "gates_cell.h"

namespace elman {

template <class Cell, class T>
struct GatesHost {
  static constexpr int k = Cell::gates, kept = Cell::kept, m = Cell::memory, m1 = kGatesMemory<Cell>;
  using Memory = GatesMemory<T, m1>;
  const GatesCall& call;
  const std::int64_t head, B = call.batch, d = call.columns;

  T* plane(std::uint64_t address, std::int64_t t, std::int64_t b, int n = 1) const {  // the head in row b, step t of [T,B,n width]
    return at<T>(address) + (t * B + b) * n * call.width + head * n * d;
  }
  const T* view(const CallView& x, std::int64_t t, std::int64_t b, int n = 1) const {
    return at<const T>(x.address) + t * x.t + b * x.b + head * n * d;
  }
  Memory memory(std::int64_t t, std::int64_t b, std::int64_t i) const {  // of channel i
    return numbers<T, m1>([&](int j) { return m ? plane(call.memory, t, b, m)[j * d + i] : T(0); });
  }
  Memory states(std::uint64_t of, std::int64_t b, std::int64_t i) const {
    return numbers<T, m1>([&](int j) { return m ? plane(of, 1 + j, b)[i] : T(0); });
  }
  bool begins(std::int64_t t, std::int64_t b) const { return call.starts && at<const unsigned char>(call.starts)[t * B + b]; }
  bool held(std::int64_t t, std::int64_t b) const { return call.mask && at<const unsigned char>(call.mask)[t * B + b] == 0; }

  void forward() const {
    const T *w = weights(), *bias = call.b ? at<const T>(call.b) + head * k * d : nullptr;
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < d; ++i) {
        plane(call.history, 0, b)[i] = plane(call.h0, 0, b)[i];
        for (int j = 0; j < m; ++j) {
          const T s = plane(call.last, 1 + j, b)[i] = plane(call.h0, 1 + j, b)[i];
          if (call.memory) plane(call.memory, 0, b, m)[j * d + i] = s;
        }
      }
    for (std::int64_t t = 0; t < call.steps; ++t)
      for (std::int64_t b = 0; b < B; ++b) {
        for (std::int64_t i = 0; begins(t, b) && i < d; ++i) {
          plane(call.history, t, b)[i] = T(0);
          for (int j = 0; j < m; ++j) plane(call.last, 1 + j, b)[i] = T(0);
        }
        for (std::int64_t n = 0; n < (Cell::staged ? 2 : 1) * d; ++n) {
          const std::int64_t i = n % d;
          const bool inner = Cell::staged && n < d;  // inner of all channels comes first: the last product multiplies it
          const T* before = plane(call.history, t, b);
          T p[k] = {}, u[k], keep[kept > 0 ? kept : 1] = {};
          for (int q = 0; q < k; ++q) {
            const bool last = Cell::staged && q == k - 1;
            const T* of = last ? plane(call.memory, t, b) : before;
            double sum = bias ? bias[q * d + i] : T(0);
            for (std::int64_t j = 0; !(inner && last) && j < d; ++j) sum += double(w[(q * d + i) * d + j]) * of[j];
            p[q] = T(sum), u[q] = view(call.u, t, b, k)[q * d + i];
          }
          if constexpr (Cell::staged)
            if (inner) {
              plane(call.memory, t, b)[i] = Cell::template inner<Exact, T>(p, u, before[i]);
              continue;
            }
          const Memory s = states(call.last, b, i);
          const GatesState<T, m1> made = Cell::template forward<Exact, T>(p, u, before[i], s, keep);
          const bool live = !held(t, b);
          plane(call.history, t + 1, b)[i] = live ? made.h : before[i];
          plane(call.y, t, b)[i] = live ? made.h : T(0);
          for (int j = 0; live && j < m; ++j) plane(call.last, 1 + j, b)[i] = number(made.s, j);
          if (!call.kept) continue;
          for (int n = 0; n < kept; ++n) plane(call.kept, t, b, kept)[n * d + i] = keep[n];
          for (int j = 0; j < m; ++j) plane(call.memory, t + 1, b, m)[j * d + i] = plane(call.last, 1 + j, b)[i];
        }
      }
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < d; ++i) {
        plane(call.last, 0, b)[i] = plane(call.history, call.steps, b)[i];
        if (Cell::staged) plane(call.memory, call.steps, b)[i] = T(0);
      }
  }

  void backward() const {  // dh0 carries the gradients of h_t and s_t back
    const T* w = weights();
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < d; ++i) {
        plane(call.dh0, 0, b)[i] = plane(call.g_last, 0, b)[i];
        for (int j = 0; j < m; ++j) plane(call.dh0, 1 + j, b)[i] = plane(call.g_last, 1 + j, b)[i];
        for (int q = 0; q < k; ++q) plane(call.dbias, 0, b, k)[q * d + i] = T(0);
      }
    for (std::int64_t t = call.steps - 1; t >= 0; --t)
      for (std::int64_t b = 0; b < B; ++b) {
        T *gh = plane(call.dh0, 0, b), *dp = plane(call.dp, t, b, k);
        const bool live = !held(t, b);
        for (std::int64_t i = 0; i < d; ++i) {
          T keep[kept > 0 ? kept : 1] = {};
          for (int n = 0; n < kept; ++n) keep[n] = plane(call.kept, t, b, kept)[n * d + i];
          const Memory gs = states(call.dh0, b, i);
          const auto grad =
              Cell::template backward<Exact, T>(gh[i] + view(call.gy, t, b)[i], gs, keep, plane(call.history, t, b)[i],
                                                begins(t, b) ? Memory{} : memory(t, b, i), memory(t + 1, b, i));
          for (int q = 0; q < k; ++q) {
            dp[q * d + i] = live ? grad.dp[q] : T(0);
            plane(call.dbias, 0, b, k)[q * d + i] += dp[q * d + i];
            if (Cell::splits) plane(call.du, t, b, k)[q * d + i] = live ? grad.du[q] : T(0);
          }
          if (live) gh[i] = grad.dh;
          for (int j = 0; live && j < m; ++j) plane(call.dh0, 1 + j, b)[i] = number(grad.ds, j);
        }
        auto product = [&](std::int64_t j, std::int64_t from, std::int64_t to) {
          double sum = 0;
          for (std::int64_t i = from; i < to; ++i) sum += double(w[i * d + j]) * dp[i];
          return sum;
        };
        if constexpr (Cell::staged)
          for (std::int64_t j = 0; live && j < d; ++j) {
            T keep[kept];
            for (int n = 0; n < kept; ++n) keep[n] = plane(call.kept, t, b, kept)[n * d + j];
            const auto more =
                Cell::template inner_backward<Exact, T>(T(product(j, (k - 1) * d, k * d)), keep, plane(call.history, t, b)[j]);
            for (int q = 0; q < k - 1; ++q) dp[q * d + j] += more.dp[q], plane(call.dbias, 0, b, k)[q * d + j] += more.dp[q];
            gh[j] += more.dh;
          }
        for (std::int64_t j = 0; live && j < d; ++j) gh[j] = T(gh[j] + product(j, 0, (Cell::staged ? k - 1 : k) * d));
        for (std::int64_t i = 0; begins(t, b) && i < d; ++i) {
          gh[i] = T(0);
          for (int j = 0; j < m; ++j) plane(call.dh0, 1 + j, b)[i] = T(0);
        }
      }
  }

 private:
  const T* weights() const { return at<const T>(call.w) + head * k * d * d; }
};

}  // namespace elman

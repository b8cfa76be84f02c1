// The elementwise skeleton on the host: the equations of elementwise_cell.h, one loop after the other, in float or double.
// It is a test instrument: on any machine it checks a cell header and the effect of masks and starts.
#pragma once

#include <cstdint>
#include <vector>

#include "elementwise_call.h"

namespace elman::elementwise {

template <class Cell, class T>
class Host {
 public:
  explicit Host(const ElementwiseCall& call) : c_(call), plane_(call.batch * call.width) {}

  void forward() const {
    each_channel([&](std::int64_t b, std::int64_t i) {
      T h[Cell::states], x[Cell::streams], p[kVectors] = {};
      vectors(i, p);
      for (int k = 0; k < Cell::states; ++k) h[k] = *state(c_.h0, k, b, i);
      for (std::int64_t t = 0; t < c_.steps; ++t) {
        begin(t, b, i, h);
        T y = T(0);
        if (!held(t, b)) {
          streams(t, b, i, x);
          const ElementwiseOut<Cell, T> out = Cell::template forward<Exact>(h, x, p);
          for (int k = 0; k < Cell::states; ++k) h[k] = out.h[k];
          y = out.y;
        }
        *place(c_.y, t, b, i) = y;
      }
      for (int k = 0; k < Cell::states; ++k) *state(c_.last, k, b, i) = h[k];
    });
  }

  void backward() const {
    std::vector<T> before(c_.steps * Cell::states), after(c_.steps * Cell::states);  // each step, of one channel of one row
    each_channel([&](std::int64_t b, std::int64_t i) {
      T h[Cell::states], gh[Cell::states], x[Cell::streams], p[kVectors] = {}, dp[kVectors] = {}, dinitial[Cell::states] = {};
      vectors(i, p);
      for (int k = 0; k < Cell::states; ++k) h[k] = *state(c_.h0, k, b, i), gh[k] = *state(c_.g_last, k, b, i);
      for (std::int64_t t = 0; t < c_.steps; ++t) {
        begin(t, b, i, h);
        for (int k = 0; k < Cell::states; ++k) before[t * Cell::states + k] = h[k];
        if (!held(t, b)) {
          streams(t, b, i, x);
          const ElementwiseOut<Cell, T> out = Cell::template forward<Exact>(h, x, p);
          for (int k = 0; k < Cell::states; ++k) h[k] = out.h[k];
        }
        for (int k = 0; k < Cell::states; ++k) after[t * Cell::states + k] = h[k];
      }
      for (std::int64_t t = c_.steps - 1; t >= 0; --t) {
        ElementwiseGrad<Cell, T> g{};
        if (!held(t, b)) {
          streams(t, b, i, x);
          g = Cell::template backward<Exact>(*place(c_.gy, t, b, i), gh, &after[t * Cell::states], &before[t * Cell::states], x, p);
          for (int k = 0; k < Cell::states; ++k) gh[k] = g.prev[k];
          for (int k = 0; k < Cell::vectors; ++k) dp[k] += g.p[k];
        }
        for (int k = 0; k < Cell::streams; ++k) *place(c_.dstream[k], t, b, i) = g.x[k];
        if (marked(c_.starts, t, b))
          for (int k = 0; k < Cell::states; ++k) dinitial[k] += gh[k], gh[k] = T(0);
      }
      for (int k = 0; k < Cell::states; ++k) *state(c_.dh0, k, b, i) = gh[k];
      for (int k = 0; k < Cell::vectors; ++k) *state(c_.dvector, k, b, i) = dp[k];
      for (int k = 0; c_.dinitial && k < Cell::states; ++k) *state(c_.dinitial, k, b, i) = dinitial[k];
    });
  }

 private:
  static constexpr int kVectors = Cell::vectors > 0 ? Cell::vectors : 1;

  template <class Act>
  void each_channel(const Act& act) const {
    for (std::int64_t b = 0; b < c_.batch; ++b)
      for (std::int64_t i = 0; i < c_.width; ++i) act(b, i);
  }
  T* place(const CallView& v, std::int64_t t, std::int64_t b, std::int64_t i) const {
    return at<T>(v.address) + t * v.t + b * v.b + i;
  }
  T* state(std::uint64_t address, int k, std::int64_t b, std::int64_t i) const {
    return at<T>(address) + k * plane_ + b * c_.width + i;
  }
  bool marked(std::uint64_t marks, std::int64_t t, std::int64_t b) const {
    return marks && at<const unsigned char>(marks)[t * c_.batch + b] != 0;
  }
  bool held(std::int64_t t, std::int64_t b) const { return c_.mask && !marked(c_.mask, t, b); }
  void vectors(std::int64_t i, T* p) const {
    for (int k = 0; k < Cell::vectors; ++k) p[k] = at<const T>(c_.vector[k])[i];
  }
  void streams(std::int64_t t, std::int64_t b, std::int64_t i, T* x) const {
    for (int k = 0; k < Cell::streams; ++k) x[k] = *place(c_.stream[k], t, b, i);
  }
  void begin(std::int64_t t, std::int64_t b, std::int64_t i, T* h) const {
    if (!marked(c_.starts, t, b)) return;
    for (int k = 0; k < Cell::states; ++k) h[k] = c_.initial ? at<const T>(c_.initial)[k * c_.width + i] : T(0);
  }

  const ElementwiseCall& c_;
  std::int64_t plane_;
};

}  // namespace elman::elementwise

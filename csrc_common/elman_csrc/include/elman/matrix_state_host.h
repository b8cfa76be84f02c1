// The matrix-state skeleton on the host: the cells, inputs and maps of the GPU, with the same order of steps and segments, as
// plain loops. Compiled by g++ in double (or float) for tests; not a CPU back end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "matrix_state_cell.h"

namespace elman::matrix::host {

struct Sizes {
  int B, T, H, N, V;
  int64_t tokens() const { return int64_t(B) * T; }
  int segments() const { return (T + kInterval - 1) / kInterval; }
};

// Every array is contiguous: k, q [B,T,H,N], or [B,T,N] if shared; vector [B,T,H,N]; line [B,T,H,V], or [B,T,V]; scalar [B,T,H]; param [H,V]; a_log, dt_bias [H];
// mask, starts [B,T] (0 = hold; 1 = the state is 0 before the step) or null. Gradients of k and q are [B,T,H,N] always.
template <class T>
struct Inputs {
  const T *k, *q, *vector[kMostVectors], *line[kMostLines], *scalar[kMostScalars], *param[kMostParams], *a_log, *dt_bias;
  const unsigned char *mask, *starts;
};

template <class T>
struct Gradients {
  T *k, *q, *vector[kMostVectors], *line[kMostLines], *scalar[kMostScalars], *param[kMostParams], *a_log, *dt_bias;
};

// A state is [B,H,N,V] with element (i, x) of a head at i * state_row + x * state_line.
struct StateLayout {
  int64_t line, row;
};

template <class T>
struct Vectors {  // one step of one head, as the cell sees it
  std::vector<T> k, q, p, g, l, lines, in, par;  // lines: before `fold`, in: after
  T rho_k = 1, rho_q = 1, c[kMostScalars] = {}, raw[kMostScalars] = {};
  bool hold = false, fresh = false;
};

template <class Cell, class Options, class T>
struct Driver {
  static_assert(within_limits<Cell>());
  static constexpr bool reads = Cell::read_vector >= 0, keeps = Cell::keep_vector >= 0, seconds = Cell::second_vector >= 0;
  static constexpr ScalarKind kind[kMostScalars] = {Options::kind0, Options::kind1, Options::kind2};
  Sizes n;
  Inputs<T> x;
  StateLayout at;
  const int64_t size = int64_t(n.N) * n.V;
  mutable const char* wrong = nullptr;  // a promise of the header that its functions break and a GPU relies on

  Vectors<T> vectors(int b, int t, int h) const {
    Vectors<T> s;
    const int64_t head = (int64_t(b) * n.T + t) * n.H + h;
    auto map = [&](const T* p, int w, T& rho) {
      std::vector<T> f(p, p + n.N);
      T sum = 0;
      for (T& e : f) {
        if (of_key(Options::silu, w)) e = silu(e, Exact::sigmoid(e));
        sum += e * e;
      }
      if (of_key(Options::l2, w)) {
        rho = T(1) / std::sqrt(sum + T(kNormEps));
        for (T& e : f) e *= rho;
      }
      return f;
    };
    s.k = map(key(x.k, kOfK, b, t, h), 0, s.rho_k), s.q = map(key(x.q, kOfQ, b, t, h), 1, s.rho_q);
    const auto further = [&](int i) { return x.vector[i] + head * n.N; };
    s.p = s.k, s.g.assign(n.N, T(1)), s.l.assign(n.N, T(0));
    if constexpr (reads)
      for (int i = 0; i < n.N; i++) s.p[i] = further(Cell::read_vector)[i] * (Cell::reads_with_k ? s.k[i] : T(1));
    if constexpr (keeps) std::copy_n(further(Cell::keep_vector), n.N, s.g.begin());
    if constexpr (seconds) std::copy_n(further(Cell::second_vector), n.N, s.l.begin());
    s.lines.resize(size_t(n.V) * Cell::lines), s.par.resize(size_t(n.V) * Cell::params);
    for (int v = 0; v < n.V; v++) {
      for (int l = 0; l < Cell::lines; l++) {
        T e = x.line[l][(of_line(Options::shared, l) ? head / n.H : head) * n.V + v];
        s.lines[v * Cell::lines + l] = of_line(Options::silu, l) ? silu(e, Exact::sigmoid(e)) : e;
      }
      for (int i = 0; i < Cell::params; i++) s.par[v * Cell::params + i] = x.param[i][int64_t(h) * n.V + v];
    }
    s.in = s.lines;
    if constexpr (Cell::folded > 0) {
      s.in.clear();
      for (int v = 0; v < n.V; v++) {
        T y[Cell::folded];
        Cell::template fold<Exact>(y, &s.lines[v * Cell::lines], s.par.data() + v * Cell::params);
        s.in.insert(s.in.end(), y, y + Cell::folded);
      }
    }
    for (int i = 0; i < Cell::scalars; i++) {
      s.raw[i] = x.scalar[i][head];
      s.c[i] = scalar_forward(kind[i], s.raw[i], i == 0 && x.a_log ? x.a_log[h] : T(0), i == 0 && x.dt_bias ? x.dt_bias[h] : T(0));
    }
    s.hold = x.mask && x.mask[int64_t(b) * n.T + t] == 0, s.fresh = x.starts && x.starts[int64_t(b) * n.T + t];
    return s;
  }

  // Returns row (b, t, h) of k or q.
  const T* key(const T* p, unsigned which, int b, int t, int h) const {
    const int64_t token = int64_t(b) * n.T + t;
    return p + (Options::shared & which ? token : token * n.H + h) * n.N;
  }
  // The cell's inputs for line v.
  MatrixIn<T> given(const std::vector<T>& S, const Vectors<T>& s, int v) const {
    T energy = 0;
    for (int i = 0; i < n.N; i++) energy += S[v * n.N + i] * S[v * n.N + i] / n.N;
    const T r = Cell::retrieves ? retrieve(S, s.p, v) : T(0);
    return {r, &s.in[v * kGivenLines<Cell>], s.c, s.par.data() + v * Cell::params, energy};
  }

  T retrieve(const std::vector<T>& S, const std::vector<T>& k, int v) const {
    T r = 0;
    for (int i = 0; i < n.N; i++) r += k[i] * S[v * n.N + i];
    return r;
  }

  void advance(std::vector<T>& S, const Vectors<T>& s) const {
    if (s.fresh) std::fill(S.begin(), S.end(), T(0));
    if (s.hold) return;
    for (int v = 0; v < n.V; v++) {
      const MatrixIn<T> in = given(S, s, v);
      const MatrixLine<T> w = Cell::template line<Exact>(in);
      if constexpr (Cell::scalar_keep)
        if (w.keep != s.c[0]) wrong = "the header says scalar_keep, and keep is not c[0]";
      if constexpr (Cell::delta)
        if (!affine(in, w.write)) wrong = "the header says delta, and write is not a - b r with b a function of c[1] alone";
      for (int i = 0; i < n.N; i++) {
        T e = w.keep * s.g[i] * S[v * n.N + i] + s.k[i] * w.write + s.l[i] * w.second;
        if constexpr (Cell::elementwise) e = Cell::template element<Exact>(S[v * n.N + i], s.k[i], w);
        S[v * n.N + i] = squashes<Cell>(s.c) ? Exact::tanh(e) : e;
      }
    }
  }

  // Whether write is a - b r, where b is independent of the line and of c[0].
  bool affine(MatrixIn<T> in, T write) const {
    const T r = in.r, c[2] = {in.c[0] / 2, in.c[1]}, zeros[kMostLines] = {};
    auto at = [&](T r) { return in.r = r, Cell::template line<Exact>(in).write; };
    const T a = at(0), b = a - at(1);
    in.in = zeros, in.c = c;
    const T other = at(0) - at(1), room = 64 * std::numeric_limits<T>::epsilon() * (1 + std::abs(r)) * (std::abs(a) + std::abs(b));
    return std::abs(a - b * r - write) <= room && std::abs(b - other) <= room;
  }

  std::vector<T> take(const T* state, int b, int h) const {
    std::vector<T> S(size, T(0));
    if (state)
      for (int v = 0; v < n.V; v++)
        for (int i = 0; i < n.N; i++) S[v * n.N + i] = state[(int64_t(b) * n.H + h) * size + v * at.line + i * at.row];
    return S;
  }
  void give(T* state, const std::vector<T>& S, int b, int h) const {
    if (state)
      for (int v = 0; v < n.V; v++)
        for (int i = 0; i < n.N; i++) state[(int64_t(b) * n.H + h) * size + v * at.line + i * at.row] = S[v * n.N + i];
  }

  void forward(const T* s0, T* s1, T* o, T* saved) const {
    for (int b = 0; b < n.B; b++)
      for (int h = 0; h < n.H; h++) forward_head(b, h, s0, s1, o, saved);
  }
  void forward_head(int b, int h, const T* s0, T* s1, T* o, T* saved) const {
    std::vector<T> S = take(s0, b, h);
    for (int t = 0; t < n.T; t++) {
      if (saved && t % kInterval == 0)
        std::copy(S.begin(), S.end(), saved + ((int64_t(b) * n.H + h) * n.segments() + t / kInterval) * size);
      const Vectors<T> s = vectors(b, t, h);
      advance(S, s);
      for (int v = 0; v < n.V; v++) o[((int64_t(b) * n.T + t) * n.H + h) * n.V + v] = retrieve(S, s.q, v);
    }
    give(s1, S, b, h);
  }

  void backward(const T* saved, const T* dy, const T* ds1, T* ds0, const Gradients<T>& g) const {
    if (g.a_log) std::fill(g.a_log, g.a_log + n.H, T(0)), std::fill(g.dt_bias, g.dt_bias + n.H, T(0));
    for (int i = 0; i < Cell::params; i++) std::fill(g.param[i], g.param[i] + int64_t(n.H) * n.V, T(0));
    for (int b = 0; b < n.B; b++)
      for (int h = 0; h < n.H; h++) backward_head(b, h, saved, dy, ds1, ds0, g);
  }
  void backward_head(int b, int h, const T* saved, const T* dy, const T* ds1, T* ds0, const Gradients<T>& g) const {
    const int N = n.N, V = n.V;
    std::vector<T> dS = take(ds1, b, h), dk(N), dq(N), dp(N), dg(N), dl(N);
    for (int seg = n.segments() - 1; seg >= 0; seg--) {
      const int t0 = seg * kInterval, count = std::min(kInterval, n.T - t0);
      const T* first = saved + ((int64_t(b) * n.H + h) * n.segments() + seg) * size;
      std::vector<std::vector<T>> hist(1, std::vector<T>(first, first + size));
      for (int s = 0; s < count; s++) {
        hist.push_back(hist.back());
        advance(hist.back(), vectors(b, t0 + s, h));
      }
      for (int s = count - 1; s >= 0; s--) {
        const int64_t head = (int64_t(b) * n.T + t0 + s) * n.H + h;
        const Vectors<T> x_ = vectors(b, t0 + s, h);
        const std::vector<T>&S = hist[s + 1], Sp = x_.fresh ? std::vector<T>(size) : hist[s];  // Sp: the state that the step saw
        for (std::vector<T>* d : {&dk, &dq, &dp, &dg, &dl}) std::fill(d->begin(), d->end(), T(0));
        T dc[kMostScalars] = {};
        for (int v = 0; v < V; v++) {
          const T do_ = dy[head * V + v];
          T* d = &dS[v * N];
          for (int i = 0; i < N; i++) dq[i] += S[v * N + i] * do_, d[i] += x_.q[i] * do_;
          if (x_.hold) {
            for (int l = 0; l < Cell::lines; l++) g.line[l][head * V + v] = 0;
            continue;
          }
          MatrixIn<T> in = given(Sp, x_, v);
          const MatrixLine<T> w = Cell::template line<Exact>(in);
          if (!Cell::backward_uses_r) in.r = 0;  // as on a GPU, to expose a cell that uses it
          MatrixLine<T> dw{};
          for (int i = 0; i < N; i++) {
            const T old = Sp[v * N + i], P = squashes<Cell>(x_.c) ? d[i] * (T(1) - S[v * N + i] * S[v * N + i]) : d[i];
            MatrixElement<T> e{w.keep * x_.g[i] * P, P * w.write, {P * x_.g[i] * old, P * x_.k[i], P * x_.l[i]}};
            if constexpr (Cell::elementwise) e = Cell::template element_backward<Exact>(P, old, x_.k[i], w);
            d[i] = e.s, dk[i] += e.k, dg[i] += w.keep * P * old, dl[i] += P * w.second;
            dw = {dw.keep + e.line.keep, dw.write + e.line.write, dw.second + e.line.second};
          }
          const auto a = Cell::template line_backward<Exact>(dw, in);
          if (Cell::scalar_keep && a.c[0] != dw.keep) wrong = "the header says scalar_keep, and g.c[0] is not d.keep";
          T dlines[Cell::lines], dpar[kMostParams];
          if constexpr (Cell::folded > 0) {
            Cell::template fold_backward<Exact>(dlines, dpar, a.in, &x_.lines[v * Cell::lines], x_.par.data() + v * Cell::params);
          } else {
            std::copy_n(a.in, Cell::lines, dlines), std::copy_n(a.par, Cell::params, dpar);
          }
          for (int i = 0; i < N; i++) {
            dp[i] += Sp[v * N + i] * a.r;
            d[i] += x_.p[i] * a.r;
            if constexpr (Cell::energy) d[i] += 2 * Sp[v * N + i] * a.energy / N;
          }
          for (int l = 0; l < Cell::lines; l++) {
            T e = dlines[l];
            if (of_line(Options::silu, l)) {
              const T raw = x.line[l][(of_line(Options::shared, l) ? head / n.H : head) * V + v];
              e *= silu_derivative(raw, Exact::sigmoid(raw));
            }
            g.line[l][head * V + v] = e;
          }
          for (int i = 0; i < Cell::scalars; i++) dc[i] += a.c[i];
          for (int i = 0; i < Cell::params; i++) g.param[i][int64_t(h) * V + v] += dpar[i];
        }
        if (x_.fresh) std::fill(dS.begin(), dS.end(), T(0));
        const bool with_k = reads && Cell::reads_with_k;
        for (int j = 0; j < Cell::vectors; j++)
          for (int i = 0; i < N; i++)
            g.vector[j][head * N + i] = (j == Cell::read_vector ? dp[i] * (with_k ? x_.k[i] : T(1)) : T(0)) +
                                        (j == Cell::keep_vector ? dg[i] : T(0)) + (j == Cell::second_vector ? dl[i] : T(0));
        for (int i = 0; i < N; i++)
          if (!reads || with_k)
            dk[i] += dp[i] * (with_k ? x.vector[Cell::read_vector < 0 ? 0 : Cell::read_vector][head * N + i] : T(1));
        auto unmap = [&](const std::vector<T>& grad, const std::vector<T>& unit, int w, T rho, const T* raw, T* to) {
          T along = 0;
          for (int i = 0; i < N; i++) along += grad[i] * unit[i];
          for (int i = 0; i < N; i++) {
            T e = of_key(Options::l2, w) ? rho * (grad[i] - unit[i] * along) : grad[i];
            to[i] = of_key(Options::silu, w) ? e * silu_derivative(raw[i], Exact::sigmoid(raw[i])) : e;
          }
        };
        unmap(dk, x_.k, 0, x_.rho_k, key(x.k, kOfK, b, t0 + s, h), g.k + head * N);
        unmap(dq, x_.q, 1, x_.rho_q, key(x.q, kOfQ, b, t0 + s, h), g.q + head * N);
        for (int i = 0; i < Cell::scalars; i++) {
          const bool mamba = kind[i] == ScalarKind::mamba;
          const ScalarGrad<T> d =
              scalar_backward(kind[i], dc[i], x_.c[i], x_.raw[i], mamba ? x.a_log[h] : T(0), mamba ? x.dt_bias[h] : T(0));
          g.scalar[i][head] = d.dx;
          if (mamba) g.a_log[h] += d.da_log, g.dt_bias[h] += d.dx;
        }
      }
    }
    give(ds0, dS, b, h);
  }
};

}  // namespace elman::matrix::host

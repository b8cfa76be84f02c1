// The matrix-state skeleton on a CPU: the cells of the GPU. States are saved every `kInterval` steps and recomputed in the
// backward; sums are float. Threads share batch rows and heads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "call.h"
#include "matrix_state_cpu_step.h"

namespace elman::matrix::cpu {

// Layout of a state [B,H,N,V]: element (i, x) of a head is at i * row + x * line.
struct StateLayout {
  std::int64_t line, row;
};

// As in MatrixCall. Time steps are `step` elements apart; elements inside are adjacent.
template <class T>
struct Rows {
  T* at;
  std::int64_t step;
  explicit operator bool() const { return at; }
};

template <class Stored>
struct Arguments {
  std::int64_t B, T, H, threads;
  Rows<Stored> k, q, line[kMostLines], dk, dq, dline[kMostLines];
  Rows<void> vector[kMostVectors], dvector[kMostVectors];  // float if wide, else Stored
  Rows<void> scalar[kMostScalars], dscalar[kMostScalars];  // float if given, else Stored
  const float *param[kMostParams], *a_log, *dt_bias;
  const unsigned char *mask, *starts;
  StateLayout layout;
  const float* s0;
  float *s1, *saved;
  Stored* o;
  const Stored* dy;
  const float* ds1;
  float *ds0, *dparam[kMostParams], *dhead;  // dparam [B,H,V]; dhead [2,B,H]
};
template <class Cell, class Options, class Stored, int N, int V>
struct Skeleton : Steps<Cell, N, V> {
  using Base = Steps<Cell, N, V>;
  using Base::reads, Base::keeps, Base::seconds, Base::L, Base::kTiles, Base::kLines, Base::kParams, Base::kInputs, Base::kZeros;
  using typename Base::Gradients, typename Base::Line, typename Base::Lines, typename Base::Math, typename Base::Step,
      typename Base::Tile;
  static constexpr ScalarKind kind[kMostScalars] = {Options::kind0, Options::kind1, Options::kind2};
  struct Memory {
    Step step[kInterval];
    Gradients gradient[kInterval];
    Lines lines[kInterval];
    Tile state[kTiles], past[kInterval + 1];
    alignas(64) float param[kParams][kLines], dparam[kParams][kLines];
    float da_log, ddt_bias;
  };
  struct Scratch {
    std::unique_ptr<Memory> memory{new Memory};
    Memory* operator->() { return memory.get(); }
  };

  const Arguments<Stored>& a;
  explicit Skeleton(const Arguments<Stored>& a) : a(a) {}

  std::int64_t segments() const { return (a.T + kInterval - 1) / kInterval; }
  // Start of a head's step, in rows of `width` elements per head, or of `width` elements for all heads.
  template <class T>
  static T* find(Rows<T> rows, std::int64_t token, std::int64_t h, int width) {
    return rows.at + token * rows.step + h * width;
  }

  // Calls `use` with vector j of a step and head, or its gradient, in its type in memory.
  template <class Use>
  static void of_vector(Rows<void> rows, int j, std::int64_t token, std::int64_t h, Use use) {
    const std::int64_t at = token * rows.step + h * N;
    if (Options::wide >> j & 1) use(static_cast<float*>(rows.at) + at);
    else use(static_cast<Stored*>(rows.at) + at);
  }

  void forward() const {
    simd::parallel<Scratch>(a.B * a.H, a.threads, [&](std::int64_t i, Scratch& m) { forward(i / a.H, i % a.H, m); });
  }
  void backward() const {
    simd::parallel<Scratch>(a.B * a.H, a.threads, [&](std::int64_t i, Scratch& m) { backward(i / a.H, i % a.H, m); });
  }

 private:
  void forward(std::int64_t b, std::int64_t h, Scratch& m) const {
    copy<false>(m->state, of_head(a.s0, b, h), a.layout);
    params(h, m);
    for (std::int64_t t0 = 0, segment = 0; t0 < a.T; t0 += kInterval, segment++) {
      const int count = static_cast<int>(std::min<std::int64_t>(kInterval, a.T - t0));
      if (a.saved) copy<true>(m->state, saved(b, h, segment), {1, V});
      for (int s = 0; s < count; s++) read(b, t0 + s, h, m, m->step[s]);
      for (int tile = 0; tile < kTiles; tile++) {
        Tile& S = m->state[tile];
        for (int s = 0; s < count; s++) {
          const Step& x = m->step[s];
          Line o{};
          if (x.fresh) S = kZeros;
          if (!x.hold) Base::template advance<true>(x, m->param, tile, S, S, m->lines[0], o);
          Stored* to = a.o + (((b * a.T + t0 + s) * a.H) + h) * V;
          alignas(64) float out[L];
          std::memcpy(out, o, sizeof out);
          for (int v = 0; v < L && tile * L + v < V; v++) simd::store(to[tile * L + v], out[v]);
        }
      }
    }
    copy<true>(m->state, of_head(a.s1, b, h), a.layout);
  }

  void backward(std::int64_t b, std::int64_t h, Scratch& m) const {
    copy<false>(m->state, of_head(a.ds1, b, h), a.layout);
    params(h, m);
    m->da_log = m->ddt_bias = 0;
    std::memset(m->dparam, 0, sizeof m->dparam);
    for (std::int64_t segment = segments() - 1; segment >= 0; segment--) {
      const std::int64_t t0 = segment * kInterval;
      const int count = static_cast<int>(std::min<std::int64_t>(kInterval, a.T - t0));
      for (int s = 0; s < count; s++) read(b, t0 + s, h, m, m->step[s]);
      std::memset(m->gradient, 0, sizeof m->gradient);
      for (int tile = 0; tile < kTiles; tile++) {
        copy<false>(&m->past[0], saved(b, h, segment), {1, V}, tile);
        const Tile *before[kInterval], *after[kInterval], *last = &m->past[0];
        for (int s = 0; s < count; s++) {
          const Step& x = m->step[s];
          Line none{};
          before[s] = x.fresh ? &kZeros : last;
          after[s] = x.hold ? before[s] : &m->past[s + 1];
          if (!x.hold) Base::template advance<false>(x, m->param, tile, *before[s], m->past[s + 1], m->lines[s], none);
          last = after[s];
        }
        for (int s = count - 1; s >= 0; s--) {
          const Step& x = m->step[s];
          alignas(64) float in[L] = {};
          const Stored* from = a.dy + ((b * a.T + t0 + s) * a.H + h) * V;
          for (int v = 0; v < L && tile * L + v < V; v++) in[v] = simd::load(from[tile * L + v]);
          Line dout;
          std::memcpy(dout, in, sizeof in);
          if (x.hold) {
            Base::arrive(x, *after[s], dout, m->state[tile], m->gradient[s]);
          } else {
            Base::retreat(x, m->param, tile, *before[s], *after[s], m->lines[s], dout, m->state[tile], m->gradient[s], m->dparam);
          }
          if (x.fresh) m->state[tile] = kZeros;
        }
      }
      for (int s = 0; s < count; s++) write(b, t0 + s, h, m, m->step[s], m->gradient[s]);
    }
    copy<true>(m->state, of_head(a.ds0, b, h), a.layout);
    for (int j = 0; j < Cell::params; j++) std::copy_n(m->dparam[j], V, a.dparam[j] + (b * a.H + h) * V);
    if (a.dhead) a.dhead[b * a.H + h] = m->da_log, a.dhead[(a.B + b) * a.H + h] = m->ddt_bias;
  }

  // Reads a step as the cell sees it.
  void read(std::int64_t b, std::int64_t t, std::int64_t h, const Scratch& m, Step& x) const {
    const std::int64_t token = b * a.T + t;
    x.rho_k = key(a.k, kOfK, 0, token, h, x.k), x.rho_q = key(a.q, kOfQ, 1, token, h, x.q);
    const auto further = [&](int j, float* to) {
      of_vector(a.vector[j], j, token, h, [&](const auto* from) {
        for (int i = 0; i < N; i++) to[i] = simd::load(from[i]);
      });
    };
    if constexpr (reads) {
      further(Cell::read_vector, x.p);
      for (int i = 0; i < N && Cell::reads_with_k; i++) x.p[i] *= x.k[i];
    }
    if constexpr (keeps) further(Cell::keep_vector, x.g);
    if constexpr (seconds) further(Cell::second_vector, x.l);
    for (int j = 0; j < Cell::lines; j++) {
      const Stored* from = find(a.line[j], token, of_line(Options::shared, j) ? 0 : h, V);
      float* to = kInputs > 0 ? x.input[j] : x.given[j];
      for (int v = 0; v < V; v++) {
        const float e = simd::load(from[v]);
        to[v] = of_line(Options::silu, j) ? silu(e, Math::sigmoid(e)) : e;
      }
      std::fill(to + V, to + kLines, to[V - 1]);
    }
    if constexpr (Cell::folded > 0)
      for (int v = 0; v < kLines; v++) {
        float in[Cell::lines], par[kParams], y[Cell::folded];
        for (int j = 0; j < Cell::lines; j++) in[j] = x.input[j][v];
        for (int j = 0; j < Cell::params; j++) par[j] = m.memory->param[j][v];
        Cell::template fold<Math>(y, in, par);
        for (int j = 0; j < Cell::folded; j++) x.given[j][v] = y[j];
      }
    for (int j = 0; j < Cell::scalars; j++) {
      const std::int64_t at = token * a.scalar[j].step + h;
      x.raw[j] = kind[j] == ScalarKind::given ? static_cast<const float*>(a.scalar[j].at)[at]
                                              : simd::load(static_cast<const Stored*>(a.scalar[j].at)[at]);
      const bool mamba = kind[j] == ScalarKind::mamba;
      x.c[j] = scalar_forward(kind[j], x.raw[j], mamba ? a.a_log[h] : 0.f, mamba ? a.dt_bias[h] : 0.f);
    }
    x.hold = a.mask && !a.mask[token], x.fresh = a.starts && a.starts[token];
  }

  // Writes a step's gradients, through the adjoints of the input maps.
  void write(std::int64_t b, std::int64_t t, std::int64_t h, Scratch& m, const Step& x, Gradients& g) const {
    const std::int64_t token = b * a.T + t;
    const auto put = [&](Rows<Stored> rows, const float* from, int width) {
      Stored* to = find(rows, token, h, width);
      for (int i = 0; i < width; i++) simd::store(to[i], from[i]);
    };
    for (int j = 0; j < Cell::vectors; j++) {
      float d[N];
      for (int i = 0; i < N; i++)
        d[i] = (j == Cell::read_vector ? g.p[i] * (Cell::reads_with_k ? x.k[i] : 1.f) : 0.f) +
               (j == Cell::keep_vector ? g.g[i] : 0.f) + (j == Cell::second_vector ? g.l[i] : 0.f);
      of_vector(a.dvector[j], j, token, h, [&](auto* to) {
        for (int i = 0; i < N; i++) simd::store(to[i], d[i]);
      });
    }
    if constexpr (!reads) {
      for (int i = 0; i < N; i++) g.k[i] += g.p[i];
    } else if constexpr (Cell::reads_with_k) {
      of_vector(a.vector[Cell::read_vector], Cell::read_vector, token, h, [&](const auto* vector) {
        for (int i = 0; i < N; i++) g.k[i] += g.p[i] * simd::load(vector[i]);
      });
    }
    unmap(a.k, kOfK, 0, token, h, x.k, x.rho_k, g.k), unmap(a.q, kOfQ, 1, token, h, x.q, x.rho_q, g.q);
    put(a.dk, g.k, N), put(a.dq, g.q, N);
    alignas(64) float dlines[Cell::lines][kLines];
    if constexpr (Cell::folded > 0) {
      for (int v = 0; v < kLines; v++) {
        float dx[Cell::folded], in[Cell::lines], par[kParams], din[Cell::lines], dpar[kMostParams] = {};
        for (int j = 0; j < Cell::folded; j++) dx[j] = g.given[j][v];
        for (int j = 0; j < Cell::lines; j++) in[j] = x.input[j][v];
        for (int j = 0; j < Cell::params; j++) par[j] = m->param[j][v];
        Cell::template fold_backward<Math>(din, dpar, dx, in, par);
        for (int j = 0; j < Cell::lines; j++) dlines[j][v] = din[j];
        for (int j = 0; j < Cell::params; j++) m->dparam[j][v] += dpar[j];
      }
    } else {
      std::memcpy(dlines, g.given, sizeof dlines);
    }
    for (int j = 0; j < Cell::lines; j++) {
      if (of_line(Options::silu, j)) {
        const Stored* raw = find(a.line[j], token, of_line(Options::shared, j) ? 0 : h, V);
        for (int v = 0; v < V; v++) {
          const float e = simd::load(raw[v]);
          dlines[j][v] *= silu_derivative(e, Math::sigmoid(e));
        }
      }
      put(a.dline[j], dlines[j], V);
    }
    for (int j = 0; j < Cell::scalars; j++) {
      const bool mamba = kind[j] == ScalarKind::mamba;
      const ScalarGrad<float> d =
          scalar_backward(kind[j], g.c[j], x.c[j], x.raw[j], mamba ? a.a_log[h] : 0.f, mamba ? a.dt_bias[h] : 0.f);
      const std::int64_t at = token * a.dscalar[j].step + h;
      if (kind[j] == ScalarKind::given) static_cast<float*>(a.dscalar[j].at)[at] = d.dx;
      else simd::store(static_cast<Stored*>(a.dscalar[j].at)[at], d.dx);
      if (mamba) m->da_log += d.da_log, m->ddt_bias += d.dx;
    }
  }

  // Reads k or q through its maps; returns the factor that scaled it to length 1.
  static float key(Rows<Stored> rows, unsigned which, int w, std::int64_t token, std::int64_t h, float* to) {
    const Stored* from = find(rows, token, Options::shared & which ? 0 : h, N);
    for (int i = 0; i < N; i++) {
      const float e = simd::load(from[i]);
      to[i] = of_key(Options::silu, w) ? silu(e, Math::sigmoid(e)) : e;
    }
    if (!of_key(Options::l2, w)) return 1.f;
    const float rho = 1.f / std::sqrt(dot(to, to) + static_cast<float>(kNormEps));
    for (int i = 0; i < N; i++) to[i] *= rho;
    return rho;
  }
  // Computes the gradient of k or q before its maps.
  static void unmap(Rows<Stored> rows, unsigned which, int w, std::int64_t token, std::int64_t h, const float* unit, float rho,
                    float* g) {
    if (of_key(Options::l2, w)) {
      const float along = dot(g, unit);
      for (int i = 0; i < N; i++) g[i] = rho * (g[i] - unit[i] * along);
    }
    if (!of_key(Options::silu, w)) return;
    const Stored* raw = find(rows, token, Options::shared & which ? 0 : h, N);
    for (int i = 0; i < N; i++) {
      const float e = simd::load(raw[i]);
      g[i] *= silu_derivative(e, Math::sigmoid(e));
    }
  }
  static float dot(const float* x, const float* y) {  // N is a multiple of 4
    float sums[4] = {};
    for (int i = 0; i < N; i += 4)
      for (int j = 0; j < 4; j++) sums[j] += x[i + j] * y[i + j];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  void params(std::int64_t h, Scratch& m) const {
    for (int j = 0; j < Cell::params; j++) {
      std::copy_n(a.param[j] + h * V, V, m->param[j]);
      std::fill(m->param[j] + V, m->param[j] + kLines, m->param[j][V - 1]);
    }
  }

  float* saved(std::int64_t b, std::int64_t h, std::int64_t segment) const {
    return a.saved + ((b * a.H + h) * segments() + segment) * N * V;
  }
  template <class T>
  T* of_head(T* states, std::int64_t b, std::int64_t h) const {
    return states ? states + (b * a.H + h) * N * V : nullptr;
  }
  // Copies tiles to a state in memory, or from it; a null state sets them to 0. first: number of the first tile.
  template <bool out, class T>
  static void copy(Tile* tiles, T* state, StateLayout at, int first = -1) {
    const int from = first < 0 ? 0 : first, to = first < 0 ? kTiles : first + 1;
    if (out && !state) return;
    for (int tile = from; tile < to; tile++) {
      Tile& some = tiles[tile - from];
      if (!out) some = kZeros;
      for (int i = 0; i < N && state; i++) {
        float row[L] = {};
        if (out) std::memcpy(row, some.row[i], sizeof row);
        for (int v = 0; v < L && tile * L + v < V; v++) {
          if constexpr (out) state[i * at.row + (tile * L + v) * at.line] = row[v];
          else row[v] = state[i * at.row + (tile * L + v) * at.line];
        }
        if (!out) std::memcpy(some.row[i], row, sizeof row);
      }
    }
  }
};

}  // namespace elman::matrix::cpu

// One step of a tile of a head's matrix state on a CPU, forward and backward.
//
// A head's state is cut into tiles of a few lines (columns). An element of a tile is one of the N rows of these lines, in vectors,
// so a sum over the rows of a line needs no shuffles, and a tile stays in the L1 cache for all steps of a segment. The cell's
// functions run lane by lane, in loops that the compiler vectorises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "matrix_state_cell.h"
#include "simd.h"

namespace elman::matrix::cpu {

using simd::F;
using simd::kLanes;

template <class Cell, int N, int V>
struct Steps {
  static_assert(within_limits<Cell>());
  using Math = simd::Branchless;
  static constexpr bool reads = Cell::read_vector >= 0, keeps = Cell::keep_vector >= 0, seconds = Cell::second_vector >= 0;
  static constexpr int kVectors = (V + kLanes - 1) / kLanes, kFit = std::clamp(4096 / (N * kLanes), 1, kLanes == 16 ? 4 : 2),
                       U = std::min(kVectors, kFit), L = U * kLanes, kTiles = (V + L - 1) / L, kLines = kTiles * L;
  static constexpr int G = kGivenLines<Cell>, kScalars = std::max(Cell::scalars, 1), kParams = std::max(Cell::params, 1);
  static constexpr int kInputs = Cell::folded > 0 ? Cell::lines : 0;  // kept beside the results of `fold`

  using Line = F[U];
  struct Tile {
    Line row[N];
  };
  // A step of one head as the cell sees it. Lanes beyond V repeat the last line and receive no gradient.
  struct Step {
    float k[N], q[N], p[N], g[N], l[N];
    alignas(64) float given[G][kLines], input[kInputs + 1][kLines];
    float c[kScalars], raw[kScalars], rho_k, rho_q;
    bool hold, fresh;
  };
  struct Lines {  // of one tile and step
    alignas(64) float r[L], energy[L], keep[L], write[L], second[L];
  };
  struct Gradients {
    float k[N], q[N], p[N], g[N], l[N], c[kScalars];
    alignas(64) float given[G][kLines];
  };
  static constexpr Tile kZeros{};

  // Takes a tile one step from `old` to `now`, which may be the same; computes the lines' numbers, and o += S^T q.
  template <bool reads_out>
  static void advance(const Step& x, const float (&param)[kParams][kLines], int tile, const Tile& old, Tile& now, Lines& w,
                      Line& o) {
    Line r{}, energy{};
    const float* p = reads ? x.p : x.k;
    for (int i = 0; i < N && (Cell::retrieves || Cell::energy); i++)
      for (int u = 0; u < U; u++) {
        if (Cell::retrieves) r[u] += p[i] * old.row[i][u];
        if (Cell::energy) energy[u] += old.row[i][u] * old.row[i][u] * (1.f / N);
      }
    std::memcpy(w.r, r, sizeof r), std::memcpy(w.energy, energy, sizeof energy);
    for (int v = 0; v < L; v++) {
      float in[G], par[kParams];
      for (int j = 0; j < G; j++) in[j] = x.given[j][tile * L + v];
      for (int j = 0; j < Cell::params; j++) par[j] = param[j][tile * L + v];
      const MatrixLine<float> made = Cell::template line<Math>(MatrixIn<float>{w.r[v], in, x.c, par, w.energy[v]});
      w.keep[v] = made.keep, w.write[v] = made.write, w.second[v] = made.second;
    }
    Line keep, write, second;
    std::memcpy(keep, w.keep, sizeof keep), std::memcpy(write, w.write, sizeof write), std::memcpy(second, w.second, sizeof second);
    const bool squash = squashes<Cell>(x.c);
    for (int i = 0; i < N; i++)
      for (int u = 0; u < U; u++) {
        F e;
        if constexpr (Cell::elementwise) {
          e = element(old.row[i][u], x.k[i], keep[u], write[u], second[u]);
        } else {
          e = (Cell::scalar_keep ? F{} + x.c[0] : keep[u]) * old.row[i][u];
          if (keeps) e *= x.g[i];
          e += x.k[i] * write[u];
          if (seconds) e += x.l[i] * second[u];
        }
        if (squash) e = Math::tanh(e);
        now.row[i][u] = e;
        if (reads_out) o[u] += x.q[i] * e;
      }
  }

  static F element(F s, float k, F keep, F write, F second) {
    alignas(64) float e[5][kLanes];
    std::memcpy(e[0], &s, sizeof s), std::memcpy(e[1], &keep, sizeof s), std::memcpy(e[2], &write, sizeof s),
        std::memcpy(e[3], &second, sizeof s);
    for (int v = 0; v < kLanes; v++)
      e[4][v] = Cell::template element<Math>(e[0][v], k, MatrixLine<float>{e[1][v], e[2][v], e[3][v]});
    std::memcpy(&s, e[4], sizeof s);
    return s;
  }

  // In a held step only the readout has a gradient.
  static void arrive(const Step& x, const Tile& now, const Line& dout, Tile& D, Gradients& g) {
    for (int i = 0; i < N; i++) {
      F dq{};
      for (int u = 0; u < U; u++) dq += now.row[i][u] * dout[u], D.row[i][u] += x.q[i] * dout[u];
      g.q[i] += simd::sum(dq);
    }
  }

  static void retreat(const Step& x, const float (&param)[kParams][kLines], int tile, const Tile& old, const Tile& now,
                      const Lines& w, const Line& dout, Tile& D, Gradients& g, float (&dparam)[kParams][kLines]) {
    Line keep, write, second, dkeep{}, dwrite{}, dsecond{};
    std::memcpy(keep, w.keep, sizeof keep), std::memcpy(write, w.write, sizeof write), std::memcpy(second, w.second, sizeof second);
    const bool squash = squashes<Cell>(x.c);
    for (int i = 0; i < N; i++) {
      F dq{}, dk{}, dg{}, dl{};
      for (int u = 0; u < U; u++) {
        const F s = now.row[i][u], was = old.row[i][u], d = D.row[i][u] + x.q[i] * dout[u];
        const F P = squash ? d * (1.f - s * s) : d;
        dq += s * dout[u];
        if constexpr (Cell::elementwise) {
          F e[5];
          element_backward(P, was, x.k[i], keep[u], write[u], second[u], e);
          D.row[i][u] = e[0], dk += e[1], dkeep[u] += e[2], dwrite[u] += e[3], dsecond[u] += e[4];
        } else {
          const F kept = (Cell::scalar_keep ? F{} + x.c[0] : keep[u]) * P;
          D.row[i][u] = keeps ? x.g[i] * kept : kept;
          dkeep[u] += (keeps ? x.g[i] * P : P) * was;
          dwrite[u] += x.k[i] * P, dk += P * write[u];
          if (keeps) dg += kept * was;
          if (seconds) dsecond[u] += x.l[i] * P, dl += P * second[u];
        }
      }
      g.q[i] += simd::sum(dq), g.k[i] += simd::sum(dk);
      if (keeps) g.g[i] += simd::sum(dg);
      if (seconds) g.l[i] += simd::sum(dl);
    }
    alignas(64) float d[3][L], dr[L], denergy[L], dc[kScalars][L];
    std::memcpy(d[0], dkeep, sizeof dkeep), std::memcpy(d[1], dwrite, sizeof dwrite), std::memcpy(d[2], dsecond, sizeof dsecond);
    for (int v = 0; v < L; v++) {
      float in[G], par[kParams];
      for (int j = 0; j < G; j++) in[j] = x.given[j][tile * L + v];
      for (int j = 0; j < Cell::params; j++) par[j] = param[j][tile * L + v];
      const float r = Cell::backward_uses_r ? w.r[v] : 0.f;
      const MatrixGrad<Cell, float> made = Cell::template line_backward<Math>(MatrixLine<float>{d[0][v], d[1][v], d[2][v]},
                                                                              MatrixIn<float>{r, in, x.c, par, w.energy[v]});
      dr[v] = made.r, denergy[v] = Cell::energy ? made.energy * (2.f / N) : 0.f;
      for (int j = 0; j < G; j++) g.given[j][tile * L + v] = made.in[j];
      for (int j = 0; j < Cell::scalars; j++) dc[j][v] = made.c[j];
      for (int j = 0; j < Cell::params && Cell::folded == 0; j++) dparam[j][tile * L + v] += made.par[j];
    }
    for (int j = 0; j < Cell::scalars; j++) {
      const float* from = Cell::scalar_keep && j == 0 ? d[0] : dc[j];  // the header promises g.c[0] = d.keep, so it is not read
      F total{}, some;
      for (int v = 0; v < L; v += kLanes) std::memcpy(&some, from + v, sizeof some), total += some;
      g.c[j] += simd::sum(total);
    }
    if constexpr (!Cell::retrieves && !Cell::energy) return;
    Line r, energy;
    std::memcpy(r, dr, sizeof r), std::memcpy(energy, denergy, sizeof energy);
    const float* p = reads ? x.p : x.k;
    for (int i = 0; i < N; i++) {
      F dp{};
      for (int u = 0; u < U; u++) {
        dp += old.row[i][u] * r[u];
        D.row[i][u] += p[i] * r[u];
        if (Cell::energy) D.row[i][u] += old.row[i][u] * energy[u];
      }
      g.p[i] += simd::sum(dp);
    }
  }

  static void element_backward(F P, F s, float k, F keep, F write, F second, F (&to)[5]) {
    alignas(64) float in[5][kLanes], out[5][kLanes];
    const F from[5] = {P, s, keep, write, second};
    std::memcpy(in, from, sizeof in);
    for (int v = 0; v < kLanes; v++) {
      const MatrixElement<float> e =
          Cell::template element_backward<Math>(in[0][v], in[1][v], k, MatrixLine<float>{in[2][v], in[3][v], in[4][v]});
      out[0][v] = e.s, out[1][v] = e.k, out[2][v] = e.line.keep, out[3][v] = e.line.write, out[4][v] = e.line.second;
    }
    std::memcpy(to, out, sizeof out);
  }
};

}  // namespace elman::matrix::cpu

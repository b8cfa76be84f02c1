// Row recurrences on a CPU (interface: rows_call.h): states are saved every `kSegment` steps and recomputed in the backward;
// sums are float. A row of a state is held in vectors of its V columns; threads share batch rows and heads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "rows_call.h"
#include "simd.h"

namespace elman::rows::cpu {

using simd::F;
using simd::kLanes;
constexpr int kSegment = 16;

template <class Stored, int K, int V>
struct Skeleton {
  static constexpr int U = (V + kLanes - 1) / kLanes, L = U * kLanes;  // columns beyond V are 0
  using Line = F[U];
  struct State {
    Line row[K];
  };
  struct Square {
    Line row[L];
  };
  struct Step {
    float k[K], q[K], f;
    Line v;
    bool hold, fresh;
  };
  struct Memory {
    Step step[kSegment];
    State state, past[kSegment + 1], fed[kSegment];  // fed: tanh(S W + k v^T)
    Square w, transposed, dw, part;  // part: a segment's share of dw, which keeps a long sum accurate
  };
  struct Scratch {
    std::unique_ptr<Memory> memory{new Memory};
    Memory* operator->() { return memory.get(); }
  };
  static constexpr State kZeros{};

  const RowsCall& a;

  void forward() const {
    simd::parallel<Scratch>(a.batch * a.heads, a.threads,
                            [&](std::int64_t i, Scratch& m) { forward(i / a.heads, i % a.heads, m); });
  }
  void backward() const {
    simd::parallel<Scratch>(a.batch * a.heads, a.threads,
                            [&](std::int64_t i, Scratch& m) { backward(i / a.heads, i % a.heads, m); });
  }

 private:
  std::int64_t segments() const { return (a.steps + kSegment - 1) / kSegment; }
  std::int64_t token(std::int64_t b, std::int64_t t) const { return b * a.steps + t; }
  std::int64_t place(std::int64_t b, std::int64_t t, std::int64_t h) const { return token(b, t) * a.heads + h; }

  void forward(std::int64_t b, std::int64_t h, Scratch& m) const {
    State& S = m->state;
    read_state(a.S0, b * a.heads + h, S);
    matrices(h, m);
    for (std::int64_t t = 0; t < a.steps; t++) {
      if (a.saved && t % kSegment == 0) write_state(a.saved, (b * a.heads + h) * segments() + t / kSegment, S);
      Step& x = m->step[0];
      read(b, t, h, x);
      if (x.fresh) S = kZeros;
      if (!x.hold) advance(x, m->w, S, S, m->fed[0]);
      Line o{};
      for (int i = 0; i < K; i++)
        for (int u = 0; u < U; u++) o[u] += x.q[i] * S.row[i][u];
      write(a.o, place(b, t, h), o);
    }
    write_state(a.last, b * a.heads + h, S);
  }

  void backward(std::int64_t b, std::int64_t h, Scratch& m) const {
    State& D = m->state;
    read_state(a.ds1, b * a.heads + h, D);
    matrices(h, m);
    m->dw = Square{};
    for (std::int64_t segment = segments() - 1; segment >= 0; segment--) {
      const std::int64_t t0 = segment * kSegment;
      const int count = static_cast<int>(std::min<std::int64_t>(kSegment, a.steps - t0));
      m->part = Square{};
      const State *before[kSegment], *after[kSegment], *last = &m->past[0];
      read_state(a.saved, (b * a.heads + h) * segments() + segment, m->past[0]);
      for (int s = 0; s < count; s++) {
        Step& x = m->step[s];
        read(b, t0 + s, h, x);
        before[s] = x.fresh ? &kZeros : last;
        after[s] = x.hold ? before[s] : &m->past[s + 1];
        if (!x.hold) advance(x, m->w, *before[s], m->past[s + 1], m->fed[s]);
        last = after[s];
      }
      for (int s = count - 1; s >= 0; s--) {
        retreat(m->step[s], place(b, t0 + s, h), *before[s], *after[s], m->fed[s], m->transposed, D, m->part);
        if (m->step[s].fresh) D = kZeros;
      }
      for (int i = 0; i < V; i++)
        for (int u = 0; u < U; u++) m->dw.row[i][u] += m->part.row[i][u];
    }
    write_state(a.ds0, b * a.heads + h, D);
    const std::int64_t shares = std::max(K / kSegment, 1);  // as on a GPU; the first share is the sum
    float* to = at<float>(a.dw) + (b * a.heads + h) * shares * V * V;
    std::fill(to, to + shares * V * V, 0.f);
    for (int i = 0; i < V; i++) copy(to + i * V, m->dw.row[i]);
  }

  // now = f old + (1 - f) tanh(old W + k v^T); now and old may be the same.
  static void advance(const Step& x, const Square& w, const State& old, State& now, State& fed) {
    for (int i = 0; i < K; i++) {
      Line sum;
      for (int u = 0; u < U; u++) sum[u] = x.k[i] * x.v[u];
      float row[L];
      std::memcpy(row, old.row[i], sizeof row);
      for (int j = 0; j < V; j++)
        for (int u = 0; u < U; u++) sum[u] += row[j] * w.row[j][u];
      for (int u = 0; u < U; u++) {
        fed.row[i][u] = simd::Branchless::tanh(sum[u]);
        now.row[i][u] = fed.row[i][u] + x.f * (old.row[i][u] - fed.row[i][u]);
      }
    }
  }

  void retreat(const Step& x, std::int64_t where, const State& old, const State& now, const State& fed, const Square& transposed,
               State& D, Square& dw) const {
    Line dout{}, dv{};
    F df{};
    float dq[K], dk[K] = {};
    read_line(a.dy, where, dout);
    for (int i = 0; i < K; i++) {
      F along{}, key{};
      for (int u = 0; u < U; u++) along += now.row[i][u] * dout[u], D.row[i][u] += x.q[i] * dout[u];
      dq[i] = simd::sum(along);
      if (x.hold) continue;
      Line dsum, d;
      for (int u = 0; u < U; u++) {
        const F s = fed.row[i][u];
        df += D.row[i][u] * (old.row[i][u] - s);
        dsum[u] = (1.f - x.f) * D.row[i][u] * (1.f - s * s);
        d[u] = x.f * D.row[i][u];
        dv[u] += x.k[i] * dsum[u], key += x.v[u] * dsum[u];
      }
      dk[i] = simd::sum(key);
      float row[L], was[L];
      std::memcpy(row, dsum, sizeof row), std::memcpy(was, old.row[i], sizeof was);
      for (int j = 0; j < V; j++)
        for (int u = 0; u < U; u++) d[u] += row[j] * transposed.row[j][u], dw.row[j][u] += was[j] * dsum[u];
      std::memcpy(D.row[i], d, sizeof d);
    }
    for (int i = 0; i < K; i++)
      simd::store(at<Stored>(a.dq)[where * K + i], dq[i]), simd::store(at<Stored>(a.dk)[where * K + i], dk[i]);
    write(a.dv, where, dv);
    at<float>(a.df)[where] = simd::sum(df);
  }

  void read(std::int64_t b, std::int64_t t, std::int64_t h, Step& x) const {
    const std::int64_t here = token(b, t), head = a.shared ? 0 : h;
    for (int i = 0; i < K; i++) {
      x.k[i] = simd::load(at<Stored>(a.k.address)[here * a.k.step + head * K + i]);
      x.q[i] = simd::load(at<Stored>(a.q.address)[here * a.q.step + head * K + i]);
    }
    x.f = at<float>(a.f)[place(b, t, h)];
    load_line(at<Stored>(a.v.address) + here * a.v.step + h * V, x.v);
    x.hold = a.mask && !at<unsigned char>(a.mask)[here];
    x.fresh = a.starts && at<unsigned char>(a.starts)[here];
  }
  void matrices(std::int64_t h, Scratch& m) const {
    m->w = m->transposed = Square{};
    alignas(64) float w[L][L] = {}, back[L][L] = {};
    for (int i = 0; i < V; i++)
      for (int j = 0; j < V; j++) w[i][j] = back[j][i] = simd::load(at<Stored>(a.w)[(h * V + i) * V + j]);
    std::memcpy(&m->w, w, sizeof w), std::memcpy(&m->transposed, back, sizeof back);
  }

  static void load_line(const Stored* from, Line& to) {
    alignas(64) float row[L] = {};
    for (int v = 0; v < V; v++) row[v] = simd::load(from[v]);
    std::memcpy(to, row, sizeof row);
  }
  static void copy(float* to, const Line& from) {
    alignas(64) float row[L];
    std::memcpy(row, from, sizeof row), std::memcpy(to, row, V * sizeof(float));
  }
  static void read_line(std::uint64_t from, std::int64_t where, Line& to) { load_line(at<Stored>(from) + where * V, to); }
  static void write(std::uint64_t to, std::int64_t where, const Line& from) {
    alignas(64) float row[L];
    std::memcpy(row, from, sizeof row);
    for (int v = 0; v < V; v++) simd::store(at<Stored>(to)[where * V + v], row[v]);
  }
  static void read_state(std::uint64_t from, std::int64_t number, State& to) {
    to = kZeros;
    for (int i = 0; i < K && from; i++) std::memcpy(to.row[i], at<float>(from) + (number * K + i) * V, V * sizeof(float));
  }
  static void write_state(std::uint64_t to, std::int64_t number, const State& from) {
    for (int i = 0; i < K && to; i++) copy(at<float>(to) + (number * K + i) * V, from.row[i]);
  }
};

}  // namespace elman::rows::cpu

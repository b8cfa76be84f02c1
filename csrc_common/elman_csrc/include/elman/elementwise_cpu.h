// The elementwise skeleton on a CPU (interface: elementwise_call.h). Each thread runs a block of channels of one batch row
// through all steps; the states before every 16th step are saved, and the backward recomputes the others.
#pragma once

#include <memory>

#include "elementwise_call.h"
#include "product_cpu.h"

namespace elman::elementwise::cpu {

using simd::gather;
using simd::kBlock;
using Math = simd::Branchless;

template <class Cell, class Stored>
struct Skeleton : simd::Marked<ElementwiseCall> {
  static constexpr int S = Cell::states, X = Cell::streams, P = Cell::vectors > 0 ? Cell::vectors : 1;
  using Block = float[kBlock];
  using State = Block[S];
  struct Memory {
    State h, g, before[kSteps], after[kSteps];
    Block x[kSteps][X], p[P], dp[P], part[P], gy, y;  // part: a segment's share, which keeps a long sum accurate
  };
  struct Scratch {
    std::unique_ptr<Memory> memory{new Memory{}};
  };

  void forward() const {
    each([&](std::int64_t b, std::int64_t i, std::int64_t n, Memory& m) { forward(b, i, n, m); });
  }
  void backward() const {
    each([&](std::int64_t b, std::int64_t i, std::int64_t n, Memory& m) { backward(b, i, n, m); });
  }

 private:
  template <class Act>
  void each(const Act& act) const {
    const std::int64_t many = (c.width + kBlock - 1) / kBlock;
    simd::parallel<Scratch>(c.batch * many, c.threads, [&](std::int64_t job, Scratch& scratch) {
      const std::int64_t i = job % many * kBlock, n = std::min<std::int64_t>(kBlock, c.width - i);
      for (int k = 0; k < Cell::vectors; k++) simd::load_block(scratch.memory->p[k], at<float>(c.vector[k]) + i, n);
      act(job / many, i, n, *scratch.memory);
    });
  }
  static Stored* place(const CallView& v, std::int64_t t, std::int64_t b, std::int64_t i) {
    return at<Stored>(v.address) + t * v.t + b * v.b + i;
  }
  float* state(std::uint64_t x, std::int64_t number, std::int64_t b, std::int64_t i) const {
    return at<float>(x) + (number * c.batch + b) * c.width + i;
  }
  void read(State& h, std::uint64_t from, std::int64_t number, std::int64_t b, std::int64_t i, std::int64_t n) const {
    for (int k = 0; k < S; k++) simd::load_block(h[k], state(from, number * S + k, b, i), n);
  }
  void write(std::uint64_t to, const State& h, std::int64_t number, std::int64_t b, std::int64_t i, std::int64_t n) const {
    for (int k = 0; k < S; k++) simd::store_block(state(to, number * S + k, b, i), h[k], n);
  }
  void begin(State& h, std::int64_t i, std::int64_t n) const {
    for (int k = 0; k < S; k++)
      if (c.initial) simd::load_block(h[k], at<float>(c.initial) + k * c.width + i, n);
      else std::fill_n(h[k], kBlock, 0.f);
  }
  void read_streams(Block (&x)[X], std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n) const {
    for (int k = 0; k < X; k++) simd::load_block(x[k], place(c.stream[k], t, b, i), n);
  }

  static void advance(State& h, const Block (&x)[X], const Block (&p)[P], Block& y) {
    for (int i = 0; i < kBlock; i++) {
      float of_h[S], of_x[X], of_p[P];
      gather(of_h, h, i), gather(of_x, x, i), gather(of_p, p, i);
      const ElementwiseOut<Cell, float> out = Cell::template forward<Math>(of_h, of_x, of_p);
      for (int k = 0; k < S; k++) h[k][i] = out.h[k];
      y[i] = out.y;
    }
  }

  void forward(std::int64_t b, std::int64_t i, std::int64_t n, Memory& m) const {
    read(m.h, c.h0, 0, b, i, n);
    for (std::int64_t t = 0; t < c.steps; t++) {
      if (c.checkpoints && t % kSteps == 0) write(c.checkpoints, m.h, t / kSteps, b, i, n);
      if (fresh(t, b)) begin(m.h, i, n);
      if (held(t, b)) {
        std::fill_n(m.y, kBlock, 0.f);
      } else {
        read_streams(m.x[0], t, b, i, n);
        advance(m.h, m.x[0], m.p, m.y);
      }
      simd::store_block(place(c.y, t, b, i), m.y, n);
    }
    write(c.last, m.h, 0, b, i, n);
  }

  void backward(std::int64_t b, std::int64_t i, std::int64_t n, Memory& m) const {
    read(m.g, c.g_last, 0, b, i, n);
    std::memset(m.dp, 0, sizeof m.dp);
    State dinitial = {};
    for (std::int64_t segment = (c.steps - 1) / kSteps; segment >= 0; segment--) {
      const std::int64_t t0 = segment * kSteps;
      const int count = static_cast<int>(std::min<std::int64_t>(kSteps, c.steps - t0));
      read(m.h, c.checkpoints, segment, b, i, n);
      for (int s = 0; s < count; s++) {
        if (fresh(t0 + s, b)) begin(m.h, i, n);
        std::memcpy(m.before[s], m.h, sizeof m.h);
        if (!held(t0 + s, b)) read_streams(m.x[s], t0 + s, b, i, n), advance(m.h, m.x[s], m.p, m.y);
        std::memcpy(m.after[s], m.h, sizeof m.h);
      }
      std::memset(m.part, 0, sizeof m.part);
      for (int s = count - 1; s >= 0; s--) {
        const std::int64_t t = t0 + s;
        if (held(t, b)) std::memset(m.x[s], 0, sizeof m.x[s]);
        else simd::load_block(m.gy, place(c.gy, t, b, i), n), retreat(m, s);
        for (int k = 0; k < X; k++) simd::store_block(place(c.dstream[k], t, b, i), m.x[s][k], n);
        if (!fresh(t, b)) continue;
        for (int k = 0; k < S; k++)
          for (int j = 0; j < kBlock; j++) dinitial[k][j] += m.g[k][j], m.g[k][j] = 0.f;
      }
      for (int k = 0; k < Cell::vectors; k++)
        for (int j = 0; j < kBlock; j++) m.dp[k][j] += m.part[k][j];
    }
    write(c.dh0, m.g, 0, b, i, n);
    for (int k = 0; k < Cell::vectors; k++) simd::store_block(state(c.dvector, k, b, i), m.dp[k], n);
    if (c.dinitial) write(c.dinitial, dinitial, 0, b, i, n);
  }

  // Writes the gradients of the streams in place of the streams.
  static void retreat(Memory& m, int s) {
    for (int i = 0; i < kBlock; i++) {
      float g[S], h[S], before[S], x[X], p[P];
      gather(g, m.g, i), gather(h, m.after[s], i), gather(before, m.before[s], i), gather(x, m.x[s], i), gather(p, m.p, i);
      const ElementwiseGrad<Cell, float> made = Cell::template backward<Math>(m.gy[i], g, h, before, x, p);
      for (int k = 0; k < S; k++) m.g[k][i] = made.prev[k];
      for (int k = 0; k < X; k++) m.x[s][k][i] = made.x[k];
      for (int k = 0; k < Cell::vectors; k++) m.part[k][i] += made.p[k];
    }
  }
};

}  // namespace elman::elementwise::cpu

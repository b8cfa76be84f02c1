// The dense skeleton on a CPU (interface: dense_call.h). Each thread runs some batch rows through all steps.
#pragma once

#include "dense_call.h"
#include "dense_cell.h"
#include "product_cpu.h"

namespace elman::dense::cpu {

using simd::kBlock;
using Math = simd::Branchless;

template <class Cell, class Stored>
struct Skeleton : simd::Marked<DenseCall> {
  static constexpr int E = Cell::extras, kExtras = E > 0 ? E : 1;
  static constexpr bool kUsesA = UsesA<Cell>::value;
  using Block = float[kBlock];

  const std::int64_t B = c.batch, d = c.width, slots = std::max<std::int64_t>(1, c.slots);

  void forward() const {
    const simd::Matrix w(at<Stored>(c.w), d / slots, d / slots, true, slots);
    simd::parts(B, c.threads, [&](std::int64_t b0, std::int64_t rows) { forward(w, b0, rows); });
  }
  void backward() const {
    const simd::Matrix w(at<Stored>(c.w), d / slots, d / slots, false, slots);
    simd::parts(B, c.threads, [&](std::int64_t b0, std::int64_t rows) { backward(w, b0, rows); });
  }

 private:
  Stored* row(std::uint64_t x, std::int64_t t, std::int64_t b) const { return at<Stored>(x) + (t * B + b) * d; }
  static const Stored* row(const CallView& x, std::int64_t t, std::int64_t b) { return at<Stored>(x.address) + t * x.t + b * x.b; }
  void read_extras(Block (&e)[kExtras], std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n) const {
    for (int k = 0; k < E; k++) simd::load_block(e[k], row(c.extra[k], t, b) + i, n);
  }
  static void gather(float (&to)[kExtras], const Block (&e)[kExtras], int i) {
    for (int k = 0; k < kExtras; k++) to[k] = E ? e[k][i] : 0.f;
  }

  void forward(const simd::Matrix& w, std::int64_t b0, std::int64_t rows) const {
    simd::Rows h(rows, d), a(rows, d);
    for (std::int64_t r = 0; r < rows; r++) {
      std::copy_n(at<float>(c.h0) + (b0 + r) * d, d, h[r]);
      for (std::int64_t i = 0; i < d; i++) simd::store(row(c.history, 0, b0 + r)[i], h[r][i]);
    }
    for (std::int64_t t = 0; t < c.steps; t++) {
      for (std::int64_t r = 0; r < rows; r++)
        if (fresh(t, b0 + r)) std::fill_n(h[r], d, 0.f);
      w.multiply(h[0], h.step(), a[0], a.step(), rows);
      for (std::int64_t r = 0; r < rows; r++)
        simd::blocks(d, [&](std::int64_t i, std::int64_t n) { advance(t, b0 + r, i, n, h[r] + i, a[r] + i); });
    }
    for (std::int64_t r = 0; r < rows; r++) std::copy_n(h[r], d, at<float>(c.last) + (b0 + r) * d);
  }

  void advance(std::int64_t t, std::int64_t b, std::int64_t at, std::int64_t n, float* state, const float* product) const {
    Block a, h, u, y{}, e[kExtras];
    simd::load_block(h, state, n);
    if (held(t, b)) {
      std::fill_n(a, kBlock, 0.f);
    } else {
      simd::load_block(a, product, n), simd::load_block(u, row(c.u, t, b) + at, n);
      read_extras(e, t, b, at, n);
      for (int i = 0; i < kBlock; i++) {
        float of[kExtras];
        gather(of, e, i);
        a[i] += u[i];
        const DenseOut<float> made = Cell::template forward<Math>(a[i], h[i], of);
        h[i] = made.h, y[i] = made.y;
      }
      simd::store_block(state, h, n);
    }
    simd::store_block(row(c.history, t + 1, b) + at, h, n), simd::store_block(row(c.y, t, b) + at, y, n);
    if (kUsesA) simd::store_block(row(c.a, t, b) + at, a, n);
  }

  void backward(const simd::Matrix& w, std::int64_t b0, std::int64_t rows) const {
    simd::Rows g(rows, d), da(rows, d), through(rows, d), product(rows, d);
    for (std::int64_t r = 0; r < rows; r++) std::copy_n(at<float>(c.g_last) + (b0 + r) * d, d, g[r]);
    for (std::int64_t t = c.steps - 1; t >= 0; t--) {
      for (std::int64_t r = 0; r < rows; r++)
        simd::blocks(d, [&](std::int64_t i, std::int64_t n) { retreat(t, b0 + r, i, n, g[r] + i, da[r] + i, through[r] + i); });
      w.multiply(da[0], da.step(), product[0], product.step(), rows);
      for (std::int64_t r = 0; r < rows; r++) {
        if (fresh(t, b0 + r)) std::fill_n(g[r], d, 0.f);
        else if (!held(t, b0 + r))
          for (std::int64_t i = 0; i < d; i++) g[r][i] = product[r][i] + through[r][i];
      }
    }
    for (std::int64_t r = 0; r < rows; r++) std::copy_n(g[r], d, at<float>(c.dh0) + (b0 + r) * d);
  }

  void retreat(std::int64_t t, std::int64_t b, std::int64_t at, std::int64_t n, const float* arriving, float* delta,
               float* through) const {
    Block gy, g, h, before{}, a{}, da{}, past, e[kExtras], de[kExtras] = {};
    if (!held(t, b)) {
      simd::load_block(gy, row(c.gy, t, b) + at, n), simd::load_block(g, arriving, n);
      simd::load_block(h, row(c.history, t + 1, b) + at, n);
      if (!fresh(t, b)) simd::load_block(before, row(c.history, t, b) + at, n);
      if (kUsesA) simd::load_block(a, row(c.a, t, b) + at, n);
      read_extras(e, t, b, at, n);
      for (int i = 0; i < kBlock; i++) {
        float of[kExtras];
        gather(of, e, i);
        const DenseGrad<float, E> made = dense_cell_backward<Cell, Math>(gy[i], g[i], h[i], before[i], a[i], of);
        da[i] = made.da, past[i] = Cell::uses_prev ? made.dprev : 0.f;
        for (int k = 0; k < E; k++) de[k][i] = made.dextra[k];
      }
      simd::store_block(through, past, n);
    }
    simd::store_block(delta, da, n), simd::store_block(row(c.da, t, b) + at, da, n);
    for (int k = 0; k < E; k++) simd::store_block(row(c.dextra[k], t, b) + at, de[k], n);
  }
};

}  // namespace elman::dense::cpu

// Gated cells on a CPU (interface: gates_call.h). Each thread runs one head of some batch rows through all steps.
#pragma once

#include <memory>

#include "gates_call.h"
#include "gates_cell.h"
#include "product_cpu.h"

namespace elman::gates::cpu {

using simd::gather;
using simd::kBlock;
using Math = simd::Branchless;

template <class Cell, class Stored>
struct Skeleton : simd::Marked<GatesCall> {
  static constexpr int k = Cell::gates, kKept = Cell::kept > 0 ? Cell::kept : 1, kPart = 64;
  static constexpr int kFirst = Cell::staged ? k - 1 : k;  // products of h
  static constexpr int m = Cell::memory, m1 = kGatesMemory<Cell>;
  using Block = float[kBlock];
  using Memory = GatesMemory<float, m1>;

  const std::int64_t head, B = c.batch, d = c.columns;

  void forward() const {
    run(true, [&](auto&... given) { forward(given...); });
  }
  void backward() const {
    run(false, [&](auto&... given) { backward(given...); });
  }

 private:
  template <class Run>
  void run(bool transposed, const Run& part) const {
    const Stored* w = at<Stored>(c.w) + head * k * d * d;
    const auto matrix = [&](const Stored* from, std::int64_t gates) {
      return transposed ? simd::Matrix(from, d, gates * d, true) : simd::Matrix(from, gates * d, d, false);
    };
    const simd::Matrix first = matrix(w, kFirst), second = matrix(w + kFirst * d * d, Cell::staged ? 1 : 0);
    simd::parts(B, c.threads, [&](std::int64_t b0, std::int64_t rows) { part(first, second, b0, rows); });
  }
  Stored* row(std::uint64_t x, std::int64_t t, std::int64_t b, std::int64_t parts = 1) const {
    return at<Stored>(x) + (t * B + b) * parts * c.width + head * parts * d;
  }
  const Stored* row(const CallView& x, std::int64_t t, std::int64_t b, std::int64_t parts = 1) const {
    return at<Stored>(x.address) + t * x.t + b * x.b + head * parts * d;
  }
  float* state(std::uint64_t x, std::int64_t b, int number) const { return at<float>(x) + (number * B + b) * c.width + head * d; }
  void keep(std::uint64_t x, std::int64_t t, std::int64_t b, const float* from, std::int64_t parts = 1) const {
    for (std::int64_t i = 0; i < parts * d; i++) simd::store(row(x, t, b, parts)[i], from[i]);
  }
  static Memory memory(const Block (&s)[m1], int j) {
    return numbers<float, m1>([&](int q) { return s[q][j]; });
  }

  // p (with the bias) and u of a block.
  void read_parts(Block (&p)[k], Block (&u)[k], std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n,
                  const float* products) const {
    for (int q = 0; q < k; q++) {
      simd::load_block(p[q], products + q * d + i, n), simd::load_block(u[q], row(c.u, t, b, k) + q * d + i, n);
      if (const float* bias = at<float>(c.b)) {
        Block more;
        simd::load_block(more, bias + (head * k + q) * d + i, n);
        for (int j = 0; j < kBlock; j++) p[q][j] += more[j];
      }
    }
  }

  void forward(const simd::Matrix& first, const simd::Matrix& second, std::int64_t b0, std::int64_t rows) const {
    simd::Rows h(rows, d), s(rows, m1 * d), p(rows, k * d);  // s: in a staged cell, the results of inner
    for (std::int64_t r = 0; r < rows; r++) {
      std::copy_n(state(c.h0, b0 + r, 0), d, h[r]);
      for (int j = 0; j < m; j++) std::copy_n(state(c.h0, b0 + r, 1 + j), d, s[r] + j * d);
      if (m && c.memory) keep(c.memory, 0, b0 + r, s[r], m);
    }
    for (std::int64_t t = 0; t < c.steps; t++) {
      for (std::int64_t r = 0; r < rows; r++) {
        if (fresh(t, b0 + r)) std::fill_n(h[r], d, 0.f), std::fill_n(s[r], m1 * d, 0.f);
        keep(c.history, t, b0 + r, h[r]);  // history: as h enters the product; memory: as it leaves the step
      }
      first.multiply(h[0], h.step(), p[0], p.step(), rows);
      if constexpr (Cell::staged) {
        for (std::int64_t r = 0; r < rows; r++)
          simd::blocks(d, [&](std::int64_t i, std::int64_t n) { inner(t, b0 + r, i, n, h[r] + i, p[r], s[r] + i); });
        second.multiply(s[0], s.step(), p[0] + kFirst * d, p.step(), rows);
      }
      for (std::int64_t r = 0; r < rows; r++)
        simd::blocks(d, [&](std::int64_t i, std::int64_t n) { advance(t, b0 + r, i, n, p[r], h[r] + i, s[r] + i); });
    }
    for (std::int64_t r = 0; r < rows; r++) {
      keep(c.history, c.steps, b0 + r, h[r]);
      std::copy_n(h[r], d, state(c.last, b0 + r, 0));
      for (int j = 0; j < m; j++) std::copy_n(s[r] + j * d, d, state(c.last, b0 + r, 1 + j));
      if (Cell::staged) std::fill_n(s[r], d, 0.f), keep(c.memory, c.steps, b0 + r, s[r]);
    }
  }

  void inner(std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n, const float* state, const float* products,
             float* made) const {
    Block p[k], u[k], h, out;
    read_parts(p, u, t, b, i, n, products), simd::load_block(h, state, n);
    for (int j = 0; j < kBlock; j++) {
      float of_p[k], of_u[k];
      gather(of_p, p, j), gather(of_u, u, j);
      out[j] = Cell::template inner<Math, float>(of_p, of_u, h[j]);
    }
    simd::store_block(made, out, n), simd::store_block(row(c.memory, t, b) + i, out, n);
  }

  void advance(std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n, const float* products, float* h_state,
               float* s_state) const {
    Block p[k], u[k], kept[kKept], h, s[m1]{}, y{};
    read_parts(p, u, t, b, i, n, products), simd::load_block(h, h_state, n);
    for (int q = 0; q < m; q++) simd::load_block(s[q], s_state + q * d, n);
    Block new_h, new_s[m1];
    for (int j = 0; j < kBlock; j++) {
      float of_p[k], of_u[k], saved[kKept] = {};
      gather(of_p, p, j), gather(of_u, u, j);
      const GatesState<float, m1> made = Cell::template forward<Math, float>(of_p, of_u, h[j], memory(s, j), saved);
      new_h[j] = made.h;
      for (int q = 0; q < m1; q++) new_s[q][j] = number(made.s, q);
      for (int q = 0; q < kKept; q++) kept[q][j] = saved[q];
    }
    const bool live = !held(t, b);
    if (live) {
      simd::store_block(h_state, new_h, n);
      for (int q = 0; q < m; q++) simd::store_block(s_state + q * d, new_s[q], n);
    }
    simd::store_block(row(c.y, t, b) + i, live ? new_h : y, n);
    if (!c.kept) return;
    for (int q = 0; q < Cell::kept; q++) simd::store_block(row(c.kept, t, b, Cell::kept) + q * d + i, kept[q], n);
    for (int q = 0; q < m; q++) simd::store_block(row(c.memory, t + 1, b, m) + q * d + i, live ? new_s[q] : s[q], n);
  }

  void backward(const simd::Matrix& first, const simd::Matrix& second, std::int64_t b0, std::int64_t rows) const {
    simd::Rows gh(rows, d), gs(rows, m1 * d), dp(rows, k * d), through(rows, d), product(rows, d), bias(rows, k * d),
        part(rows, k * d);
    for (std::int64_t r = 0; r < rows; r++) {
      std::copy_n(state(c.g_last, b0 + r, 0), d, gh[r]);
      for (int j = 0; j < m; j++) std::copy_n(state(c.g_last, b0 + r, 1 + j), d, gs[r] + j * d);
    }
    for (std::int64_t t = c.steps - 1; t >= 0; t--) {
      for (std::int64_t r = 0; r < rows; r++)
        simd::blocks(
            d, [&](std::int64_t i, std::int64_t n) { retreat(t, b0 + r, i, n, gh[r] + i, gs[r] + i, dp[r], through[r] + i); });
      if constexpr (Cell::staged) {
        second.multiply(dp[0] + kFirst * d, dp.step(), product[0], product.step(), rows);
        for (std::int64_t r = 0; r < rows; r++)
          if (!held(t, b0 + r))
            simd::blocks(
                d, [&](std::int64_t i, std::int64_t n) { through_inner(t, b0 + r, i, n, product[r] + i, dp[r], through[r] + i); });
      }
      first.multiply(dp[0], dp.step(), product[0], product.step(), rows);
      for (std::int64_t r = 0; r < rows; r++) {
        Stored* out = row(c.dp, t, b0 + r, k);
        for (std::int64_t i = 0; i < k * d; i++) part[r][i] += dp[r][i], simd::store(out[i], dp[r][i]);
        if (t % kPart == 0)  // summed in parts, which keeps a long sum accurate
          for (std::int64_t i = 0; i < k * d; i++) bias[r][i] += part[r][i], part[r][i] = 0.f;
        if (fresh(t, b0 + r)) std::fill_n(gh[r], d, 0.f), std::fill_n(gs[r], m1 * d, 0.f);
        else if (!held(t, b0 + r))
          for (std::int64_t i = 0; i < d; i++) gh[r][i] = product[r][i] + through[r][i];
      }
    }
    for (std::int64_t r = 0; r < rows; r++) {
      std::copy_n(gh[r], d, state(c.dh0, b0 + r, 0));
      for (int j = 0; j < m; j++) std::copy_n(gs[r] + j * d, d, state(c.dh0, b0 + r, 1 + j));
      std::copy_n(bias[r], k * d, at<float>(c.dbias) + (b0 + r) * k * c.width + head * k * d);
    }
  }

  void read_kept(Block (&kept)[kKept], std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n) const {
    for (int q = 0; q < Cell::kept; q++) simd::load_block(kept[q], row(c.kept, t, b, Cell::kept) + q * d + i, n);
  }

  void retreat(std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n, const float* arriving, float* of_s, float* deltas,
               float* through) const {
    Block gh, gs[m1]{}, gy, kept[kKept], h, s[m1]{}, s_new[m1]{}, dp[k] = {}, du[k] = {}, dh;
    if (!held(t, b)) {
      simd::load_block(gh, arriving, n), simd::load_block(gy, row(c.gy, t, b) + i, n), read_kept(kept, t, b, i, n);
      simd::load_block(h, row(c.history, t, b) + i, n);
      for (int q = 0; q < m; q++) {
        simd::load_block(gs[q], of_s + q * d, n), simd::load_block(s_new[q], row(c.memory, t + 1, b, m) + q * d + i, n);
        if (!fresh(t, b)) simd::load_block(s[q], row(c.memory, t, b, m) + q * d + i, n);
      }
      for (int j = 0; j < kBlock; j++) {
        float saved[kKept];
        gather(saved, kept, j);
        const auto made =
            Cell::template backward<Math, float>(gh[j] + gy[j], memory(gs, j), saved, h[j], memory(s, j), memory(s_new, j));
        for (int q = 0; q < k; q++) dp[q][j] = made.dp[q], du[q][j] = made.du[q];
        dh[j] = made.dh;
        for (int q = 0; q < m1; q++) gs[q][j] = number(made.ds, q);
      }
      simd::store_block(through, dh, n);
      for (int q = 0; q < m; q++) simd::store_block(of_s + q * d, gs[q], n);
    }
    for (int q = 0; q < k; q++) {
      simd::store_block(deltas + q * d + i, dp[q], n);
      if (Cell::splits) simd::store_block(row(c.du, t, b, k) + q * d + i, du[q], n);
    }
  }

  void through_inner(std::int64_t t, std::int64_t b, std::int64_t i, std::int64_t n, const float* product, float* deltas,
                     float* through) const {
    Block gi, kept[kKept], h, dp[k], dh;
    simd::load_block(gi, product, n), read_kept(kept, t, b, i, n), simd::load_block(h, row(c.history, t, b) + i, n);
    simd::load_block(dh, through, n);
    for (int q = 0; q < k; q++) simd::load_block(dp[q], deltas + q * d + i, n);
    for (int j = 0; j < kBlock; j++) {
      float saved[kKept];
      gather(saved, kept, j);
      const auto more = Cell::template inner_backward<Math, float>(gi[j], saved, h[j]);
      for (int q = 0; q < k - 1; q++) dp[q][j] += more.dp[q];
      dh[j] += more.dh;
    }
    for (int q = 0; q < k - 1; q++) simd::store_block(deltas + q * d + i, dp[q], n);
    simd::store_block(through, dh, n);
  }
};

}  // namespace elman::gates::cpu

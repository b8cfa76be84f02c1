// Products of a few rows with a constant matrix, in every step of a recurrence on a CPU. A row's result is bitwise independent
// of the other rows: each element is one sum in the order of the columns of x.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace elman::simd {

constexpr int kVectors = kLanes == 16 ? 4 : 2, kPanel = kVectors * kLanes, kMostRows = 6;  // what the registers hold

// Rows of floats, far enough apart that a product may write a whole panel at any column.
class Rows {
 public:
  Rows(std::int64_t rows, std::int64_t width) : step_(width + kPanel), data_(rows * step_) {}
  float* operator[](std::int64_t r) { return data_.data() + r * step_; }
  std::int64_t step() const { return step_; }

 private:
  std::int64_t step_;
  std::vector<float> data_;
};

// A block-diagonal matrix of `slots` blocks (`in` x `out`), in panels of columns, so that a product reads it in order.
class Matrix {
 public:
  // w holds each block's rows one after another or, if `transposed`, its columns.
  template <class Stored>
  Matrix(const Stored* w, std::int64_t in, std::int64_t out, bool transposed, std::int64_t slots = 1)
      : in_(in), out_(out), slots_(slots), panels_((out + kPanel - 1) / kPanel), data_(slots * panels_ * in * kPanel) {
    float* to = data_.data();
    for (std::int64_t s = 0; s < slots; s++, w += in * out)
      for (std::int64_t j = 0; j < panels_ * kPanel; j += kPanel)
        for (std::int64_t k = 0; k < in; k++, to += kPanel)
          for (std::int64_t i = 0; i < std::min<std::int64_t>(kPanel, out - j); i++)
            to[i] = load(transposed ? w[(j + i) * in + k] : w[k * out + j + i]);
  }

  // y = x M for `rows` rows, each x_step or y_step after the one before. y has room for a panel after each row.
  void multiply(const float* x, std::int64_t x_step, float* y, std::int64_t y_step, std::int64_t rows) const {
    for (std::int64_t s = 0; s < slots_; s++)
      for (std::int64_t p = 0; p < panels_; p++) {
        const float* m = data_.data() + (s * panels_ + p) * in_ * kPanel;
        for (std::int64_t r = 0; r < rows; r += kMostRows)
          some(std::min<std::int64_t>(kMostRows, rows - r), x + r * x_step + s * in_, x_step,
               y + r * y_step + s * out_ + p * kPanel, y_step, m);
      }
  }

 private:
  void some(std::int64_t rows, const float* x, std::int64_t x_step, float* y, std::int64_t y_step, const float* m) const {
    switch (rows) {
      case 1:
        return panel<1>(x, x_step, y, y_step, m);
      case 2:
        return panel<2>(x, x_step, y, y_step, m);
      case 3:
        return panel<3>(x, x_step, y, y_step, m);
      case 4:
        return panel<4>(x, x_step, y, y_step, m);
      case 5:
        return panel<5>(x, x_step, y, y_step, m);
      default:
        return panel<6>(x, x_step, y, y_step, m);
    }
  }
  template <int R>
  void panel(const float* x, std::int64_t x_step, float* y, std::int64_t y_step, const float* m) const {
    F sum[R][kVectors] = {};  // whole vectors go in and out one by one, which keeps the sums in registers
    for (std::int64_t k = 0; k < in_; k++, m += kPanel) {
      F w[kVectors];
      for (int u = 0; u < kVectors; u++) w[u] = whole(m + u * kLanes);
      for (int r = 0; r < R; r++)
        for (int u = 0; u < kVectors; u++) sum[r][u] += x[r * x_step + k] * w[u];
    }
    for (int r = 0; r < R; r++)
      for (int u = 0; u < kVectors; u++) {
        const F made = sum[r][u];
        std::memcpy(y + r * y_step + u * kLanes, &made, sizeof made);
      }
  }
  static F whole(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }

  std::int64_t in_, out_, slots_, panels_;
  std::vector<float> data_;
};

// A cell gets blocks of this many channels, in local arrays, so that the compiler vectorises it. Beyond `count` they are 0.
constexpr int kBlock = 64;
template <class Stored>
void load_block(float (&to)[kBlock], const Stored* from, std::int64_t count) {
  if (count == kBlock)
    for (int i = 0; i < kBlock; i++) to[i] = load(from[i]);
  else
    for (int i = 0; i < kBlock; i++) to[i] = i < count ? load(from[i]) : 0.f;
}
template <class Stored>
void store_block(Stored* to, const float (&from)[kBlock], std::int64_t count) {
  if (count == kBlock)
    for (int i = 0; i < kBlock; i++) store(to[i], from[i]);
  else
    for (int i = 0; i < count; i++) store(to[i], from[i]);
}
// Channel i of several blocks.
template <int N>
void gather(float (&to)[N], const float (&from)[N][kBlock], int i) {
  for (int k = 0; k < N; k++) to[k] = from[k][i];
}
// act(first channel, count) for the blocks of a row.
template <class Act>
void blocks(std::int64_t width, const Act& act) {
  for (std::int64_t i = 0; i < width; i += kBlock) act(i, std::min<std::int64_t>(kBlock, width - i));
}
// act(first row, rows) for parts of a batch, one per thread. With fewer than four rows, a thread would wait for the matrix.
template <class Act>
void parts(std::int64_t batch, std::int64_t threads, const Act& act) {
  struct Nothing {};
  const std::int64_t count = std::max<std::int64_t>(1, std::min((batch + 3) / 4, threads));
  parallel<Nothing>(count, count, [&](std::int64_t i, Nothing&) {
    const std::int64_t first = i * batch / count;
    act(first, (i + 1) * batch / count - first);
  });
}

}  // namespace elman::simd

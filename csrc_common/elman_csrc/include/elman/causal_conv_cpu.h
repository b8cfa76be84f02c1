// The causal convolution on a CPU (interface: causal_conv_call.h). Each thread takes a block of channels of one batch row and
// walks once over time with the last K - 1 inputs and, in the backward, their gradients so far.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "causal_conv_call.h"
#include "simd.h"

namespace elman::conv::cpu {

constexpr int kBlock = 256, kPart = 64;  // channels, steps

template <class Stored, int K>
struct Walk {
  static constexpr int W = K - 1;
  static constexpr std::int64_t kNowhere = -1;
  struct Memory {
    // weight, dweight: a row per tap, then the bias; part: the share of some steps, which keeps a long sum accurate. past:
    // inputs, d: their gradients so far; input `first + j` modulo W is the j-th oldest.
    alignas(64) float weight[K + 1][kBlock], dweight[K + 1][kBlock], part[K + 1][kBlock], past[W][kBlock], d[W][kBlock], dz[kBlock];
    std::int64_t from[W];  // the step of an input; for the one W - 1 - j steps before the first: kNowhere - 1 - j of the window
  };
  struct Scratch {
    std::unique_ptr<Memory> memory{new Memory};
  };

  const CausalConvCall& a;
  const bool back;

  void run(std::int64_t threads) const {
    const std::int64_t blocks = (a.width + kBlock - 1) / kBlock;
    simd::parallel<Scratch>(a.batch * blocks, threads,
                            [&](std::int64_t i, Scratch& m) { walk(i / blocks, i % blocks * kBlock, *m.memory); });
  }

 private:
  Stored* row(const CallView& x, std::int64_t b, std::int64_t t, std::int64_t c) const {
    return at<Stored>(x.address) + t * x.t + b * x.b + c;
  }

  void walk(std::int64_t b, std::int64_t c0, Memory& m) const {
    const int width = static_cast<int>(std::min<std::int64_t>(kBlock, a.width - c0));
    for (int j = 0; j < K; j++)
      for (int c = 0; c < width; c++) m.weight[j][c] = at<float>(a.weight)[(c0 + c) * K + j];
    for (int c = 0; c < width; c++) m.weight[K][c] = a.bias ? at<float>(a.bias)[c0 + c] : 0.f;
    for (int j = 0; j < W; j++) {
      const float* from = a.window ? at<float>(a.window) + (b * W + j) * a.width + c0 : nullptr;
      for (int c = 0; c < width; c++) m.past[j][c] = from ? from[c] : 0.f;
      m.from[j] = kNowhere - 1 - j;
    }
    std::memset(m.d, 0, sizeof m.d), std::memset(m.dweight, 0, sizeof m.dweight), std::memset(m.part, 0, sizeof m.part);
    int first = 0;
    for (std::int64_t t = 0; t < a.steps; t++) {
      const std::int64_t token = t * a.batch + b;
      if (back && t % kPart == 0) add(m);
      if (a.starts && at<unsigned char>(a.starts)[token]) restart(b, c0, width, m);
      Stored* out = back ? row(a.dx, b, t, c0) : row(a.y, b, t, c0);
      if (a.mask && !at<unsigned char>(a.mask)[token]) {
        for (int c = 0; c < width; c++) simd::store(out[c], 0.f);
        continue;
      }
      step(b, t, c0, width, first, m);
      first = (first + 1) % W;
    }
    if (back) {
      for (int j = 0; j < W; j++) {
        const int place = (first + j) % W;
        if (a.dlast && m.from[place] != kNowhere)
          for (int c = 0; c < width; c++) m.d[place][c] += at<float>(a.dlast)[(b * W + j) * a.width + c0 + c];
        flush(b, c0, width, m, place);
      }
      add(m);
      float* share = at<float>(a.shares) + b * (K + 1) * a.width;
      for (int j = 0; j < K; j++)
        for (int c = 0; c < width; c++) share[(c0 + c) * K + j] = m.dweight[j][c];
      std::copy_n(m.dweight[K], width, share + K * a.width + c0);
    } else if (a.last) {
      for (int j = 0; j < W; j++) std::copy_n(m.past[(first + j) % W], width, at<float>(a.last) + (b * W + j) * a.width + c0);
    }
  }

  void step(std::int64_t b, std::int64_t t, std::int64_t c0, int width, int first, Memory& m) const {
    const Stored* x = row(a.x, b, t, c0);
    float* const z = m.dz;
    for (int c = 0; c < width; c++) z[c] = m.weight[K][c] + m.weight[W][c] * simd::load(x[c]);
    for (int j = 0; j < W; j++) {
      const float *past = m.past[(first + j) % W], *weight = m.weight[j];
      for (int c = 0; c < width; c++) z[c] += weight[c] * past[c];
    }
    if (!back) {
      Stored* y = row(a.y, b, t, c0);
      if (a.silu)
        for (int c = 0; c < width; c++) simd::store(y[c], z[c] * simd::Branchless::sigmoid(z[c]));
      else
        for (int c = 0; c < width; c++) simd::store(y[c], z[c]);
    } else {
      const Stored* dy = row(a.dy, b, t, c0);
      for (int c = 0; c < width; c++) {
        const float g = simd::load(dy[c]);
        z[c] = a.silu ? g * silu_derivative(z[c], simd::Branchless::sigmoid(z[c])) : g;
      }
      for (int j = 0; j < W; j++) {
        const int place = (first + j) % W;
        const float *past = m.past[place], *weight = m.weight[j];
        float *d = m.d[place], *part = m.part[j];
        for (int c = 0; c < width; c++) part[c] += past[c] * z[c], d[c] += weight[c] * z[c];
      }
      for (int c = 0; c < width; c++) m.part[W][c] += simd::load(x[c]) * z[c], m.part[K][c] += z[c];
      flush(b, c0, width, m, first);
      for (int c = 0; c < width; c++) m.d[first][c] = m.weight[W][c] * z[c];
      m.from[first] = t;
    }
    for (int c = 0; c < width; c++) m.past[first][c] = simd::load(x[c]);
  }

  static void add(Memory& m) {
    for (int j = 0; j <= K; j++)
      for (int c = 0; c < kBlock; c++) m.dweight[j][c] += m.part[j][c], m.part[j][c] = 0;
  }
  // Starts a document: later steps see no earlier input.
  void restart(std::int64_t b, std::int64_t c0, int width, Memory& m) const {
    for (int j = 0; j < W; j++) {
      if (back) flush(b, c0, width, m, j);
      std::fill_n(m.past[j], width, 0.f);
    }
  }
  // Writes the gradient of an input to dx or dwindow.
  void flush(std::int64_t b, std::int64_t c0, int width, Memory& m, int place) const {
    const std::int64_t from = m.from[place];
    m.from[place] = kNowhere;
    if (from >= 0) {
      Stored* to = row(a.dx, b, from, c0);
      for (int c = 0; c < width; c++) simd::store(to[c], m.d[place][c]);
    } else if (from != kNowhere && a.dwindow) {
      std::copy_n(m.d[place], width, at<float>(a.dwindow) + (b * W + kNowhere - 1 - from) * a.width + c0);
    }
    std::fill_n(m.d[place], width, 0.f);
  }
};

}  // namespace elman::conv::cpu

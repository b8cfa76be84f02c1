// Repeats a recorded program on a CPU: a list of tensor operations at fixed addresses, computed in float whatever the storage.
// A row of a product is bitwise independent of the other rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "simd.h"

namespace elman::program {

using simd::BFloat16;
using simd::F;
using simd::I;
using simd::kLanes;
using Int = std::int64_t;

// In the order of `CODES` in lower.py.
enum class Code : Int {
  copy,
  neg,
  abs,
  exp,
  tanh,
  sigmoid,
  silu,
  relu,
  log_sigmoid,
  softplus,
  log,
  square,
  sqrt,
  rsqrt,
  reciprocal,
  add,
  sub,
  mul,
  div,
  maximum,
  minimum,
  addcmul,
  sum,
  vecdot,
  embedding,
  linear,
  matmul,
  draw
};
enum : Int { kFloat = static_cast<Int>(Dtype::f32), kBFloat16 = static_cast<Int>(Dtype::bf16), kInt8 = 4 };

struct Operand {
  std::uint64_t address;
  Int dtype, step[4];
};
// `at`: the result and the inputs, with a step in elements for each size; each operation says what its sizes and numbers mean.
struct Instruction {
  Code code;
  Int size[4];
  double number[3];
  Operand at[5];
};

constexpr Int kChunk = 256;  // elements of a line that are computed at once
// Products read weights in vectors of at most 32 bytes: with 64, a whole cache line, a Zen 4 prefetches at half the speed.
constexpr int kWords = kLanes < 8 ? kLanes : 8;
typedef float Words __attribute__((vector_size(kWords * 4)));
typedef std::uint32_t Bits __attribute__((vector_size(kWords * 4)));
typedef std::int32_t Signed __attribute__((vector_size(kWords * 4)));
constexpr int kParts = 4, kPart = kParts * kWords;  // sums of a product, and the elements that they take at once
constexpr int kTile = 4;  // rows of a weight and of its input that are multiplied at once
constexpr Int kShared = 1 << 15;  // elements, or weights of a product, above which threads share an operation

struct Exp {
  template <class T>
  static T of(T x) {
    const T half = simd::Branchless::exp(0.5f * x);  // so that overflow gives infinity
    return half * half;
  }
};

class Machine {
 public:
  explicit Machine(int threads) : queues_(std::max(threads, 1)) {}
  ~Machine() {
    queues_[0].next.store(kEnd, std::memory_order_release);
    for (auto& each : helpers_) each.join();
  }

  void run(const Instruction* code, Int count) {
    code_ = code;
    for (Int i = 0; i < count; i++) {
      const Instruction& a = code[i];
      if (a.code == Code::linear) widen(a);
      const Int all = pieces(a), many = static_cast<Int>(queues_.size());
      if (many < 2 || all < 2) {
        for (Int piece = 0; piece < all; piece++) work(a, piece, 0);
        continue;
      }
      done_.store(0, std::memory_order_relaxed);
      for (Int q = 0; q < many; q++) queues_[q].next.store(i * kOne + q * all / many, std::memory_order_release);
      start();
      while (take(0)) {
      }
      for (int spins = 0; done_.load(std::memory_order_acquire) < all;) pause(spins);
    }
  }

 private:
  static constexpr std::uint64_t kOne = std::uint64_t(1) << 32, kEnd = std::uint64_t(1) << 62;
  // A thread's pieces, adjacent in memory; a thread that has none left takes those of others. `next` is the number of an
  // instruction and, in the lower half, of a piece. So a thread that the system has paused takes a piece of the current
  // instruction when it wakes, and nobody waits for it.
  struct alignas(64) Queue {
    std::atomic<std::uint64_t> next{0};
  };
  std::vector<Queue> queues_;
  std::vector<std::thread> helpers_;
  std::atomic<Int> done_{0};  // finished pieces of the current instruction
  const Instruction* code_ = nullptr;
  std::vector<float> x_;  // the input of a product in float, its rows padded to whole parts
  std::vector<float> wide_;  // per thread, kTile rows of its weight in the same form
  Int width_ = 0;

  void start() {
    while (helpers_.size() + 1 < queues_.size()) try {
        helpers_.emplace_back([this, me = helpers_.size() + 1] { help(me); });
      } catch (const std::system_error&) {  // no thread is available: the others do the work
        return;
      }
  }
  void help(std::size_t me) {
    for (int spins = 0; queues_[0].next.load(std::memory_order_acquire) < kEnd;)
      if (take(me)) spins = 0;
      else pause(spins);
  }
  static void pause(int& spins) {
    if (++spins > 4000) std::this_thread::yield();
  }
  // Runs a piece of the current instruction, if one is left.
  bool take(std::size_t me) {
    for (std::size_t k = 0; k < queues_.size(); k++) {
      const std::size_t q = (me + k) % queues_.size();
      if (!left(q, queues_[q].next.load(std::memory_order_acquire))) continue;
      const std::uint64_t next = queues_[q].next.fetch_add(1, std::memory_order_acq_rel);
      if (!left(q, next)) continue;
      work(code_[next / kOne], next % kOne, me);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }
  bool left(std::size_t q, std::uint64_t next) const {
    return next < kEnd && next % kOne < (q + 1) * pieces(code_[next / kOne]) / queues_.size();
  }

  // Pieces of an operation, which threads take one by one. Their bounds change no bit of a result.
  static Int lines(const Instruction& a) { return a.size[0] * a.size[1] * a.size[2]; }
  static Int each(const Instruction& a) {
    const Int one = a.code == Code::linear ? a.size[2] : a.code == Code::matmul ? a.size[1] * a.size[2] * a.size[3] : a.size[3];
    const Int least = std::max<Int>(1, kShared / std::max<Int>(1, one));
    return a.code == Code::linear ? (least + 3) / 4 * 4 : least;
  }
  static Int count(const Instruction& a) {
    if (a.code == Code::linear || a.code == Code::draw) return a.size[1];
    return a.code == Code::matmul ? a.size[0] : lines(a);
  }
  static Int pieces(const Instruction& a) { return (count(a) + each(a) - 1) / each(a); }

  void work(const Instruction& a, Int piece, std::size_t me) {
    const Int first = piece * each(a), last = std::min(first + each(a), count(a));
    switch (a.code) {
      case Code::linear:
        return linear(a, first, last, wide_.data() + me * kTile * width_);
      case Code::matmul:
        return matmul(a, first, last);
      case Code::embedding:
        return embedding(a, first, last);
      case Code::draw:
        return draw(a, first, last);
      case Code::sum:
        return reduce(a, first, last, false);
      case Code::vecdot:
        return reduce(a, first, last, true);
      default:
        return pointwise(a, first, last);
    }
  }

  // Returns the offset of a line's first element; `line` counts the first three sizes.
  static Int place(const Instruction& a, const Operand& x, Int line) {
    const Int k = line % a.size[2], j = line / a.size[2] % a.size[1], i = line / a.size[2] / a.size[1];
    return i * x.step[0] + j * x.step[1] + k * x.step[2];
  }
  template <class T>
  static void read(const T* from, Int step, Int n, float* to) {
    if (step == 1)
      for (Int i = 0; i < n; i++) to[i] = simd::load(from[i]);
    else if (step == 0) std::fill(to, to + n, simd::load(*from));
    else
      for (Int i = 0; i < n; i++) to[i] = simd::load(from[i * step]);
  }
  // n elements as floats: in place if they are, else in `buffer`.
  static const float* read(const Operand& x, Int at_, Int n, float* buffer) {
    if (x.dtype == kBFloat16) return read(at<const BFloat16>(x.address) + at_, x.step[3], n, buffer), buffer;
    const float* from = at<const float>(x.address) + at_;
    if (x.step[3] == 1) return from;
    return read(from, x.step[3], n, buffer), buffer;
  }
  template <class T>
  static void write(const float* from, T* to, Int step, Int n) {
    if (step == 1)
      for (Int i = 0; i < n; i++) simd::store(to[i], from[i]);
    else
      for (Int i = 0; i < n; i++) simd::store(to[i * step], from[i]);
  }
  static void write(const float* from, const Operand& x, Int at_, Int n) {
    if (x.dtype == kBFloat16) return write(from, at<BFloat16>(x.address) + at_, x.step[3], n);
    float* to = at<float>(x.address) + at_;
    if (to != from) write(from, to, x.step[3], n);
  }

  // Sizes of the result; inputs are broadcast with steps of 0.
  template <class Function>
  static void map(const Instruction& a, Int first, Int last, int inputs, const Function& function) {
    alignas(64) float buffer[4][kChunk];
    const float* in[3] = {};
    const Int n = a.size[3];
    for (Int line = first; line < last; line++) {
      for (Int c = 0; c < n; c += kChunk) {
        const Int m = std::min(kChunk, n - c);
        for (int k = 0; k < inputs; k++) {
          const Operand& x = a.at[k + 1];
          in[k] = read(x, place(a, x, line) + c * x.step[3], m, buffer[k + 1]);
        }
        const Operand& to = a.at[0];
        const Int where = place(a, to, line) + c * to.step[3];
        float* out = to.dtype == kFloat && to.step[3] == 1 ? at<float>(to.address) + where : buffer[0];
        function(in, out, m);
        write(out, to, where, m);
      }
    }
  }
#define ELMAN_MAP(inputs, ...)                                                        \
  return map(a, first, last, inputs, [&](const float* const* in, float* out, Int n) { \
    const float *x = in[0], *y = in[1], *z = in[2];                                   \
    (void)y, (void)z;                                                                 \
    _Pragma("GCC ivdep") for (Int i = 0; i < n; i++) out[i] = (__VA_ARGS__);          \
  })
  static void pointwise(const Instruction& a, Int first, Int last) {
    using Math = simd::Branchless;
    const float number = static_cast<float>(a.number[0]);
    switch (a.code) {
      case Code::copy:
        ELMAN_MAP(1, x[i]);
      case Code::neg:
        ELMAN_MAP(1, -x[i]);
      case Code::abs:
        ELMAN_MAP(1, std::fabs(x[i]));
      case Code::exp:
        ELMAN_MAP(1, Exp::of(x[i]));
      case Code::tanh:
        ELMAN_MAP(1, Math::tanh(x[i]));
      case Code::sigmoid:
        ELMAN_MAP(1, Math::sigmoid(x[i]));
      case Code::silu:
        ELMAN_MAP(1, x[i] * Math::sigmoid(x[i]));
      case Code::relu:
        ELMAN_MAP(1, x[i] < 0.f ? 0.f : x[i]);
      case Code::log_sigmoid:
        ELMAN_MAP(1, std::fmin(x[i], 0.f) - std::log1p(std::exp(-std::fabs(x[i]))));
      case Code::softplus:
        ELMAN_MAP(1, softplus(x[i]));
      case Code::log:
        ELMAN_MAP(1, std::log(x[i]));
      case Code::square:
        ELMAN_MAP(1, x[i] * x[i]);
      case Code::sqrt:
        ELMAN_MAP(1, std::sqrt(x[i]));
      case Code::rsqrt:
        ELMAN_MAP(1, 1.f / std::sqrt(x[i]));
      case Code::reciprocal:
        ELMAN_MAP(1, 1.f / x[i]);
      case Code::add:
        ELMAN_MAP(2, x[i] + number * y[i]);
      case Code::sub:
        ELMAN_MAP(2, x[i] - number * y[i]);
      case Code::mul:
        ELMAN_MAP(2, x[i] * y[i]);
      case Code::div:
        ELMAN_MAP(2, x[i] / y[i]);
      case Code::maximum:
        ELMAN_MAP(2, x[i] > y[i] || x[i] != x[i] ? x[i] : y[i]);
      case Code::minimum:
        ELMAN_MAP(2, x[i] < y[i] || x[i] != x[i] ? x[i] : y[i]);
      case Code::addcmul:
        ELMAN_MAP(3, x[i] + number * y[i] * z[i]);
      default:
        return;
    }
  }
#undef ELMAN_MAP

  // The sum over the last size, of x or x y, times `number`.
  static void reduce(const Instruction& a, Int first, Int last, bool two) {
    alignas(64) float buffer[2][kChunk];
    for (Int line = first; line < last; line++) {
      F total{};
      float rest = 0;
      for (Int c = 0; c < a.size[3]; c += kChunk) {
        const Int m = std::min(kChunk, a.size[3] - c);
        const float *x = read(a.at[1], place(a, a.at[1], line) + c * a.at[1].step[3], m, buffer[0]), *y = nullptr;
        if (two) y = read(a.at[2], place(a, a.at[2], line) + c * a.at[2].step[3], m, buffer[1]);
        Int i = 0;
        for (F u, v; i + kLanes <= m; i += kLanes) {
          std::memcpy(&u, x + i, sizeof u);
          if (two) std::memcpy(&v, y + i, sizeof v), u *= v;
          total += u;
        }
        for (; i < m; i++) rest += two ? x[i] * y[i] : x[i];
      }
      const float sum = (simd::sum(total) + rest) * static_cast<float>(a.number[0]);
      write(&sum, a.at[0], place(a, a.at[0], line), 1);
    }
  }

  // Draws a class for each row into at[0], and into at[1] that class or -1 for non-finite logits, from logits at[2], seen at[3]
  // (bytes) and waits at[4] (float, may be null), as `kept_scores` and `race` of elman_core do. Sizes 1, rows, top-k, classes;
  // numbers: penalty, temperature, top-p.
  static void draw(const Instruction& a, Int first, Int last) {
    const Int classes = a.size[3], top_k = a.size[2];
    const float penalty = static_cast<float>(a.number[0]), temperature = static_cast<float>(a.number[1]);
    std::vector<float> score(classes), sorted(classes);
    std::vector<Int> order(classes);
    for (Int r = first; r < last; r++) {
      const float* logits = read(a.at[2], r * a.at[2].step[1], classes, sorted.data());
      auto* seen = at<unsigned char>(a.at[3].address) + r * a.at[3].step[1];
      const float* waits = a.at[4].address ? at<const float>(a.at[4].address) + r * a.at[4].step[1] : nullptr;
      bool finite = true;
      for (Int i = 0; i < classes; i++) {
        float x = logits[i];
        finite = finite && std::isfinite(x);
        if (penalty != 1.f && seen[i]) x = x < 0 ? x * penalty : x / penalty;
        score[i] = waits ? x / temperature : x;
      }
      const auto keep = [&](Int i) { return score[i] > -HUGE_VALF; };
      if (finite && waits && 0 < top_k && top_k < classes) {
        std::copy(score.begin(), score.end(), sorted.begin());
        std::nth_element(sorted.begin(), sorted.begin() + (top_k - 1), sorted.end(), std::greater<float>());
        for (float& x : score) x = x < sorted[top_k - 1] ? -HUGE_VALF : x;
      }
      float most = -HUGE_VALF, all = 0;
      for (const float x : score) most = std::max(most, x);
      if (finite && waits) {
        for (Int i = 0; i < classes; i++) all += sorted[i] = keep(i) ? std::exp(score[i] - most) : 0.f;
        if (a.number[2] < 1) {
          order.clear();
          for (Int i = 0; i < classes; i++)
            if (keep(i)) order.push_back(i);
          std::sort(order.begin(), order.end(), [&](Int i, Int j) { return score[i] != score[j] ? score[i] < score[j] : i < j; });
          double before = 0;
          for (std::size_t k = 0; k + 1 < order.size(); k++)
            if (static_cast<float>(before += sorted[order[k]] / all) <= static_cast<float>(1 - a.number[2]))
              score[order[k]] = -HUGE_VALF;
        }
        for (Int i = 0; i < classes; i++) score[i] = keep(i) ? sorted[i] / waits[i] : -1.f;
      }
      const Int drawn = finite ? std::max_element(score.begin(), score.end()) - score.begin() : 0;
      at<Int>(a.at[0].address)[r] = drawn, at<Int>(a.at[1].address)[r] = finite ? drawn : -1;
      if (penalty != 1.f) seen[drawn] = 1;
    }
  }

  // Looks up rows of the table at[1] by the numbers at[2]; sizes 1, 1, rows, width.
  static void embedding(const Instruction& a, Int first, Int last) {
    alignas(64) float buffer[kChunk];
    for (Int line = first; line < last; line++) {
      const Int row = at<const Int>(a.at[2].address)[line * a.at[2].step[2]];
      for (Int c = 0; c < a.size[3]; c += kChunk) {
        const Int m = std::min(kChunk, a.size[3] - c);
        write(read(a.at[1], row * a.at[1].step[2] + c, m, buffer), a.at[0], line * a.at[0].step[2] + c, m);
      }
    }
  }

  // at[0] (R, N) = at[1] (R, K) at[2]^T (N, K) + at[3] (R, N); sizes R, N, K. Rows of inputs have adjacent elements. A weight
  // in int8 has a scale per row, at[4] (N).
  void widen(const Instruction& a) {
    const Int dtype = a.at[2].dtype;
    return dtype == kInt8 ? widen<std::int8_t>(a) : dtype == kBFloat16 ? widen<BFloat16>(a) : widen<float>(a);
  }
  void linear(const Instruction& a, Int first, Int last, float* wide) const {
    const Int dtype = a.at[2].dtype;
    return dtype == kInt8       ? linear<std::int8_t>(a, first, last, wide)
           : dtype == kBFloat16 ? linear<BFloat16>(a, first, last, wide)
                                : linear<float>(a, first, last, wide);
  }
  // Weights are read in vectors of four-byte words. The weights of a word go to separate vectors: this costs a shift or two
  // each and no lane exchange, which compilers do badly. The elements of x are put in that order once.
  template <class W>
  static constexpr int kEach = 4 / static_cast<int>(sizeof(W));
  template <class W>
  void widen(const Instruction& a) {
    constexpr int each = kEach<W>, words = each * kWords;
    const Int K = a.size[2];
    const Operand& x = a.at[1];
    width_ = (K + kPart - 1) / kPart * kPart;
    x_.assign(static_cast<std::size_t>(a.size[0] * width_), 0.f);
    wide_.resize(std::max(wide_.size(), queues_.size() * kTile * static_cast<std::size_t>(width_)));
    alignas(64) float buffer[words];
    for (Int r = 0; r < a.size[0]; r++)
      for (Int k = 0; k < K; k += words) {
        std::fill(buffer, buffer + words, 0.f);
        const Int n = std::min<Int>(words, K - k), from = r * x.step[0] + k;
        if (x.dtype == kBFloat16) read(at<const BFloat16>(x.address) + from, 1, n, buffer);
        else read(at<const float>(x.address) + from, 1, n, buffer);
        float* to = x_.data() + r * width_ + k;
        for (int u = 0; u < each; u++)
          for (int i = 0; i < kWords; i++) to[u * kWords + i] = buffer[i * each + u];
      }
  }
  template <class W>
  static void lift(const W* from, Words (&to)[kEach<W>]) {
    Bits words;
    std::memcpy(&words, from, sizeof words);
    if constexpr (kEach<W> == 1) to[0] = simd::bits<Words>(words);
    else if constexpr (kEach<W> == 2) to[0] = simd::bits<Words>(words << 16), to[1] = simd::bits<Words>(words & 0xffff0000u);
    else
      _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) to[u] =
          __builtin_convertvector(simd::bits<Signed>(words << (24 - 8 * u)) >> 24, Words);
  }
  using Sums = F[kPart / kLanes];  // the parts of a sum
  static F lift(const float* w) {
    F x;
    return std::memcpy(&x, w, sizeof x), x;
  }
  // One row is multiplied as the weights arrive from memory. For several rows, weights become floats once and are multiplied in
  // tiles. A sum has the same parts and order in both.
  template <class W>
  void linear(const Instruction& a, Int first, Int last, float* wide) const {
    const Int step = a.at[2].step[1];
    const W* w = at<const W>(a.at[2].address);
    if (a.size[0] == 1) {
      for (Int n = first; n < last; n++) product(a, n, w + n * step);
      return;
    }
    for (Int n = first; n < last; n += kTile) {
      const Int many = std::min<Int>(kTile, last - n);
      for (Int i = 0; i < many; i++)
        along(w + (n + i) * step, a.size[2], [to = wide + i * width_](const W* from, Int k) {
          for (int v = 0; v < kParts; v += kEach<W>) {
            Words x[kEach<W>];
            lift(from + v * kWords, x);
            for (int u = 0; u < kEach<W>; u++) std::memcpy(to + k + (v + u) * kWords, &x[u], sizeof x[u]);
          }
        });
      for (Int r = 0; r < a.size[0]; r += kTile) tile<kTile>(a, n, r, wide, many);
    }
  }
  // each(from, k) for every kPart weights of a row, padded with zeros at its end.
  template <class W, class Each>
  static void along(const W* w, Int K, const Each& each) {
    const Int whole = K / kPart * kPart;
    for (Int k = 0; k < whole; k += kPart) each(w + k, k);
    if (whole == K) return;
    W rest[kPart] = {};
    std::memcpy(rest, w + whole, static_cast<std::size_t>(K - whole) * sizeof(W));
    each(rest, whole);
  }
  template <class W>
  void product(const Instruction& a, Int n, const W* w) const {
    Words total[kParts] = {};
    along(w, a.size[2], [&](const W* from, Int k) {
      for (int v = 0; v < kParts; v += kEach<W>) {
        Words right[kEach<W>], left;
        lift(from + v * kWords, right);
        for (int u = 0; u < kEach<W>; u++) {
          std::memcpy(&left, x_.data() + k + (v + u) * kWords, sizeof left);
          total[v + u] += left * right[u];
        }
      }
    });
    Sums sum;
    std::memcpy(&sum, total, sizeof sum);
    finish<1>(a, n, 0, &sum);
  }
  // The first `many` of kTile rows of the weight times R rows of x, or times those that are left.
  template <int R>
  void tile(const Instruction& a, Int n, Int r, const float* wide, Int many) const {
    if constexpr (R > 1)
      if (a.size[0] - r < R) return tile<R - 1>(a, n, r, wide, many);
    const float* x = x_.data() + r * width_;
    Sums sum[R][kTile];
    for (int part = 0; part < kPart / kLanes; part++) {
      F total[R][kTile] = {};
      for (Int k = part * kLanes; k < width_; k += kPart) {
        F left[R];
        for (int j = 0; j < R; j++) left[j] = lift(x + j * width_ + k);
        for (int i = 0; i < kTile; i++) {
          const F right = lift(wide + i * width_ + k);
          for (int j = 0; j < R; j++) total[j][i] += left[j] * right;
        }
      }
      for (int j = 0; j < R; j++)
        for (int i = 0; i < kTile; i++) sum[j][i][part] = total[j][i];
    }
    for (int j = 0; j < R; j++) {
      if (many == kTile) finish<kTile>(a, n, r + j, sum[j]);
      else
        for (Int i = 0; i < many; i++) finish<1>(a, n + i, r + j, sum[j] + i);
    }
  }
  // Adds up the parts of I sums.
  template <int I>
  static void finish(const Instruction& a, Int n, Int r, const Sums* sum) {
    simd::Four quarter[I];
    float y[I], buffer[I];
    for (int i = 0; i < I; i++) {
      F all = sum[i][0];
      for (int u = 1; u < kPart / kLanes; u++) all += sum[i][u];
      simd::Four part[kLanes / 4];
      std::memcpy(part, &all, sizeof all);
      for (int half = kLanes / 8; half > 0; half /= 2)
        for (int k = 0; k < half; k++) part[k] += part[k + half];
      quarter[i] = part[0];
    }
    for (int i = 0; i < I; i++) y[i] = (quarter[i][0] + quarter[i][2]) + (quarter[i][1] + quarter[i][3]);
    if (const float* factor = at<const float>(a.at[4].address))
      for (int i = 0; i < I; i++) y[i] *= factor[n + i];
    if (const Operand& b = a.at[3]; b.address) {
      const float* bias = read(b, r * b.step[0] + n * b.step[3], I, buffer);
      for (int i = 0; i < I; i++) y[i] += bias[i];
    }
    write(y, a.at[0], r * a.at[0].step[0] + n, I);
  }

  // at[0] (B, M, N) = at[1] (B, M, K) at[2] (B, K, N), all float; sizes B, M, N, K; steps of each by its own three dimensions.
  static void matmul(const Instruction& a, Int first, Int last) {
    const Operand &x = a.at[1], &y = a.at[2], &o = a.at[0];
    for (Int b = first; b < last; b++)
      for (Int m = 0; m < a.size[1]; m++) {
        const float *left = at<const float>(x.address) + b * x.step[0] + m * x.step[1],
                    *right = at<const float>(y.address) + b * y.step[0];
        float* out = at<float>(o.address) + b * o.step[0] + m * o.step[1];
        Int n = 0;
        if (y.step[2] == 1 && o.step[2] == 1) {
          for (; n + 4 * kLanes <= a.size[2]; n += 4 * kLanes) columns<4>(a, left, right + n, out + n);
          for (; n + kLanes <= a.size[2]; n += kLanes) columns<1>(a, left, right + n, out + n);
        }
        for (; n < a.size[2]; n++) {
          F total{};
          float rest = 0;
          Int k = 0;
          if (x.step[2] == 1 && y.step[1] == 1)
            for (; k + kLanes <= a.size[3]; k += kLanes) total += lift(left + k) * lift(right + n * y.step[2] + k);
          for (; k < a.size[3]; k++) rest += left[k * x.step[2]] * right[k * y.step[1] + n * y.step[2]];
          out[n * o.step[2]] = simd::sum(total) + rest;
        }
      }
  }
  template <int U>
  static void columns(const Instruction& a, const float* left, const float* right, float* out) {
    F total[U] = {};
    for (Int k = 0; k < a.size[3]; k++)
      for (int u = 0; u < U; u++) total[u] += left[k * a.at[1].step[2]] * lift(right + k * a.at[2].step[1] + u * kLanes);
    std::memcpy(out, total, sizeof total);
  }
};

}  // namespace elman::program

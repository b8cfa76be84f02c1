// Shared by the skeletons on a CPU: vectors (GCC's and clang's extension), branchless functions, bfloat16 storage, threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include "call.h"
#include "dtype.h"
#include "portable.h"

namespace elman::simd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float F __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::uint32_t I __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Four __attribute__((vector_size(4 * sizeof(float))));

template <class To, class From>
ELMAN_HD To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// The sum of the lanes.
ELMAN_HD float sum(F x) {
  Four part[kLanes / 4];
  std::memcpy(part, &x, sizeof x);
  for (int half = kLanes / 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

// `Math` of a cell (portable.h) for a float or a vector of floats, to about two units in the last place; loops vectorise.
struct Branchless {
  static constexpr float kRound = 12582912.f;  // 1.5 2^23: adding it leaves the nearest integer in the low bits
  // exp(x) = 2^n exp(r), |r| <= log(2) / 2; x is clamped to what a float can hold. NaN stays NaN.
  template <class T>
  static ELMAN_HD T exp(T x) {
    T r;
    const T scale = split(within(x, -87.f, 88.f), r);
    return scale + scale * expm1_near(r);
  }
  // x = 2^n y, y from sqrt(1/2) to sqrt(2): log(y) = 2 artanh((y - 1) / (y + 1)); the remainder of its series is below 1e-9.
  template <class T>
  static ELMAN_HD T log(T x) {
    using Bits = std::conditional_t<sizeof(T) == sizeof(F), I, std::uint32_t>;
    const Bits above = (bits<Bits>(x) - 0x3f3504f3u + (128u << 23)) >> 23;  // n + 128
    const T y = bits<T>(bits<Bits>(x) - ((above - 128u) << 23)), z = (y - 1.f) / (y + 1.f), square = z * z;
    const T n = bits<T>(above + bits<Bits>(T{} + kRound)) - kRound - 128.f;
    T p = square * (1.f / 9) + 1.f / 7;
    p = p * square + 1.f / 5;
    p = p * square + 1.f / 3;
    p = p * square + 1.f;
    return n * 0.693147181f + 2.f * z * p;
  }
  template <class T>
  static ELMAN_HD T tanh(T x) {
    T r;
    const T scale = split(within(x, -9.01f, 9.01f) * 2.f, r), e = scale * expm1_near(r) + (scale - 1.f);  // exp(2x) - 1
    return e / (e + 2.f);
  }
  template <class T>
  static ELMAN_HD T sigmoid(T x) {
    return 1.f / (1.f + exp(-x));
  }
  template <class T>
  static ELMAN_HD Gate<T> gate(T x) {
    const T e = exp(x < 0.f ? x : -x), large = 1.f / (1.f + e), small = e * large;
    return {x < 0.f ? small : large, x < 0.f ? large : small};
  }

 private:
  template <class T>
  static ELMAN_HD T within(T x, float least, float most) {
    const T low = T{} + least, high = T{} + most;
    x = x < low ? low : x;
    return x > high ? high : x;
  }
  // 2^n with n the integer nearest to x / log(2), and r = x - n log(2).
  template <class T>
  static ELMAN_HD T split(T x, T& r) {
    using Bits = std::conditional_t<sizeof(T) == sizeof(F), I, std::uint32_t>;
    const T shifted = x * 1.44269504f + kRound, n = shifted - kRound;
    r = x - n * 0.693359375f + n * 2.12194440e-4f;
    return bits<T>((bits<Bits>(shifted) << 23) + bits<Bits>(T{} + 1.f));
  }
  // exp(r) - 1 for |r| <= log(2) / 2: a Taylor series with a relative remainder below 2^-25.
  template <class T>
  static ELMAN_HD T expm1_near(T r) {
    T p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    return p * (r * r) + r;
  }
};

struct BFloat16 {
  std::uint16_t raw;
};
ELMAN_HD float load(float x) { return x; }
ELMAN_HD float load(BFloat16 x) { return bits<float>(std::uint32_t(x.raw) << 16); }
ELMAN_HD void store(float& to, float x) { to = x; }
ELMAN_HD void store(BFloat16& to, float x) {  // to nearest, ties to even
  const auto b = bits<std::uint32_t>(x);
  to.raw = std::uint16_t(x == x ? (b + 0x7fff + (b >> 16 & 1)) >> 16 : 0x7fc0);
}

// Storage type of a tensor on a CPU, by its code in dtype.h: float or bfloat16.
template <int code>
using Storage = std::conditional_t<code == static_cast<int>(Dtype::f32), float, BFloat16>;

// The call of a recurrence over [T,B], with the marks of a row's step.
template <class Call>
struct Marked {
  const Call& c;
  bool held(std::int64_t t, std::int64_t b) const { return c.mask && !at<unsigned char>(c.mask)[t * c.batch + b]; }
  bool fresh(std::int64_t t, std::int64_t b) const { return c.starts && at<unsigned char>(c.starts)[t * c.batch + b]; }
};

// Runs a recurrence for a binding, which must not throw; returns nullptr or an error message.
template <class Run>
const char* guarded(const Run& run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    return "too little memory";
  }
  return nullptr;
}

// work(i, scratch) for every i below `count`, by up to `threads` threads with a scratch each. They end with the call: a pool
// could disturb torch's, and would not survive a fork. Throws bad_alloc if a thread runs out of memory.
template <class Scratch, class Work>
void parallel(std::int64_t count, std::int64_t threads, const Work& work) {
  std::vector<Scratch> scratch(std::size_t(count < threads ? count : threads < 1 ? 1 : threads));
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> full{false};
  const auto run = [&](Scratch& mine) {
    try {
      for (std::int64_t i; (i = next++) < count;) work(i, mine);
    } catch (const std::bad_alloc&) {
      full = true;
    }
  };
  std::vector<std::thread> others;
  others.reserve(scratch.size());
  try {
    while (others.size() + 1 < scratch.size()) others.emplace_back(run, std::ref(scratch[others.size() + 1]));
  } catch (const std::system_error&) {  // no more threads are available: those that run do the work
  }
  run(scratch[0]);
  for (std::thread& other : others) other.join();
  if (full) throw std::bad_alloc();
}

}  // namespace elman::simd

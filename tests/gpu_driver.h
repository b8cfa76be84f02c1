// Shared by the drivers that run under compute-sanitizer (test_kernels_sanitized.py). Every buffer is a cudaMalloc of its own,
// of exactly the bytes that its kernel may touch, so that an access beyond it is seen. Outputs hold NaN until they are written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

inline void must(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}
inline void must_succeed(const char* said) { must(said == nullptr, said); }  // said: the return value of a module's function

template <class T>
T* on_device(const std::vector<T>& values) {
  T* p;
  const std::size_t bytes = values.size() * sizeof(T);
  must(cudaMalloc(reinterpret_cast<void**>(&p), bytes) == cudaSuccess, "malloc");
  must(cudaMemcpy(p, values.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
  return p;
}
template <class T>
std::vector<T> on_host(const T* p, std::size_t count) {
  std::vector<T> values(count);
  must(cudaMemcpy(values.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess, "copy back");
  return values;
}

template <class T>
T* filled(std::size_t count, float scale, unsigned seed, float middle = 0.f) {  // within scale / 2 of `middle`; seed 0: NaN
  std::vector<T> values(count);
  for (auto& v : values) {
    seed = seed ? seed * 1664525u + 1013904223u : 0;
    v = static_cast<T>(seed ? ((seed >> 8) / 16777216.f - 0.5f) * scale + middle : __builtin_nanf(""));
  }
  return on_device(values);
}

template <class T>
bool finite(const T* p, std::size_t count) {
  for (auto v : on_host(p, count))
    if (!(static_cast<float>(v) - static_cast<float>(v) == 0.f)) return false;
  return true;
}

template <class T>
std::uint64_t address(T* p) {
  return reinterpret_cast<std::uint64_t>(p);
}

// Outputs of kernels, by name.
class Outputs {
 public:
  template <class T>
  T* make(const char* name, std::size_t count) {
    T* p = filled<T>(count, 0, 0);
    all_.push_back({name, [p, count] { return finite(p, count); }});
    return p;
  }
  void must_be_written() const {
    must(cudaDeviceSynchronize() == cudaSuccess, "run");
    for (const auto& each : all_) {
      if (!each.written()) std::printf("not written, or not finite: %s\n", each.name), std::exit(1);
    }
  }

 private:
  struct Output {
    const char* name;
    std::function<bool()> written;
  };
  std::vector<Output> all_;
};

// [T,B] or [B,T]: a third of the steps hold their state.
inline unsigned char* made_mask(int count) {
  std::vector<unsigned char> mask(count, 1);
  for (int i = 0; i < count; i += 3) mask[i] = 0;
  return on_device(mask);
}

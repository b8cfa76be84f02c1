// Misaligned addresses, at which a GPU ends a kernel. The compiler looks at typed pointers (-fsanitize=alignment) and reports to the function below, which
// takes the place of libubsan's; what stands for an instruction on an address looks itself, with `aligned`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace emulated {

struct Mismatch {  // as the compiler lays it out
  const char* file;
  unsigned line, column;
  const struct {
    std::uint16_t kind, info;
    char name[1];
  }* type;
  unsigned char log_alignment, access;
};

// Ends the kernel. On a GPU, dynamic shared memory and every tensor of its own begin at more than a multiple of 16, so `bytes` is at most that.
[[noreturn]] inline void misaligned(const char* file, unsigned line, const char* what, std::size_t bytes, std::uintptr_t address) {
  const char* const name = std::strrchr(file, '/');
  char text[sizeof fault];
  std::snprintf(text, sizeof text, "misaligned address 0x%zx: %s:%u needs a multiple of %zu for %s (thread %u of block %u)",
                std::size_t(address), name ? name + 1 : file, line, bytes, what, threadIdx.x, blockIdx.x);
  stop(text);
}
template <class T>
T* aligned(T* p, std::size_t bytes, const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  if (address % bytes) misaligned(file, line, "its instruction", bytes, address);
  return p;
}

}  // namespace emulated

extern "C" [[noreturn]] __attribute__((used)) inline void __ubsan_handle_type_mismatch_v1_abort(const emulated::Mismatch* at,
                                                                                                std::uintptr_t address) {
  emulated::misaligned(at->file, at->line, at->type->name, std::size_t(1) << at->log_alignment, address);
}

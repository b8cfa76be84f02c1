// Misaligned addresses, which end a kernel on a GPU. The compiler checks typed pointers (-fsanitize=alignment) and calls the
// handler below, which replaces libubsan's; emulated instructions check their addresses with `aligned`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace emulated {

struct Mismatch {  // in the compiler's layout
  const char* file;
  unsigned line, column;
  const struct {
    std::uint16_t kind, info;
    char name[1];
  }* type;
  unsigned char log_alignment, access;
};

// Ends the kernel. `bytes` is at most 16: a GPU aligns dynamic shared memory and every tensor's own memory to more than that.
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

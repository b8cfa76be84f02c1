// Asynchronous copies: made at once or, with `backwards`, as late as allowed, when their thread waits for them.
#pragma once

#include "cuda_runtime.h"

inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0) {
  emulated::Thread& thread = emulated::block->threads[emulated::block->current];
  const emulated::Copy copy{emulated::aligned(to, bytes), emulated::aligned(from, bytes), bytes, zeros, thread.committed};
  if (!emulated::backwards) emulated::make(copy);
  emulated::races::copy_begins(to, bytes);
  thread.copies.push_back(copy);
}
inline void __pipeline_commit() { emulated::block->threads[emulated::block->current].committed++; }
inline void __pipeline_wait_prior(unsigned left) {
  emulated::Thread& thread = emulated::block->threads[emulated::block->current];
  emulated::finish_copies(thread, thread.committed - std::min(left, thread.committed));
}

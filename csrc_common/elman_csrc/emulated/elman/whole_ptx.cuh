// The instructions of whole_ptx.cuh.
#pragma once

#include "decode_ptx.cuh"

namespace elman::whole {

inline void store_word(unsigned long long* p, unsigned long long v) { *p = v; }
inline void load_word(unsigned long long& v, const unsigned long long* p) { v = *p; }
inline void tell(unsigned* p, unsigned v) { *p = v; }
inline unsigned look_at(const unsigned* p) {
  emulated::yield();
  return *p;
}
inline void meet_at(int barrier, int threads) { emulated::wait(emulated::block->named[barrier], threads); }

}  // namespace elman::whole

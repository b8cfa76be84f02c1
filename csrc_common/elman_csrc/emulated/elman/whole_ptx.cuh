// The instructions of whole_ptx.cuh.
#pragma once

#include "decode_ptx.cuh"

namespace elman::whole {

inline void store_word(unsigned long long* p, unsigned long long v) { *p = v; }
inline void load_words(unsigned long long (&v)[2], const unsigned long long* p) { v[0] = p[0], v[1] = p[1]; }

}  // namespace elman::whole

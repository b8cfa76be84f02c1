// What the emulation tells the detector of races (races.cpp), where a program is compiled with it. All of it is of the running block.
#pragma once

#include <cstddef>

namespace emulated::races {

#ifdef EMULATED_RACES
void begin(const void* shared, std::size_t bytes, int threads);  // a block
void end();
void run(int thread);  // from here on `thread` runs
void arrive(const void* barrier);  // it does
void tell(const void* barrier);  // it arrives, and does not wait: it sees nothing of what the others did
void complete(const void* barrier);  // all that wait have seen what each that arrived did before
void copy_begins(const void* to, std::size_t bytes);  // writes at any time between these two
void copy_ends(const void* to, std::size_t bytes);
#else
inline void begin(const void*, std::size_t, int) {}
inline void end() {}
inline void run(int) {}
inline void arrive(const void*) {}
inline void tell(const void*) {}
inline void complete(const void*) {}
inline void copy_begins(const void*, std::size_t) {}
inline void copy_ends(const void*, std::size_t) {}
#endif

}  // namespace emulated::races

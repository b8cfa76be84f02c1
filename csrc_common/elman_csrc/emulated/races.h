// Events that the emulation reports to the race detector (races.cpp), if a program is compiled with it. All belong to the running block.
#pragma once

#include <cstddef>

namespace emulated::races {

#ifdef EMULATED_RACES
void begin(const void* shared, std::size_t bytes, int threads);  // a block begins
void end();
void run(int thread);  // `thread` runs from here on
void arrive(const void* barrier);  // it arrives
void tell(const void* barrier);  // it arrives and does not wait, so it sees no writes of the others
void complete(const void* barrier);  // all waiting threads see the earlier writes of all that arrived
void copy_begins(const void* to, std::size_t bytes);  // the copy writes at any time between these two
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

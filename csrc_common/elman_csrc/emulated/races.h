// Events that the emulation reports to the race detector (races.cpp), if a program is compiled with it.
#pragma once

#include <cstddef>

namespace emulated::races {

#ifdef EMULATED_RACES
void begin(const void* shared, std::size_t bytes, int threads);  // a block begins, besides those that run
void end();
void run(int thread);  // from here on; counted over all blocks
void arrive(const void* barrier);
void tell(const void* barrier);  // arrives without waiting, so it sees no writes of the others
void complete(const void* barrier,
              bool orders);  // all waiting threads see the earlier accesses of all that arrived, if it orders them
void copy_begins(const void* to, std::size_t bytes);  // the copy may write at any time between these two
void copy_ends(const void* to, std::size_t bytes);
void init(const void* mbarrier);
void arm(const void* mbarrier);  // the thread arrives
void send(const void* to, std::size_t bytes, const void* mbarrier);  // st.async: may write at any time until the phase ends
void phase_ends(const void* mbarrier);
void pass(const void* mbarrier);  // the thread has seen a phase end
// For functions whose accesses to shared memory are not the kernel's.
#define EMULATED_UNSEEN __attribute__((no_sanitize("thread")))
#else
#define EMULATED_UNSEEN
inline void begin(const void*, std::size_t, int) {}
inline void end() {}
inline void run(int) {}
inline void arrive(const void*) {}
inline void tell(const void*) {}
inline void complete(const void*, bool) {}
inline void copy_begins(const void*, std::size_t) {}
inline void copy_ends(const void*, std::size_t) {}
inline void init(const void*) {}
inline void arm(const void*) {}
inline void send(const void*, std::size_t, const void*) {}
inline void phase_ends(const void*) {}
inline void pass(const void*) {}
#endif

}  // namespace emulated::races

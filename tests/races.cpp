// A detector of races in the shared memory of blocks of emulated threads: two accesses to a place, at least one of them a
// write, neither of which happens before the other. Each thread has a clock, and the time that it has seen of every other
// thread's clock. Only barriers order threads: __syncthreads, bar.sync over a part of a block, __syncwarp, barrier.cluster,
// mbarriers. Shuffles, mma, movmatrix and ldmatrix order nothing, as PTX defines, nor do words that blocks exchange through
// global memory.
//
// An mbarrier has a clock, too: its phases. st.async may write from its issue until the end of the phase that counts it. So it
// comes after what its thread did before, and before what a thread does that has seen that phase end, itself or through others;
// what its own thread does next is not ordered with it. A thread that sees a phase end has seen everything that was done before
// by the threads that armed the barrier in that phase or sent what it counts.
//
// A program is compiled with -fsanitize=thread -DEMULATED_RACES, so that the compiler calls a hook before each access. It is
// linked with this file, which is compiled without and replaces ThreadSanitizer's library. Shared memory is tracked in places
// of two bytes. Values do not matter: a number that many threads write alike is a race.
//
// At the end: a line for each pair of instructions that race, then "N races in shared memory, of M accesses"; exit code 9 if there are any.
#include "races.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kPlace = 2, kMbarrier = 8, kLines = 8;
using Clock = unsigned;
using Address = std::uintptr_t;

struct Access {
  Address where = 0;  // the address after the instruction
  Clock clock = 0;
  int thread = -1;  // for a read, `threads` more; or the number of an mbarrier, whose phases are the clock
};
struct Mbarrier {
  int number;
  Clock phases = 0;
  std::vector<Clock> seen;  // by threads that arrived in the phases before this one
};
struct Place {
  Access write;
  std::vector<Access> reads;  // since the write; those that happened before another of them may be missing
  std::size_t enough = 16;  // number of reads at which to look for such
  bool copied = false;  // an asynchronous copy by the thread of `write` is in flight
};

struct Shared {  // memory of a block
  Address first, last;
  std::vector<Place> places;
};

void join(std::vector<Clock>& into, const std::vector<Clock>& seen, std::size_t first, std::size_t last) {
  into.resize(std::max(into.size(), last), 0);
  for (std::size_t i = first; i < last; i++) into[i] = std::max(into[i], seen[i]);
}
void join(std::vector<Clock>& into, const std::vector<Clock>& seen) { join(into, seen, 0, seen.size()); }

struct Detector {
  std::vector<Shared> blocks;
  int threads = 0, of_block = 0, current = 0;
  std::vector<std::vector<Clock>> seen;  // [thread][of threads' writes, of their reads, of mbarriers]
  std::map<const void*, Mbarrier> mbarriers;
  std::map<const void*, std::vector<int>> arrived;
  std::map<const void*, std::vector<Clock>> seen_by_tellers;  // seen by threads that did not wait
  std::set<std::pair<Address, Address>> told;
  std::uint64_t races = 0, accesses = 0, look = 0;
  std::vector<std::uint64_t> looked;  // [thread]: the last look that found it in a place

  Access access(Address where, int thread) { return {where, seen[current][thread], thread}; }
  void tick(int thread) { seen[thread][thread]++, seen[thread][threads + thread]++; }
  bool before(const Access& a) { return a.thread < 0 || a.clock <= seen[current][a.thread]; }
  void race(const char* now, Address where, const char* then, const Access& other, Address place) {
    races++;
    if (told.size() == kLines || !told.insert({where, other.where}).second) return;
    std::printf("%s at 0x%zx by thread %d of block %d, %s at 0x%zx by ", now, std::size_t(where - 1), current % of_block,
                current / of_block, then, std::size_t(other.where - 1));
    if (other.thread < 2 * threads)
      std::printf("thread %d of block %d", other.thread % of_block, other.thread % threads / of_block);
    else std::printf("st.async");
    std::printf(": byte %zu\n", std::size_t(place));
  }
  template <class Visit>
  void visit(const void* p, std::size_t bytes, Visit visit) {
    for (Shared& x : blocks) {
      const Address from = std::max(Address(p), x.first), to = std::min(Address(p) + bytes, x.last);
      if (from >= to) continue;
      accesses++;
      for (std::size_t i = (from - x.first) / kPlace; i <= (to - 1 - x.first) / kPlace; i++) visit(x.places[i], i * kPlace);
    }
  }

  // Forgets reads that happened before another one: what is ordered with the later one is ordered with them.
  void forget(Place& x) {
    look++;
    auto kept = x.reads.end();
    for (auto r = x.reads.end(); r != x.reads.begin();) {
      --r;
      if (before(*r) || looked[r->thread] == look) continue;
      looked[r->thread] = look, *--kept = *r;
    }
    x.reads.erase(x.reads.begin(), kept);
    x.enough = 2 * x.reads.size() + 16;
  }
  void read(const void* p, std::size_t bytes, Address where) {
    visit(p, bytes, [&](Place& x, Address place) {
      if (x.copied) race("read", where, "while it is copied to", x.write, place);
      else if (!before(x.write)) race("read", where, "not ordered with the write", x.write, place);
      if (x.reads.size() >= x.enough) forget(x);
      x.reads.push_back(access(where, threads + current));
    });
  }
  void write(const void* p, std::size_t bytes, Address where, bool copied = false, const Mbarrier* counts = nullptr) {
    visit(p, bytes, [&](Place& x, Address place) {
      if (x.copied) race("write", where, "while it is copied to", x.write, place);
      else if (!before(x.write)) race("write", where, "not ordered with the write", x.write, place);
      for (const Access& r : x.reads)
        if (!before(r)) race("write", where, "not ordered with the read", r, place);
      x.write = counts ? Access{where, counts->phases + 1, counts->number} : access(where, current);
      x.reads.clear(), x.copied = copied;
    });
  }
  void copy_ends(const void* p, std::size_t bytes) {
    visit(p, bytes, [&](Place& x, Address) { x.write.clock = seen[current][current], x.write.thread = current, x.copied = false; });
  }
  void tell(std::vector<Clock>& seen_by_tellers) {
    join(seen_by_tellers, seen[current]);
    tick(current);
  }
  void complete(std::vector<int>& met, std::vector<Clock>& by_all, bool orders) {
    if (orders) {
      for (int t : met) join(by_all, seen[t]);
      for (int t : met) join(seen[t], by_all), tick(t);
    }
    met.clear(), by_all.clear();
  }
  void begin(const void* shared, std::size_t bytes, int count) {
    blocks.push_back({Address(shared), Address(shared) + bytes, std::vector<Place>((bytes + kPlace - 1) / kPlace)});
    threads += count, of_block = count;
    seen.assign(threads, std::vector<Clock>(2 * threads, 0));
    for (int t = 0; t < threads; t++) tick(t);
    looked.assign(2 * threads, 0);
  }
  void end() {
    blocks.clear(), mbarriers.clear(), arrived.clear(), seen_by_tellers.clear();
    threads = 0;
  }

  // An operation on an mbarrier must come after its initialisation; such operations need no order among themselves.
  Mbarrier& on(const void* mbarrier, Address where) {
    read(mbarrier, kMbarrier, where);
    return mbarriers.at(mbarrier);
  }
  void init(const void* mbarrier, Address where) {
    write(mbarrier, kMbarrier, where);
    if (!mbarriers.insert({mbarrier, {int(seen[0].size())}}).second) return;
    for (auto& of_thread : seen) of_thread.push_back(0);
  }
  void send(const void* to, std::size_t bytes, const void* mbarrier, Address where) {
    write(to, bytes, where, false, &on(mbarrier, where));
    tell(seen_by_tellers[mbarrier]);
  }
  void phase_ends(const void* mbarrier) {
    Mbarrier& x = mbarriers.at(mbarrier);
    std::vector<Clock>& by_tellers = seen_by_tellers[mbarrier];
    join(x.seen, by_tellers), by_tellers.clear();
    x.seen.resize(seen[0].size(), 0);
    x.seen[x.number] = ++x.phases;
  }
};
Detector* detector = nullptr;

__attribute__((destructor)) void report() {
  if (detector == nullptr) return;
  std::printf("%zu races in shared memory, of %zu accesses\n", std::size_t(detector->races), std::size_t(detector->accesses));
  std::fflush(stdout);
  if (detector->races > 0) std::_Exit(9);
}

}  // namespace

#define HERE Address(__builtin_return_address(0))

namespace emulated::races {

void begin(const void* shared, std::size_t bytes, int threads) {
  if (detector == nullptr) detector = new Detector;
  detector->begin(shared, bytes, threads);
}
void end() { detector->end(); }
void run(int thread) { detector->current = thread; }
void arrive(const void* barrier) { detector->arrived[barrier].push_back(detector->current); }
void tell(const void* barrier) { detector->tell(detector->seen_by_tellers[barrier]); }
void complete(const void* barrier, bool orders) {
  detector->complete(detector->arrived[barrier], detector->seen_by_tellers[barrier], orders);
}
void copy_begins(const void* to, std::size_t bytes) { detector->write(to, bytes, HERE, true); }
void copy_ends(const void* to, std::size_t bytes) { detector->copy_ends(to, bytes); }
void init(const void* mbarrier) { detector->init(mbarrier, HERE); }
void arm(const void* mbarrier) {
  detector->on(mbarrier, HERE);
  detector->tell(detector->seen_by_tellers[mbarrier]);
}
void send(const void* to, std::size_t bytes, const void* mbarrier) { detector->send(to, bytes, mbarrier, HERE); }
void phase_ends(const void* mbarrier) { detector->phase_ends(mbarrier); }
void pass(const void* mbarrier) { join(detector->seen[detector->current], detector->on(mbarrier, HERE).seen); }

}  // namespace emulated::races

// The compiler's hooks.
#define READS(name, bytes)                                   \
  void __tsan_##name(void* p) {                              \
    if (detector != nullptr) detector->read(p, bytes, HERE); \
  }
#define WRITES(name, bytes)                                   \
  void __tsan_##name(void* p) {                               \
    if (detector != nullptr) detector->write(p, bytes, HERE); \
  }
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
READS(read1, 1);
READS(read2, 2);
READS(read4, 4);
READS(read8, 8);
READS(read16, 16);
READS(unaligned_read2, 2);
READS(unaligned_read4, 4);
READS(unaligned_read8, 8);
READS(unaligned_read16, 16);
WRITES(write1, 1);
WRITES(write2, 2);
WRITES(write4, 4);
WRITES(write8, 8);
WRITES(write16, 16);
WRITES(unaligned_write2, 2);
WRITES(unaligned_write4, 4);
WRITES(unaligned_write8, 8);
WRITES(unaligned_write16, 16);
void __tsan_read_range(void* p, std::size_t bytes) {
  if (detector != nullptr) detector->read(p, bytes, HERE);
}
void __tsan_write_range(void* p, std::size_t bytes) {
  if (detector != nullptr) detector->write(p, bytes, HERE);
}

// Calls of these are not hooked: the linker redirects them here (--wrap).
void* __real_memcpy(void*, const void*, std::size_t);
void* __real_memset(void*, int, std::size_t);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  if (detector != nullptr) detector->read(from, bytes, HERE), detector->write(to, bytes, HERE);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memset(void* to, int value, std::size_t bytes) {
  if (detector != nullptr) detector->write(to, bytes, HERE);
  return __real_memset(to, value, bytes);
}
}

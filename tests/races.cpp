// A detector of races in the shared memory of a block of emulated threads: two accesses to a place, one of them a write, of which neither
// happens before the other. Time is a clock of each thread, and for each thread what it has seen of the others' clocks. Barriers alone
// order threads: __syncthreads, bar.sync over a part of a block, __syncwarp. Shuffles, mma, movmatrix and ldmatrix order nothing, as PTX has it.
//
// A program is compiled with -fsanitize=thread -DEMULATED_RACES, so that the compiler calls a hook before each access, and linked with this
// file, which is compiled without, in place of ThreadSanitizer's library. Shared memory is looked at in places of two bytes. Its value is not: a
// number that many threads write alike is a race.
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

constexpr std::size_t kPlace = 2, kLines = 8;
using Clock = unsigned;
using Address = std::uintptr_t;

struct Access {
  Address where = 0;  // after the instruction
  Clock clock = 0;
  int thread = -1;
};
struct Place {
  Access write;
  std::vector<Access> reads;  // since then; of those that happened before another of them not all
  std::size_t enough = 16;  // of reads, to look for such
  bool copied = false;  // now, by the thread of `write`, without its waiting
};

struct Detector {
  Address first = 0, last = 0;  // of shared memory
  int threads = 0, current = 0;
  std::vector<Clock> seen;  // [thread, of thread]
  std::vector<Place> places;
  std::map<const void*, std::vector<int>> arrived;
  std::map<const void*, std::vector<Clock>> seen_by_tellers;  // by those who did not wait
  std::set<std::pair<Address, Address>> told;
  std::uint64_t races = 0, accesses = 0, look = 0;
  std::vector<std::uint64_t> looked;  // [thread]: the last look at a place in which it was found

  Clock& clock(int thread, int of) { return seen[std::size_t(thread) * threads + of]; }
  Access access(Address where) { return {where, clock(current, current), current}; }
  bool before(const Access& a) { return a.thread < 0 || a.clock <= clock(current, a.thread); }
  void race(const char* now, Address where, const char* then, const Access& other, Address place) {
    races++;
    if (told.size() == kLines || !told.insert({where, other.where}).second) return;
    std::printf("%s at 0x%zx by thread %d, %s at 0x%zx by thread %d: byte %zu\n", now, std::size_t(where - 1), current, then,
                std::size_t(other.where - 1), other.thread, std::size_t(place - first));
  }
  template <class Visit>
  void visit(const void* p, std::size_t bytes, Visit visit) {
    const Address from = std::max(Address(p), first), to = std::min(Address(p) + bytes, last);
    if (from >= to) return;
    accesses++;
    for (std::size_t i = (from - first) / kPlace; i <= (to - 1 - first) / kPlace; i++) visit(places[i], first + i * kPlace);
  }

  // Reads that happened before another one: what is ordered with the later one is ordered with them.
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
      x.reads.push_back(access(where));
    });
  }
  void write(const void* p, std::size_t bytes, Address where, bool copied = false) {
    visit(p, bytes, [&](Place& x, Address place) {
      if (x.copied) race("write", where, "while it is copied to", x.write, place);
      else if (!before(x.write)) race("write", where, "not ordered with the write", x.write, place);
      for (const Access& r : x.reads)
        if (!before(r)) race("write", where, "not ordered with the read", r, place);
      x.write = access(where), x.reads.clear(), x.copied = copied;
    });
  }
  void copy_ends(const void* p, std::size_t bytes) {
    visit(p, bytes,
          [&](Place& x, Address) { x.write.clock = clock(current, current), x.write.thread = current, x.copied = false; });
  }
  void tell(std::vector<Clock>& seen_by_tellers) {
    seen_by_tellers.resize(threads, 0);
    for (int i = 0; i < threads; i++) seen_by_tellers[i] = std::max(seen_by_tellers[i], clock(current, i));
    clock(current, current)++;
  }
  void complete(std::vector<int>& met, std::vector<Clock>& seen_by_tellers) {
    std::vector<Clock> all = seen_by_tellers;
    all.resize(threads, 0);
    for (int t : met)
      for (int i = 0; i < threads; i++) all[i] = std::max(all[i], clock(t, i));
    for (int t : met) {
      std::copy(all.begin(), all.end(), &clock(t, 0));
      clock(t, t)++;
    }
    met.clear(), seen_by_tellers.clear();
  }
  void begin(const void* shared, std::size_t bytes, int count) {
    first = Address(shared), last = first + bytes, threads = count;
    seen.assign(std::size_t(count) * count, 0);
    for (int t = 0; t < count; t++) clock(t, t) = 1;
    looked.assign(count, 0), look = 0;
    places.assign((bytes + kPlace - 1) / kPlace, {});
    arrived.clear(), seen_by_tellers.clear();
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
void end() { detector->first = detector->last = 0; }
void run(int thread) { detector->current = thread; }
void arrive(const void* barrier) { detector->arrived[barrier].push_back(detector->current); }
void tell(const void* barrier) { detector->tell(detector->seen_by_tellers[barrier]); }
void complete(const void* barrier) { detector->complete(detector->arrived[barrier], detector->seen_by_tellers[barrier]); }
void copy_begins(const void* to, std::size_t bytes) { detector->write(to, bytes, HERE, true); }
void copy_ends(const void* to, std::size_t bytes) { detector->copy_ends(to, bytes); }

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

// Calls of these are not hooked: the linker sends them here (--wrap).
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

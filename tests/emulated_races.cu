// For test_kernels_races.py: small kernels that race, each beside one that does not. `emulated_races NAME` runs one of them
// with 128 threads or, for clusters, two blocks of 64.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <elman/dense_ptx.cuh>

#include <functional>
#include <map>
#include <string>

alignas(16) unsigned char shared[4096];
alignas(16) float given[128], taken[128];  // visible to other files, so that writes are not removed

namespace {

using elman::matrix::team_barrier;

float* const x = reinterpret_cast<float*>(shared);

// Thread i writes x[i] and, after `order`, reads x[i ^ apart].
template <class Order>
std::function<void()> read_after(Order order, unsigned apart) {
  return [=] {
    const unsigned i = threadIdx.x;
    x[i] = 1.f;
    order(i);
    taken[i] = x[i ^ apart];
  };
}
template <class Between>
std::function<void()> copied(Between between) {  // 16 bytes per thread
  return [=] {
    const unsigned i = threadIdx.x;
    __pipeline_memcpy_async(x + 4 * i, given + 4 * (i % 32), 16);
    __pipeline_commit();
    between(i);
    __pipeline_commit();  // an empty group
    __pipeline_wait_prior(0);
    __syncthreads();
  };
}
void take(unsigned of) { taken[threadIdx.x] = x[4 * of]; }

const std::map<std::string, std::function<void()>> kernels = {
    {"no_barrier", read_after([](unsigned) {}, 64)},
    {"barrier", read_after([](unsigned) { __syncthreads(); }, 64)},
    {"shuffle", read_after([](unsigned) { __shfl_xor_sync(~0u, 0.f, 1); }, 1)},
    {"warp_barrier", read_after([](unsigned) { __syncwarp(); }, 1)},
    {"warp_barrier_for_a_block", read_after([](unsigned) { __syncwarp(); }, 64)},
    {"half_of_the_warps",  // the others skip the barrier, and read what these wrote
     read_after([](unsigned i) { i < 64 ? team_barrier(1, 64) : __syncwarp(); }, 64)},
    {"both_halves", read_after([](unsigned i) { team_barrier(i < 64 ? 1 : 2, 64); }, 32)},
    {"halves_apart", read_after([](unsigned i) { team_barrier(i < 64 ? 1 : 2, 64); }, 64)},
    {"through_a_third",  // 0-31 to 32-63 to 64-95 by two barriers
     [] {
       const unsigned i = threadIdx.x;
       if (i < 32) x[i] = 1.f;
       if (i < 64) team_barrier(1, 64);
       if (i >= 32 && i < 96) team_barrier(2, 64);
       if (i >= 64 && i < 96) taken[i] = x[i - 64];
     }},
    {"write_after_read",
     [] {
       const unsigned i = threadIdx.x;
       taken[i] = x[i];
       if (i < 32) x[i + 96] = 1.f;
     }},
    {"same_place",
     [] {
       if (threadIdx.x % 64 == 0) x[0] = 1.f;
     }},
    {"halves_of_a_word", [] { reinterpret_cast<short*>(shared)[threadIdx.x] = 1; }},
    {"copy_without_waiting", copied([](unsigned i) { take(i); })},
    {"copy_with_a_barrier_only", copied([](unsigned i) { __syncthreads(), take(i ^ 64), __syncthreads(); })},
    {"copy_of_a_group_not_waited_for",
     copied([](unsigned i) { __pipeline_wait_prior(1), __syncthreads(), take(i ^ 64), __syncthreads(); })},
    {"copy_without_a_barrier", copied([](unsigned i) { __pipeline_wait_prior(0), take(i ^ 64), __syncthreads(); })},
    {"copy", copied([](unsigned i) { __pipeline_wait_prior(0), __syncthreads(), take(i ^ 64), __syncthreads(); })},
    {"own_copy", copied([](unsigned i) { __pipeline_wait_prior(0), take(i); })},
    {"copy_onto_what_is_read",
     [] {
       take(threadIdx.x ^ 64);
       __pipeline_memcpy_async(x + 4 * threadIdx.x, given, 16);
     }},
};

namespace ptx = elman::ptx;

// Each block of a cluster has two mbarriers. In phase 0 each counts 16 bytes per thread of a block.
struct InCluster {
  float* const x = reinterpret_cast<float*>(ptx::dynamic_shared());
  const unsigned i = threadIdx.x, base = ptx::shared_address(x);
  const int other = 1 - blockIdx.x;

  unsigned mbarrier(int b) const { return base + 4000 + 8 * b; }
  void send(unsigned to, int b = 0, unsigned pieces = 1) const {  // to piece `to` of the other block
    for (unsigned p = 0; p < pieces; p++)
      ptx::store_async(ptx::in_block(base + (to + p) * 16, other), make_uint4(1, 1, 1, 1), ptx::in_block(mbarrier(b), other));
  }
  void wait(int b = 0) const {
    while (!ptx::barrier_passed(mbarrier(b), 0)) {
    }
  }
  void read(unsigned piece) const { taken[64 * blockIdx.x + i] = x[4 * piece]; }
};
template <class Body>
std::function<void()> in_cluster(Body body) {
  return [=] {
    const InCluster c;
    if (c.i == 0)
      for (int b : {0, 1}) ptx::barrier_init(c.mbarrier(b), 1), ptx::barrier_expect(c.mbarrier(b), 64 * 16);
    ptx::cluster_sync();
    body(c);
    ptx::cluster_sync();
  };
}
// Block 0 reads and sends, as `body` says. Block 1 overwrites what was read, by st.async, once all of that has arrived.
template <class Body>
std::function<void()> sent_back(Body body) {
  return in_cluster([=](const InCluster& c) { blockIdx.x == 0 ? body(c) : (c.wait(), c.send(c.i)); });
}

const std::map<std::string, std::function<void()>> clusters = {
    {"sent", in_cluster([](auto& c) { c.send(c.i), c.wait(), c.read(c.i ^ 32); })},
    {"sent_and_not_waited_for", in_cluster([](auto& c) { c.send(c.i), c.read(c.i ^ 32); })},
    {"sent_and_waited_for_by_a_warp", in_cluster([](auto& c) {
       c.send(c.i);
       if (c.i < 32) c.wait();
       c.read(c.i ^ 1);
     })},
    {"sent_and_waited_for_by_a_warp_then_a_barrier", in_cluster([](auto& c) {
       c.send(c.i);
       if (c.i < 32) c.wait();
       __syncthreads(), c.read(c.i ^ 1);
     })},
    {"sent_and_another_mbarrier_waited_for", in_cluster([](auto& c) { c.send(c.i), c.send(64 + c.i, 1), c.wait(1), c.read(c.i); })},
    {"sent_onto_what_is_written", in_cluster([](auto& c) {
       c.x[4 * c.i] = 1.f;
       c.send(c.i);
     })},
    {"sent_onto_what_was_written", in_cluster([](auto& c) {
       c.x[4 * c.i] = 1.f;
       ptx::cluster_sync(), c.send(c.i);
     })},
    {"two_sent_to_a_place", in_cluster([](auto& c) { c.send(c.i / 2); })},
    {"sent_after_a_block_has_read", sent_back([](auto& c) { c.read(c.i), c.send(c.i); })},
    {"sent_before_a_block_has_read", sent_back([](auto& c) { c.send(c.i), c.read(c.i); })},
    {"sent_for_a_warp", sent_back([](auto& c) {
       c.read(c.i), __syncwarp();
       if (c.i % 32 == 0) c.send(c.i, 0, 32);
     })},
    {"sent_for_a_warp_by_shuffles", sent_back([](auto& c) {
       c.read(c.i), __shfl_sync(~0u, 0.f, 0);
       if (c.i % 32 == 0) c.send(c.i, 0, 32);
     })},
    {"sent_for_two_warps", sent_back([](auto& c) {
       c.read(c.i), __shfl_sync(~0u, 0.f, 0);
       if (c.i == 0) c.send(0, 0, 64);
     })},
    {"initialised_by_a_lane",
     [] {
       const InCluster c;
       if (c.i == 0) ptx::barrier_init(c.mbarrier(0), 1);
       __shfl_sync(~0u, 0.f, 0);
       if (c.i == 1) ptx::barrier_expect(c.mbarrier(0), 0);
     }},
};

}  // namespace

int main(int, char** names) {
  if (const auto kernel = clusters.find(names[1]); kernel != clusters.end())
    return emulated::launch_together(dim3(2), 64, 2, 4096, kernel->second);
  emulated::launch(1, 128, shared, sizeof(shared), kernels.at(names[1]));
}

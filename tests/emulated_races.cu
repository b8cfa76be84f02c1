// For test_kernels_races.py: small kernels that race, each beside one that does not. `emulated_races NAME` runs one of them, 128 threads.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <elman/matrix_state_ptx.cuh>

#include <functional>
#include <map>
#include <string>

alignas(16) unsigned char shared[4096];
alignas(16) float given[128], taken[128];  // where others may look: so they are written

namespace {

using elman::matrix::team_barrier;

float* const x = reinterpret_cast<float*>(shared);

// x[i] by thread i, and x[from] after `order`.
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
std::function<void()> copied(Between between) {  // 16 bytes a thread
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
    {"half_of_the_warps",  // the others do not take part, and read what these wrote
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

}  // namespace

int main(int, char** names) { emulated::launch(1, 128, shared, sizeof(shared), kernels.at(names[1])); }

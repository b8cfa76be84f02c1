// Launches of causal_conv.cuh and causal_conv_backward.cuh.
#pragma once

#include "causal_conv_backward.cuh"

namespace elman::conv {

// Channels per lane, as many as registers allow.
template <int K>
constexpr int kChannels = K > 8   ? 1
                          : K > 4 ? 2
                                  : 4;

template <class Elem, int K, int V, bool silu, bool marked>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Args<Elem> g) {
  forward<Elem, K, V, silu, marked>(g);
}
template <class Elem, int K, int V, bool silu, bool marked>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Args<Elem> g) {
  backward<Elem, K, V, silu, marked>(g, reinterpret_cast<char*>(dynamic_shared()));
}

// Steps per warp of the backward: as many as leave each multiprocessor six warps, so that few steps are read twice and few
// shares are summed.
template <int K>
int chunk_of(long long T, long long B, long long C) {
  const long long tile = kLanes * kChannels<K>, rows = B * ((C + tile - 1) / tile), wanted = 6LL * multiprocessors();
  int chunk = 128;
  while (chunk > 16 && rows * ((T + chunk - 1) / chunk) < wanted) chunk /= 2;
  return chunk;
}
inline long long units(long long T, long long B, int chunk) { return (B * ((T + chunk - 1) / chunk) + kWarps - 1) / kWarps; }

template <int K>
long long shares(long long T, long long B, long long C) {
  return units(T, B, chunk_of<K>(T, B, C));
}

template <class Elem, int K, int V, bool back, bool silu, bool marked>
cudaError_t launch(const Args<Elem>& g, bool early, cudaStream_t stream) {
  const long long blocks = units(g.T, g.B, g.chunk) * ((g.C + kLanes * V - 1) / (kLanes * V));
  if constexpr (back) {
    constexpr int bytes = Ahead<Elem, V>::bytes;
    static_assert(bytes >= kThreads * V * int(sizeof(float)), "sums of the warps take the same place");
    return start(backward_kernel<Elem, K, V, silu, marked>, g, blocks, kThreads, bytes, false, stream);
  } else {
    return start(forward_kernel<Elem, K, V, silu, marked>, g, blocks, kThreads, 0, early, stream);
  }
}
template <class Elem, int K, int V, bool back>
cudaError_t launch(const Args<Elem>& g, bool silu, bool early, cudaStream_t stream) {
  if (g.mask || g.starts)
    return silu ? launch<Elem, K, V, back, true, true>(g, early, stream) : launch<Elem, K, V, back, false, true>(g, early, stream);
  return silu ? launch<Elem, K, V, back, true, false>(g, early, stream) : launch<Elem, K, V, back, false, false>(g, early, stream);
}
// `pieces`: all rows can be moved in pieces of 16 bytes.
template <class Elem, int K, bool back>
cudaError_t launch(Args<Elem> g, bool pieces, bool silu, bool early, cudaStream_t stream) {
  // Forward: one round, or several where the window is long.
  g.chunk = back ? chunk_of<K>(g.T, g.B, g.C) : (K + 3) / 4 * kSteps;
  return pieces ? launch<Elem, K, kChannels<K>, back>(g, silu, early, stream) : launch<Elem, K, 1, back>(g, silu, early, stream);
}

}  // namespace elman::conv

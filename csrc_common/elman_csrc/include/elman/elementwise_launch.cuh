// Launches of elementwise.cuh, and the choice of channels per lane and steps per segment for a shape.
#pragma once

#include "elementwise.cuh"

namespace elman::elementwise {

constexpr int kStepThreads = 128;

// Steps of a segment. A segment costs some 400 clocks besides its steps, so a warp that is alone on its scheduler takes long
// ones. But in the backward the steps take registers, and shared memory limits the warps of a multiprocessor.
template <class Elem, class Cell, int V>
constexpr int kForwardSteps = Cell::streams * V * int(sizeof(Elem)) <= 8 ? 2 * kSteps : kSteps;
template <class Elem, class Cell, int V, bool marked>
constexpr int kBackwardSteps =
    V * sizeof(Elem) == 2 && !marked && Cell::streams + Cell::states + Cell::vectors <= 3 ? 2 * kSteps : kSteps;

template <class Elem, class Cell, int V, bool marked>
__global__ void __launch_bounds__(kLanes) forward_kernel(const __grid_constant__ Args<Elem, Cell> g) {
  forward<Elem, Cell, V, kForwardSteps<Elem, Cell, V>, marked>(g, reinterpret_cast<char*>(dynamic_shared()));
}
template <class Elem, class Cell, int V, bool marked>
__global__ void __launch_bounds__(kLanes) backward_kernel(const __grid_constant__ Args<Elem, Cell> g) {
  backward<Elem, Cell, V, kBackwardSteps<Elem, Cell, V, marked>, marked>(g, reinterpret_cast<char*>(dynamic_shared()));
}
template <class Elem, class Cell>
__global__ void __launch_bounds__(kStepThreads) step_kernel(const __grid_constant__ Args<Elem, Cell> g) {
  step(g);
}

template <class Elem, class Cell, int V, bool back, bool marked>
cudaError_t launch(const Args<Elem, Cell>& g, cudaStream_t stream) {
  const long long blocks = (long long)g.B * ((g.d + kLanes * V - 1) / (kLanes * V));
  if constexpr (back) {
    using Inputs = Ring<Elem, V, kBackwardSteps<Elem, Cell, V, marked>, Cell::streams + 1, Cell::states>;
    return start(backward_kernel<Elem, Cell, V, marked>, g, blocks, kLanes, Inputs::bytes, false, stream);
  } else {
    using Inputs = Ring<Elem, V, kForwardSteps<Elem, Cell, V>, Cell::streams, 0>;
    return start(forward_kernel<Elem, Cell, V, marked>, g, blocks, kLanes, Inputs::bytes, false, stream);
  }
}
// Channels per lane: two of 16 bits if most schedulers still have a warp and the states of a segment fit into registers, else one.
template <class Elem, class Cell, bool back, bool marked>
cudaError_t launch(const Args<Elem, Cell>& g, cudaStream_t stream) {
  if constexpr (sizeof(Elem) == 2 && (!back || Cell::streams + Cell::states + (marked ? Cell::vectors : 0) <= 4)) {
    if (g.pieces && (long long)g.B * ((g.d + 63) / 64) >= 3LL * multiprocessors())
      return launch<Elem, Cell, 2, back, marked>(g, stream);
  }
  return launch<Elem, Cell, 1, back, marked>(g, stream);
}
template <class Elem, class Cell, bool back>
cudaError_t launch(const Args<Elem, Cell>& g, cudaStream_t stream) {
  return g.mask || g.starts ? launch<Elem, Cell, back, true>(g, stream) : launch<Elem, Cell, back, false>(g, stream);
}
template <class Elem, class Cell>
cudaError_t launch_step(const Args<Elem, Cell>& g, bool early, cudaStream_t stream) {
  const long long blocks = ((long long)g.B * g.d + kStepThreads - 1) / kStepThreads;
  return start(step_kernel<Elem, Cell>, g, blocks, kStepThreads, 0, early, stream);
}

}  // namespace elman::elementwise

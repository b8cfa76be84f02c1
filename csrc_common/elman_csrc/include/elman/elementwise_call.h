// The C interface of the elementwise modules, host and CUDA: the arguments of a call.
//
//   elman_elementwise_declares(i)   streams, vectors and states of the cell; steps between checkpoints, S
//   elman_elementwise_forward(call), _backward(call), _step(call) -> null, or an error message
//
// On the host these three end in _float32 or _float64. Streams, y, gy and dstream are in the storage type; everything else is float, or double with
// double. A view is a [T,B,d] tensor of adjacent channels whose strides count elements; it may be a slice of a wider tensor. Tensors without strides
// are contiguous. Members that a direction does not use are 0. Outputs may hold anything before the call.
//
//   forward   reads stream, vector, h0, mask, starts, initial; writes y, last and, unless it is 0, checkpoints: the states before steps 0,
//             S, 2S, ... On the host there are none.
//   backward  reads stream, vector, gy, g_last, checkpoints (on the host h0), mask, starts, initial; writes dstream, dh0, and each row's
//             share of dvector and dinitial, which the caller adds up over B
//   step      one time step: reads stream, vector, h0, mask, starts, initial; writes y and last, which may be h0. CUDA only.
//
// mask [T,B]: 0 holds the state; y is 0 there, and gradients flow back only through the state; null: nothing is masked. starts [T,B]: at a 1, the state
// before that step is `initial` (null: zero), whether or not the step is held. Rows with 16-byte addresses and strides are read fastest; float tensors
// have 16-byte addresses.
#pragma once

#include "call.h"
#include "elementwise_cell.h"

struct ElementwiseCall {
  std::int64_t steps, batch, width;
  CallView stream[elman::elementwise::kMostStreams], y;
  std::uint64_t vector[elman::elementwise::kMostVectors];  // [d] each
  std::uint64_t h0, last, checkpoints;  // [states,B,d], [states,B,d], [ceil(T/S),states,B,d]
  std::uint64_t mask, starts, initial;  // [T,B] bytes, [T,B] bytes, [states,d]
  CallView gy, dstream[elman::elementwise::kMostStreams];
  std::uint64_t g_last, dh0, dvector, dinitial;  // [states,B,d], [states,B,d], [vectors,B,d], [states,B,d]
  std::int64_t early;  // step: whether it may start before the previous kernel has ended; it then waits for that kernel itself
  std::uint64_t cuda_stream;
  std::int64_t threads;  // CPU only
};
ELMAN_LAYOUT(elementwise, ElementwiseCall, steps, batch, width, stream, y, vector, h0, last, checkpoints, mask, starts, initial, gy,
             dstream, g_last, dh0, dvector, dinitial, early, cuda_stream, threads)

namespace elman::elementwise {

template <class Cell>
std::int64_t declares(std::int64_t i) {
  const std::int64_t all[] = {Cell::streams, Cell::vectors, Cell::states, kSteps};
  return all[i];
}

enum class Direction { forward, backward, step };

// An error message if something is missing or too large, else null.
template <class Cell>
const char* refuse(const ElementwiseCall& call, Direction direction, bool checkpoints) {
  const bool back = direction == Direction::backward;
  if (call.steps < 1 || call.batch < 1 || call.width < 1) return "a size is below 1";
  if (call.steps > (1 << 30) || call.batch > (1 << 30) || call.width > (1 << 30)) return "a size is above 2^30";
  if (direction == Direction::step && call.steps != 1) return "a step is one time step";
  for (int k = 0; k < Cell::streams; ++k) {
    if (!call.stream[k].address) return "a stream is missing";
    if (back && !call.dstream[k].address) return "the gradient of a stream is missing";
  }
  for (int k = 0; k < Cell::vectors; ++k)
    if (!call.vector[k]) return "a vector is missing";
  if (back && !(checkpoints ? call.checkpoints : call.h0)) return checkpoints ? "the checkpoints are missing" : "h0 is missing";
  if (back && Cell::vectors && !call.dvector) return "the place of the vectors' gradient is missing";
  if (back && call.starts && call.initial && !call.dinitial) return "the place of the initial state's gradient is missing";
  return nullptr;
}

}  // namespace elman::elementwise

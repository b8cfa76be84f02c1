// Launches on emulated threads, with the interface of decode_launch.cuh.
#pragma once

#include <elman/decode.cuh>
#include <elman/decode_draw.cuh>
#include <elman/decode_norm.cuh>

namespace elman::decode {

alignas(16) inline unsigned char shared_memory[227 << 10];

inline int most_shared_bytes() { return int(sizeof(shared_memory)); }

template <class Elem, class Cell, int tiles>
cudaError_t launch(const Args<Elem>& g, bool, cudaStream_t) {
  const int bytes = shared_bytes<Cell, tiles>(g.rows, g.inputs, g.outputs);
  if (bytes > int(sizeof(shared_memory))) return cudaErrorInvalidConfiguration;
  int blocks = blocks_for(g.outputs);
  for (int i = 0; i < g.maps; ++i) blocks += blocks_for(g.extra_step[i]);
  return emulated::launch(unsigned(blocks), kThreads, shared_memory, bytes, [&] { block<Elem, Cell, tiles>(g, shared_memory); });
}
template <class Elem>
cudaError_t launch_norm(const NormArgs<Elem>& g, int rows, bool, cudaStream_t) {
  const int bytes = norm_shared_bytes(g.width);
  if (bytes > int(sizeof(shared_memory))) return cudaErrorInvalidConfiguration;
  return emulated::launch(unsigned(rows), kNormThreads, shared_memory, bytes,
                          [&] { norm_block(g, reinterpret_cast<float*>(shared_memory)); });
}
template <class Elem>
cudaError_t launch_draw(const DrawArgs<Elem>& g, int rows, bool, cudaStream_t) {
  return emulated::launch(unsigned(rows), kDrawThreads, shared_memory, sizeof(DrawShared),
                          [&] { draw_block(g, *reinterpret_cast<DrawShared*>(shared_memory)); });
}

}  // namespace elman::decode

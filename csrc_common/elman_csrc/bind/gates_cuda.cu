// Gated cells on the GPU as one module: one cell, 16-bit storage type and width. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=type  -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_WIDTH=d of a head
//   -DELMAN_HEADS=number of heads
//   -DELMAN_TILES=1 | 2: tiles of 8 batch rows per block  -DELMAN_PACKED=0 | 1: whether documents start inside rows
// The interface is that of gates_call.h.
#include <elman/gates_call.h>
#include <elman/stages.cuh>
#include <elman/stored.cuh>

#include <algorithm>
#include <cstdio>

#include ELMAN_CELL_HEADER

#ifndef ELMAN_DTYPE  // defaults for builds without a known shape
#define ELMAN_DTYPE 2
#define ELMAN_WIDTH 512
#define ELMAN_HEADS 1
#define ELMAN_TILES 1
#define ELMAN_PACKED 0
#endif

namespace {

using Cell = ELMAN_CELL;
using Elem = elman::Stored<ELMAN_DTYPE>;
using elman::at;
constexpr bool packed = ELMAN_PACKED;
constexpr int d = ELMAN_WIDTH, heads = ELMAN_HEADS, N = ELMAN_TILES, S = Cell::staged ? 1 : 2, parts = d / elman::gates::kOwned;
static_assert(d % (S * elman::gates::kOwned) == 0, "clusters share channels evenly");
static_assert(heads == 1 || !Cell::staged, "a staged cell has no heads");

const char* said(cudaError_t status, const char* what) {
  static thread_local char buffer[256];
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  std::snprintf(buffer, sizeof buffer, "%s: %s", what, cudaGetErrorString(status));
  return buffer;
}

template <bool masked, bool backward>
struct Kernel {
  static constexpr auto chosen() {
    if constexpr (Cell::staged) return elman::gates::stages_kernel<Cell, Elem, d, N, masked, packed, backward>;
    else return elman::gates::gates_kernel<Cell, Elem, d, heads, S, N, masked, packed, backward>;
  }
  static constexpr int shared_bytes() {
    if constexpr (Cell::staged) return elman::gates::Stages<Cell, Elem, d, N, backward>::bytes;
    else return elman::gates::Layout<Cell, Elem, d, S, N, backward>::bytes;
  }
  static constexpr auto function = chosen();
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  Kernel(int groups, cudaStream_t stream) {
    config.gridDim = dim3(parts, groups, heads), config.blockDim = elman::dense::kThreads, config.stream = stream;
    config.dynamicSmemBytes = shared_bytes();
    config.attrs = attributes, config.numAttrs = backward ? 2 : 1;
    attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = S, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  }
  cudaError_t prepare() {
    return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.dynamicSmemBytes));
  }
  // Number of groups that the current device holds together; -1 if unknown.
  int capacity() {
    int fit = 0, device = 0, processors = 0;
    if (prepare() != cudaSuccess) return -1;
    config.attrs = attributes + 1, config.numAttrs = 1;  // clusters only
    if (backward) return cudaOccupancyMaxActiveClusters(&fit, function, &config) == cudaSuccess ? fit * S / (parts * heads) : -1;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, function, elman::dense::kThreads, config.dynamicSmemBytes) ||
        cudaGetDevice(&device) || cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
      return -1;
    return fit * processors / (parts * heads);
  }
};

template <bool masked, bool backward>
cudaError_t launch(elman::gates::GatesArgs<Elem> g, int groups, cudaStream_t stream) {
  const int tiles = (g.B + g.rows - 1) / g.rows;
  cudaError_t status = Kernel<masked, backward>(1, stream).prepare();
  for (g.first_tile = 0; g.first_tile < tiles && status == cudaSuccess; g.first_tile += groups) {
    Kernel<masked, backward> kernel(tiles - g.first_tile < groups ? tiles - g.first_tile : groups, stream);
    status = cudaLaunchKernelEx(&kernel.config, kernel.function, g);
  }
  return status;
}

template <bool backward>
const char* run(const GatesCall& call) {
  if (call.columns != d || call.width != heads * d) return "this module was compiled for another width or number of heads";
  if (packed != (call.starts != 0)) return "this module was compiled for calls with starts of documents, or for calls without";
  elman::gates::GatesArgs<Elem> g{};
  const CallView& main = backward ? call.gy : call.u;
  g.w = at<const Elem>(call.w), g.main = at<const Elem>(main.address), g.main_t = main.t, g.main_b = main.b;
  g.bias = at<const float>(call.b), g.mask = at<const unsigned char>(call.mask);
  g.starts = at<const unsigned char>(call.starts);
  g.h0 = at<const float>(backward ? call.g_last : call.h0), g.h1 = at<float>(backward ? call.dh0 : call.last);
  if (Cell::memory) g.s0 = g.h0 + call.batch * call.width, g.s1 = g.h1 + call.batch * call.width;
  g.history = at<Elem>(call.history), g.kept = at<Elem>(call.kept), g.memory = at<Elem>(call.memory);
  g.y = at<Elem>(call.y), g.dp = at<Elem>(call.dp), g.du = at<Elem>(call.du);
  g.dbias = at<float>(call.dbias);
  g.T = static_cast<int>(call.steps), g.B = static_cast<int>(call.batch), g.rows = static_cast<int>(call.rows);
  g.timeout_ns = call.timeout_ns, g.error = at<int>(call.error);
  const auto stream = at<CUstream_st>(call.stream);
  const std::size_t plane = static_cast<std::size_t>(g.B) * heads * d * (backward ? Cell::gates : 1);
  const int filled = Cell::staged ? g.T : std::min(g.T, elman::dense::kFilled);  // steps filled with the sentinel
  Elem* const first = backward ? g.dp + (g.T - filled) * plane : g.history + plane;
  cudaError_t status = cudaMemsetAsync(first, 0xff, filled * plane * sizeof(Elem), stream);
  if (Cell::staged && !backward && status == cudaSuccess)
    status = cudaMemsetAsync(g.memory, 0xff, filled * plane * sizeof(Elem), stream);
  if (status != cudaSuccess) return said(status, "memset");
  const int groups = static_cast<int>(call.groups);
  return said(g.mask ? launch<true, backward>(g, groups, stream) : launch<false, backward>(g, groups, stream), "launch");
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_gates_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT std::int64_t elman_gates_declares(std::int64_t i) { return elman::gates_declares<Cell>(i); }
ELMAN_EXPORT const char* elman_gates_forward(const GatesCall* call) { return run<false>(*call); }
ELMAN_EXPORT const char* elman_gates_backward(const GatesCall* call) { return run<true>(*call); }
// Number of groups that can be resident together on the current device; -1 if unknown.
ELMAN_EXPORT std::int64_t elman_gates_capacity(std::int64_t backward) {
  return backward ? Kernel<false, true>(1, nullptr).capacity() : Kernel<false, false>(1, nullptr).capacity();
}

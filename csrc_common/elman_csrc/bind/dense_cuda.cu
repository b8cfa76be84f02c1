// The dense skeleton on the GPU as one module: one kind of persistent launch of one cell, for one storage type and width.
// Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e42::Cell
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_WIDTH=d
//   -DELMAN_KIND=cluster | grid | tiles  -DELMAN_SPILL=chunks of W in shared memory  -DELMAN_WIDE=1 | 2: tiles of up to 8 or
//   16 rows  -DELMAN_INPUT=Projected | Tied | TiedSilu  -DELMAN_SLOTS=blocks of a block-diagonal matrix
//   -DELMAN_PACKED=0 | 1: whether documents start inside rows
// Python chooses the kind for a shape (elman_core/kernels/dense/plan.py).
#include <elman/dense.cuh>

#include "dense_cuda_common.h"

#include <algorithm>
#include <map>
#include <mutex>

#ifndef ELMAN_KIND
#define ELMAN_KIND grid
#define ELMAN_SPILL 0
#define ELMAN_WIDE 1
#endif
#ifndef ELMAN_SLOTS
#define ELMAN_SLOTS 1
#endif
#ifndef ELMAN_INPUT
#define ELMAN_INPUT Projected
#endif

namespace {

namespace dense = elman::dense;

enum class Kind { cluster, grid, tiles };
constexpr Kind kind = Kind::ELMAN_KIND;
constexpr int spill = ELMAN_SPILL, wide = ELMAN_WIDE;
constexpr dense::Input input = dense::Input::ELMAN_INPUT;
constexpr bool tied = input != dense::Input::Projected;
constexpr dense::Exchange how = kind == Kind::cluster ? dense::Exchange::Cluster : dense::Exchange::Grid;
constexpr int slots = ELMAN_SLOTS, block = d / slots, parts = (block + dense::kOwned<Elem> - 1) / dense::kOwned<Elem>;

// The part of a launch that depends on the instantiation. Attributes belong to the current device.
template <bool masked, bool backward>
struct Kernel {
  static constexpr auto function =
      dense::dense_kernel<Cell, Elem, block, slots, spill, wide, how, kind != Kind::tiles, input, masked, packed, backward>;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute[1];
  Outcome outcome;

  // The last capacity asked for. It does not change, and asking costs more than a launch.
  struct Known {
    int device = -1, fit = -1;
    std::size_t bytes = 0;
  };
  inline static std::mutex mutex;
  inline static Known known;
  inline static std::map<int, std::size_t> granted;  // by device: the most shared memory granted so far

  Kernel(int tiles, int groups, cudaStream_t stream) {
    config.gridDim = dim3(parts, groups, slots), config.blockDim = dense::kThreads, config.stream = stream;
    config.dynamicSmemBytes = dense::Layout<Elem, block, spill, wide, how>::bytes((tiles + groups - 1) / groups);
    config.attrs = attribute, config.numAttrs = 1;
    if (how == dense::Exchange::Cluster) {
      attribute[0].id = cudaLaunchAttributeClusterDimension;
      attribute[0].val.clusterDim.x = parts, attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    } else {
      attribute[0].id = cudaLaunchAttributeCooperative;
      attribute[0].val.cooperative = 1;
    }
  }
  // Number of groups that can be resident together on the current device; -1 if unknown.
  int capacity() {
    int device = 0;
    if (outcome.failed(cudaGetDevice(&device), "device")) return -1;
    const std::lock_guard<std::mutex> lock(mutex);
    if (known.device == device && known.bytes == config.dynamicSmemBytes) return known.fit;
    known = {};
    const int fit = ask(device);
    if (!outcome.said) known = {device, fit, config.dynamicSmemBytes};
    return fit;
  }
  int ask(int device) {
    int fit = 0, processors = 0;
    std::size_t& most = granted[device];
    most = std::max<std::size_t>(most, config.dynamicSmemBytes);
    if (outcome.failed(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)),
                       "shared memory"))
      return -1;
    if (how == dense::Exchange::Cluster) {
      if (outcome.failed(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size"))
        return -1;
      return outcome.failed(cudaOccupancyMaxActiveClusters(&fit, function, &config), "occupancy") ? -1 : fit;
    }
    if (outcome.failed(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, function, dense::kThreads, config.dynamicSmemBytes),
                       "occupancy") ||
        outcome.failed(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device"))
      return -1;
    return fit * processors / (parts * slots);
  }
  const char* launch(const Args& g) {
    const int fit = capacity(), groups = config.gridDim.y;
    const int needed = how == dense::Exchange::Cluster ? 1 : groups;  // independent clusters may run one after another
    if (outcome.said) return outcome.said;
    if (fit < needed) {
      std::snprintf(Outcome::text(), 256, "the launch needs %d groups of %d blocks on the GPU together, and this GPU holds %d",
                    needed, parts, fit);
      return Outcome::text();
    }
    outcome.failed(cudaLaunchKernelEx(&config, function, g), "launch");
    return outcome.said;
  }
};

template <bool backward>
const char* run(const DenseCall& call) {
  if (const char* why = refuse(call)) return why;
  if (call.slots > 1 ? call.slots != slots : slots > 1) return "this module was compiled for another number of slots";
  const Args g = describe<backward>(call);
  const auto stream = at<CUstream_st>(call.stream);
  const std::size_t plane = static_cast<std::size_t>(g.B) * d;
  Outcome outcome;
  const int filled = std::min(g.T, dense::kFilled);  // steps filled with the sentinel
  Elem* const first = backward ? g.da + (g.T - filled) * plane : (tied ? g.sums : g.history) + plane;
  if (how == dense::Exchange::Grid && outcome.failed(cudaMemsetAsync(first, 0xff, filled * plane * sizeof(Elem), stream), "memset"))
    return outcome.said;
  const int groups = static_cast<int>(call.groups);
  return g.mask ? Kernel<true, backward>(g.tiles, groups, stream).launch(g)
                : Kernel<false, backward>(g.tiles, groups, stream).launch(g);
}

}  // namespace

ELMAN_EXPORT const char* elman_dense_forward(const DenseCall* call) { return run<false>(*call); }
ELMAN_EXPORT const char* elman_dense_backward(const DenseCall* call) { return run<true>(*call); }

// Number of groups of `tiles` tiles that can be resident together on the current device; -1 if unknown.
ELMAN_EXPORT std::int64_t elman_dense_capacity(std::int64_t tiles, std::int64_t backward) {
  const int each = static_cast<int>(tiles);
  return backward ? Kernel<false, true>(each, 1, nullptr).capacity() : Kernel<false, false>(each, 1, nullptr).capacity();
}
ELMAN_EXPORT std::int64_t elman_dense_shared_bytes(std::int64_t tiles) {
  return dense::Layout<Elem, block, spill, wide, how>::bytes(static_cast<int>(tiles));
}

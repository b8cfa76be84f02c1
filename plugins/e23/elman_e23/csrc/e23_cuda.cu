// E23's kernels as a Python module, for one storage type and width: -DELMAN_DTYPE=code (elman/dtype.h) -DELMAN_WIDTH=d
// -DELMAN_PACKED=0 | 1: whether documents start inside rows.
//
//   run(backward, addresses, numbers)   addresses in the order of Args, numbers T, B, timeout_ns, stream; raises RuntimeError
//   rows(batch) -> batch rows of a cluster, 0 if the GPU holds no cluster
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <elman/stored.cuh>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "e23.cuh"

namespace {

namespace e23 = elman::e23;
using Elem = elman::Stored<ELMAN_DTYPE>;
constexpr int d = ELMAN_WIDTH;
constexpr bool packed = ELMAN_PACKED;
using Layout = e23::Layout<Elem, d>;
using Function = void (*)(e23::Args<Elem>);

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string("e23: ") + cudaGetErrorString(status));
}

struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster[1];
  Launch(Function function, int clusters, cudaStream_t stream) {
    must(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::bytes));
    must(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    config.gridDim = dim3(Layout::P, clusters), config.blockDim = elman::dense::kThreads, config.stream = stream;
    config.dynamicSmemBytes = Layout::bytes, config.attrs = cluster, config.numAttrs = 1;
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = Layout::P, cluster[0].val.clusterDim.y = cluster[0].val.clusterDim.z = 1;
  }
};

// Returns the fewest rows per cluster with which all clusters run together; above 8 rows, clusters run one after another.
int rows(int batch) {
  int least = elman::dense::kThreads;
  for (Function function : {e23::forward_kernel<Elem, d, true, packed>, e23::backward_kernel<Elem, d, true, packed>}) {
    int fit = 0;
    Launch launch(function, 1, nullptr);
    must(cudaOccupancyMaxActiveClusters(&fit, function, &launch.config));
    least = fit < least ? fit : least;
  }
  const int each = least ? (batch + least - 1) / least : 0;
  return each < elman::dense::kRows ? each : elman::dense::kRows;
}

void run(bool backward, const std::vector<std::uint64_t>& a, int each, int T, int B, unsigned long long timeout_ns,
         std::uint64_t stream) {
  auto at = [&](int i) { return reinterpret_cast<void*>(a.at(i)); };
  auto elems = [&](int i) { return static_cast<Elem*>(at(i)); };
  auto floats = [&](int i) { return static_cast<float*>(at(i)); };
  const e23::Args<Elem> g{elems(0),
                          elems(1),
                          elems(2),
                          floats(3),
                          floats(4),
                          static_cast<unsigned char*>(at(5)),
                          elems(6),
                          elems(7),
                          elems(8),
                          floats(9),
                          floats(10),
                          elems(11),
                          elems(12),
                          floats(13),
                          floats(14),
                          T,
                          B,
                          each,
                          static_cast<int*>(at(15)),
                          timeout_ns,
                          static_cast<unsigned char*>(at(16)),
                          floats(17),
                          floats(18)};
  if (packed != (g.starts != nullptr))
    throw std::runtime_error("e23: this module was compiled for calls with starts of documents, or without");
  const Function function =
      backward ? g.mask ? e23::backward_kernel<Elem, d, true, packed> : e23::backward_kernel<Elem, d, false, packed>
      : g.mask ? e23::forward_kernel<Elem, d, true, packed>
               : e23::forward_kernel<Elem, d, false, packed>;
  const Launch launch(function, (B + each - 1) / each, reinterpret_cast<cudaStream_t>(stream));
  must(cudaLaunchKernelEx(&launch.config, function, g));
}

}  // namespace

PYBIND11_MODULE(ELMAN_MODULE, m) {
  m.def("rows", &rows);
  m.def("run", &run);
}

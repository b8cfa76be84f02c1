// For test_kernels_dense_gpu.py: one forward and one backward of a compiled plan on a small problem, to be run under
// compute-sanitizer.
#include <vector>

#include "dense_cuda.cu"

namespace {

void must(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

template <class T>
T* filled(std::size_t count, float scale, unsigned seed) {  // seed 0: NaN
  std::vector<T> values(count);
  for (auto& v : values) {
    seed = seed ? seed * 1664525u + 1013904223u : 0;
    v = static_cast<T>(seed ? ((seed >> 8) / 16777216.f - 0.5f) * scale : __builtin_nanf(""));
  }
  T* p;
  must(cudaMalloc(&p, count * sizeof(T)) == cudaSuccess, "malloc");
  must(cudaMemcpy(p, values.data(), count * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess, "copy");
  return p;
}

template <class T>
bool finite(const T* p, std::size_t count) {
  std::vector<T> values(count);
  must(cudaMemcpy(values.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess, "copy back");
  for (auto v : values)
    if (!(static_cast<float>(v) - static_cast<float>(v) == 0.f)) return false;
  return true;
}

template <class T>
std::uint64_t address(T* p) {
  return reinterpret_cast<std::uint64_t>(p);
}

}  // namespace

int main() {
  constexpr int T = 5, B = 11 * wide;
  const std::size_t plane = static_cast<std::size_t>(B) * d, all = T * plane;
  for (bool with_mask : {false, true}) {
    DenseCall call{};
    Elem *history = filled<Elem>(all + plane, 0, 0), *y = filled<Elem>(all, 0, 0), *da = filled<Elem>(all, 0, 0), *dextra[4];
    float *last = filled<float>(plane, 0, 0), *dh0 = filled<float>(plane, 0, 0);
    call.steps = T, call.batch = B, call.width = d, call.extras = Cell::extras;
    const auto input = [&](unsigned seed) {
      return DenseView{address(filled<Elem>(all, 1.f, seed)), static_cast<std::int64_t>(plane), d};
    };
    for (int i = 0; i < Cell::extras; ++i) {
      dextra[i] = filled<Elem>(all, 0, 0);
      call.extra[i] = input(3 + i), call.dextra[i] = address(dextra[i]);
    }
    call.w = address(filled<Elem>(static_cast<std::size_t>(d) * d, 0.1f, 1)), call.h0 = address(filled<float>(plane, 1.f, 2));
    call.history = address(history), call.y = address(y), call.last = address(last);
    call.g_last = address(filled<float>(plane, 1.f, 9)), call.da = address(da), call.dh0 = address(dh0);
    int* error = filled<int>(1, 0.f, 1);
    call.error = address(error), call.timeout_ns = 60000000000ull;
    if (with_mask) {
      std::vector<unsigned char> mask(T * B, 1);
      for (int i = 0; i < T * B; i += 3) mask[i] = 0;
      unsigned char* p;
      must(cudaMalloc(&p, mask.size()) == cudaSuccess &&
               cudaMemcpy(p, mask.data(), mask.size(), cudaMemcpyHostToDevice) == cudaSuccess,
           "mask");
      call.mask = address(p);
    }
    call.rows = (kind == Kind::tiles ? 3 : 4) * wide + (wide - 1), call.groups = kind == Kind::tiles ? 2 : 3;
    call.main = input(4);
    const char* said = elman_dense_forward(&call);
    must(said == nullptr, said);
    call.main = input(5);
    said = elman_dense_backward(&call);
    must(said == nullptr, said);
    must(cudaDeviceSynchronize() == cudaSuccess, "run");
    must(finite(history, all + plane) && finite(y, all) && finite(last, plane), "forward left something unwritten");
    must(finite(da, all) && finite(dh0, plane), "backward left something unwritten");
    for (int i = 0; i < Cell::extras; ++i) must(finite(dextra[i], all), "a gradient of an extra was left unwritten");
  }
  std::printf("every output was written\n");
}

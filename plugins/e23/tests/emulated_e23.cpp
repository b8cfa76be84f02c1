// E23's kernels on an emulated cluster, with the arguments of `run` in e23_cuda.cu: -DELEM=type -DWIDTH=d.
#include "e23.cuh"

namespace e23 = elman::e23;
using Layout = e23::Layout<ELEM, WIDTH>;

extern "C" void run(bool backward, void** a, int each, int T, int B, bool backwards) {
  auto elems = [&](int i) { return static_cast<ELEM*>(a[i]); };
  auto floats = [&](int i) { return static_cast<float*>(a[i]); };
  const auto mask = static_cast<unsigned char*>(a[5]);
  const e23::Args<ELEM> g{elems(0),   elems(1),  elems(2),  floats(3),  floats(4),  mask, elems(6), elems(7), elems(8), floats(9),
                          floats(10), elems(11), elems(12), floats(13), floats(14), T,    B,        each,     nullptr,  0};
  emulated::launch(Layout::P, Layout::P, (B + each - 1) / each, Layout::bytes, backwards, [&] {
    if (backward) mask ? e23::backward_kernel<ELEM, WIDTH, true>(g) : e23::backward_kernel<ELEM, WIDTH, false>(g);
    else mask ? e23::forward_kernel<ELEM, WIDTH, true>(g) : e23::forward_kernel<ELEM, WIDTH, false>(g);
  });
}

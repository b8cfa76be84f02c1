// Gated kernels on an emulated GPU, called by native.py's names: -DELMAN_CELL=type -DWIDTH=d -DTILES=of 8 batch rows.
#include <elman/stages.cuh>

#include ELMAN_CELL_HEADER

namespace {
using namespace elman::gates;
using Cell = ELMAN_CELL;
using Elem = __nv_bfloat16;
constexpr int d = WIDTH, N = TILES, S = Cell::staged ? 1 : 2;

template <bool masked, bool backward>
void launch(const GatesArgs<Elem>& g, bool backwards) {
  const int groups = (g.B + g.rows - 1) / g.rows;
  if constexpr (Cell::staged)
    emulated::launch(d / kOwned, S, groups, Stages<Cell, Elem, d, N, backward>::bytes, backwards,
                     [&] { stages_kernel<Cell, Elem, d, N, masked, backward>(g); });
  else
    emulated::launch(d / kOwned, S, groups, Layout<Cell, Elem, d, S, N, backward>::bytes, backwards,
                     [&] { gates_kernel<Cell, Elem, d, S, N, masked, backward>(g); });
}
}  // namespace

extern "C" void run(bool backward, void** a, int rows, int T, int B, bool backwards) {
  auto elems = [&](int i) { return static_cast<Elem*>(a[i]); };
  auto floats = [&](int i) { return static_cast<float*>(a[i]); };
  GatesArgs<Elem> g{};
  g.w = elems(0), g.main = elems(1), g.mask = static_cast<unsigned char*>(a[2]), g.bias = floats(3), g.h0 = floats(4),
  g.s0 = floats(5);
  g.history = elems(6), g.kept = elems(7), g.memory = elems(8), g.y = elems(9), g.dp = elems(10), g.du = elems(11);
  g.h1 = floats(12), g.s1 = floats(13), g.dbias = floats(14), g.T = T, g.B = B, g.rows = rows;
  g.main_b = (backward ? 1 : Cell::gates) * d, g.main_t = g.main_b * B;
  const std::size_t plane = static_cast<std::size_t>(B) * d * (backward ? Cell::gates : 1) * sizeof(Elem);
  const int filled = Cell::staged ? T : std::min(T, kFilled);  // as in gates_cuda.cu; what is beyond must not matter
  char* const exchange = static_cast<char*>(a[backward ? 10 : 6]) + (backward ? 0 : plane);
  std::memset(exchange, 0x40, T * plane);
  std::memset(exchange + (backward ? (T - filled) * plane : 0), 0xff, filled * plane);
  if (Cell::staged && !backward) std::memset(a[8], 0xff, T * plane);
  if (backward) g.mask ? launch<true, true>(g, backwards) : launch<false, true>(g, backwards);
  else g.mask ? launch<true, false>(g, backwards) : launch<false, false>(g, backwards);
}

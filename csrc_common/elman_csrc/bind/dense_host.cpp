// The dense skeleton on the host as one module, for float and double. Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e42::Cell
// The interface is that of dense_call.h.
#include <elman/dense_call.h>
#include <elman/dense_host.h>

#include ELMAN_CELL_HEADER

namespace {

using Cell = ELMAN_CELL;
static_assert(Cell::extras <= 4, "DenseCall holds four");

using elman::at;
template <class T>
elman::View<T> view(const CallView& v) {
  return {at<T>(v.address), v.t, v.b};
}
// A contiguous [T,B,d] tensor.
template <class T>
elman::View<T> whole(const DenseCall& call, std::uint64_t address) {
  return {at<T>(address), call.batch * call.width, call.width};
}

template <class T>
elman::DenseHost<T, Cell::extras> describe(const DenseCall& call) {
  elman::DenseHost<T, Cell::extras> run{};
  run.steps = call.steps, run.batch = call.batch, run.width = call.width;
  run.block = call.slots > 1 ? call.width / call.slots : call.width;
  for (int k = 0; k < Cell::extras; ++k) run.extra[k] = view<const T>(call.extra[k]);
  run.w = at<const T>(call.w), run.history = at<T>(call.history), run.mask = at<const unsigned char>(call.mask);
  run.starts = at<const unsigned char>(call.starts);
  run.a = at<T>(call.a);
  return run;
}

template <class T>
const char* forward(const DenseCall& call) {
  if (call.extras != Cell::extras) return "this cell reads another number of extras";
  elman::dense_forward<Cell, T>(describe<T>(call), view<const T>(call.u), at<const T>(call.h0), whole<T>(call, call.y),
                                at<T>(call.last));
  return nullptr;
}

template <class T>
const char* backward(const DenseCall& call) {
  if (call.extras != Cell::extras) return "this cell reads another number of extras";
  elman::View<T> dextra[Cell::extras > 0 ? Cell::extras : 1];
  for (int k = 0; k < Cell::extras; ++k) dextra[k] = whole<T>(call, call.dextra[k]);
  elman::dense_backward<Cell, T>(describe<T>(call), view<const T>(call.gy), at<const T>(call.g_last), whole<T>(call, call.da),
                                 dextra, at<T>(call.dh0));
  return nullptr;
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_dense_declares(std::int64_t i) { return i ? elman::UsesA<Cell>::value : Cell::extras; }
ELMAN_EXPORT const char* elman_dense_forward_float32(const DenseCall* call) { return forward<float>(*call); }
ELMAN_EXPORT const char* elman_dense_forward_float64(const DenseCall* call) { return forward<double>(*call); }
ELMAN_EXPORT const char* elman_dense_backward_float32(const DenseCall* call) { return backward<float>(*call); }
ELMAN_EXPORT const char* elman_dense_backward_float64(const DenseCall* call) { return backward<double>(*call); }

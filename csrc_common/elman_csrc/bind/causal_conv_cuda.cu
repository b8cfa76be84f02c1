// The causal convolution on the GPU as one module: one storage type and one number of taps. Compiled with
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_TAPS=K, 2 to 64; up to 4 are fastest, above 8 registers spill
// The interface is that of causal_conv_call.h.
#include <elman/causal_conv_call.h>
#include <elman/causal_conv_launch.cuh>
#include <elman/stored.cuh>

#ifndef ELMAN_DTYPE  // default for builds without a known call
#define ELMAN_DTYPE 2
#define ELMAN_TAPS 4
#endif

namespace {

using Elem = elman::Stored<ELMAN_DTYPE>;
constexpr int K = ELMAN_TAPS;
static_assert(K >= 2 && K <= 64, "2 to 64 taps");
using elman::at;
namespace conv = elman::conv;

template <class T>
elman::Rows<T> rows(const CallView& v) {
  return {at<T>(v.address), static_cast<std::ptrdiff_t>(v.t), static_cast<std::ptrdiff_t>(v.b)};
}

const char* refuse(const CausalConvCall& c, bool back) {
  if (c.steps < 1 || c.batch < 1 || c.width < 1) return "a size is below 1";
  if (c.steps > (1 << 29) || c.batch > (1 << 29) || c.width > (1 << 29)) return "a size is above 2^29";
  return nullptr;
}

template <bool back>
const char* run(const CausalConvCall& c) {
  if (const char* why = refuse(c, back)) return why;
  conv::Args<Elem> g{};
  g.T = static_cast<int>(c.steps), g.B = static_cast<int>(c.batch), g.C = static_cast<int>(c.width);
  g.x = rows<const Elem>(c.x), g.y = rows<Elem>(c.y), g.dy = rows<const Elem>(c.dy), g.dx = rows<Elem>(c.dx);
  g.weight = at<const float>(c.weight), g.bias = at<const float>(c.bias), g.window = at<const float>(c.window);
  g.last = at<float>(c.last), g.dlast = at<const float>(c.dlast), g.dwindow = at<float>(c.dwindow), g.shares = at<float>(c.shares);
  g.mask = at<const unsigned char>(c.mask), g.starts = at<const unsigned char>(c.starts);
  const bool pieces = c.width * sizeof(Elem) % 16 == 0 && elman::in_pieces(g.x) &&
                      (back ? elman::in_pieces(g.dy) && elman::in_pieces(g.dx) : elman::in_pieces(g.y));
  const cudaError_t status = conv::launch<Elem, K, back>(g, pieces, c.silu != 0, c.early != 0, at<CUstream_st>(c.cuda_stream));
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_causal_conv_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT std::int64_t elman_causal_conv_shares(std::int64_t steps, std::int64_t batch, std::int64_t width) {
  return conv::shares<K>(steps, batch, width);
}
ELMAN_EXPORT const char* elman_causal_conv_forward(const CausalConvCall* c) { return run<false>(*c); }
ELMAN_EXPORT const char* elman_causal_conv_backward(const CausalConvCall* c) { return run<true>(*c); }

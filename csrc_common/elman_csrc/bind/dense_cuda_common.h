// Shared by the CUDA sources of the dense skeleton: the types of a module, its C interface, and the conversion of a call to
// DenseArgs.
//
// A module is one cell, storage type and width (and one kind of launch, dense_cuda.cu), with the C interface of dense_call.h:
// each shape is compiled at first use, and a Python binding would take three quarters of that time.
#pragma once

#include <elman/dense_args.h>
#include <elman/dense_call.h>
#include <elman/stored.cuh>

#include <cstdint>
#include <cstdio>

#include ELMAN_CELL_HEADER

#ifndef ELMAN_DTYPE  // defaults for builds without a known shape
#define ELMAN_DTYPE 2
#define ELMAN_WIDTH 1024
#endif
#ifndef ELMAN_PACKED  // whether documents start inside rows
#define ELMAN_PACKED 0
#endif

namespace {

using Cell = ELMAN_CELL;
constexpr int d = ELMAN_WIDTH;
constexpr bool packed = ELMAN_PACKED;
static_assert(Cell::extras <= 4, "DenseCall holds four");
using elman::at;
using Elem = elman::Stored<ELMAN_DTYPE>;
using Args = elman::DenseArgs<Elem, Cell::extras>;

// The first error of a call, as text.
struct Outcome {
  const char* said = nullptr;
  bool failed(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return false;
    cudaGetLastError();
    std::snprintf(text(), 256, "%s: %s", what, cudaGetErrorString(status));
    said = text();
    return true;
  }
  static char* text() {
    static thread_local char buffer[256];
    return buffer;
  }
};

elman::StridedView<Elem> view(const CallView& v) {
  return {at<const Elem>(v.address), static_cast<std::ptrdiff_t>(v.t), static_cast<std::ptrdiff_t>(v.b)};
}

const char* refuse(const DenseCall& call) {
  if (call.width != d) return "this module was compiled for another width";
  if (call.extras != Cell::extras) return "this cell reads another number of extras";
  if (packed != (call.starts != 0)) return "this module was compiled for calls with starts of documents, or for calls without";
  return nullptr;
}

template <bool backward>
Args describe(const DenseCall& call) {
  Args g{};
  g.w = at<const Elem>(call.w), g.history = at<Elem>(call.history), g.mask = at<const unsigned char>(call.mask);
  for (int i = 0; i < Cell::extras; ++i) g.extra[i] = view(call.extra[i]), g.dextra[i] = at<Elem>(call.dextra[i]);
  g.u = view(call.x.address ? call.x : call.u), g.gy = view(call.gy);
  g.h0 = at<const float>(call.h0), g.y = at<Elem>(call.y), g.hT = at<float>(call.last);
  g.ghT = at<const float>(call.g_last), g.da = at<Elem>(call.da), g.dh0 = at<float>(call.dh0);
  g.a = at<Elem>(call.a), g.starts = at<const unsigned char>(call.starts);
  g.bias = at<const float>(call.b), g.sums = at<Elem>(call.sums), g.dx = at<Elem>(call.dx);
  g.dbias = at<float>(call.dbias);
  g.T = static_cast<int>(call.steps), g.B = static_cast<int>(call.batch), g.rows = static_cast<int>(call.rows);
  g.tiles = g.rows ? (g.B + g.rows - 1) / g.rows : 0;
  g.delay = static_cast<int>(call.delay), g.timeout_ns = call.timeout_ns, g.error = at<int>(call.error);
  return g;
}

}  // namespace

ELMAN_EXPORT std::int64_t elman_dense_dtype() { return ELMAN_DTYPE; }
ELMAN_EXPORT std::int64_t elman_dense_declares(std::int64_t i) { return i ? elman::UsesA<Cell>::value : Cell::extras; }

// Shared by the bindings of the matrix-state modules (interface: <elman/matrix_state_call.h>). Compiled with
//   -DELMAN_CELL_HEADER="path/of/cell.h"  -DELMAN_CELL=elman::e75::Cell
//   -DELMAN_DTYPE=code of the storage (dtype.h)  -DELMAN_ROWS=N  -DELMAN_LINES=V
//   -DELMAN_SILU, -DELMAN_L2, -DELMAN_SHARED = which inputs pass SiLU, are normalised, are shared by all heads: bits, k 1, q 2,
//     lines from 4 on (matrix_state_cell.h)
//   -DELMAN_LINEAR = whether the option linear_state is on
//   -DELMAN_PACKED = on a GPU, whether documents start inside rows
//   -DELMAN_WIDE = which vectors are float beside 16-bit storage: bits
//   -DELMAN_KIND0, -DELMAN_KIND1, -DELMAN_KIND2 = kinds of the scalars: 0 given, 1 sigmoid, 2 mamba
//
#pragma once

#include <cstdint>
#include <cstdio>

#include <elman/call.h>
#include <elman/dtype.h>
#include <elman/matrix_state_call.h>
#include <elman/matrix_state_cell.h>

#include ELMAN_CELL_HEADER

using Cell = ELMAN_CELL;
using elman::at;

struct Options {
  static constexpr bool linear = ELMAN_LINEAR, packed = ELMAN_PACKED, one_group = false;
  static constexpr unsigned silu = ELMAN_SILU, l2 = ELMAN_L2, shared = ELMAN_SHARED, wide = ELMAN_WIDE;
  static constexpr elman::ScalarKind kind0 = static_cast<elman::ScalarKind>(ELMAN_KIND0),
                                     kind1 = static_cast<elman::ScalarKind>(ELMAN_KIND1),
                                     kind2 = static_cast<elman::ScalarKind>(ELMAN_KIND2);
};

// Returns an error message if a call does not fit this module or lacks something, else null.
inline const char* refuse(const MatrixCall& c, bool back, int interval) {
  static thread_local char said[160];
  if (c.vectors != Cell::vectors || c.lines != Cell::lines || c.scalars != Cell::scalars || c.params != Cell::params)
    return "the call gives another number of inputs than the cell takes";
  if (c.shared != Options::shared)
    return "an input is shared by all heads, and the module was compiled for one of each head, or the other way round";
  if (c.interval != interval) {
    std::snprintf(said, sizeof said,
                  "the module saves a state every %d steps, and the call has room for one every %d; declare the cell"
                  " `elementwise` or `delta` as its header does",
                  interval, int(c.interval));
    return said;
  }
  if (c.batch < 1 || c.steps < 1 || c.heads < 1) return "a size is below 1";
  bool there = c.k.address && c.q.address, gradients = c.dk.address && c.dq.address && c.saved && c.dy;
  for (int i = 0; i < Cell::vectors; i++) there &= c.vector[i].address != 0, gradients &= c.dvector[i].address != 0;
  for (int i = 0; i < Cell::lines; i++) there &= c.line[i].address != 0, gradients &= c.dline[i].address != 0;
  for (int i = 0; i < Cell::scalars; i++) there &= c.scalar[i].address != 0, gradients &= c.dscalar[i].address != 0;
  for (int i = 0; i < Cell::params; i++) there &= c.param[i] != 0, gradients &= c.dparam[i] != 0;
  if (Options::kind0 == elman::ScalarKind::mamba) there &= c.A_log && c.dt_bias;
  if (!there) return "an input is missing";
  if (back && !gradients) return "what the backward needs is missing";
  return nullptr;
}

ELMAN_EXPORT std::int64_t elman_matrix_dtype() { return ELMAN_DTYPE; }
// Facts of the cell, as `MatrixKernel` declares them.
ELMAN_EXPORT std::int64_t elman_matrix_declares(std::int64_t i) {
  const std::int64_t all[] = {Cell::vectors, Cell::lines, Cell::scalars, Cell::params, Cell::elementwise || Cell::energy,
                              Cell::delta};
  return all[i];
}

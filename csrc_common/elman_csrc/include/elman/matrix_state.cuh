// The matrix-state skeleton on the GPU: forward and backward over all T steps in one launch each. Cells: matrix_state_cell.h.
//
// Mapping. L lanes of a warp share one line; each has R = ceil(N/L) <= 8 of its N elements in registers. A warp holds C = 32/L
// lines. A team of up to WPH warps holds all lines of a head, or a part of them if there are many. Sums over a line take log2(L)
// shuffles; for 16-bit storage (`tensor`, with L = 4) they are products on the tensor cores. cp.async brings the inputs of 16 steps
// while the previous 16 are computed; they become fp32 in shared memory once (with SiLU, the L2 norm and the decay, if
// requested). Nothing in the loop over steps waits for memory or for another warp. In the tensor form, as many helper warps
// again do everything but that loop; they work one segment before and one segment after the others.
//
// Backward. The state is saved in fp32 every 16 steps. A segment is replayed into registers (bit for bit the forward's arithmetic)
// and walked back. Sums over lines (dq, dk, the scalars) are off the critical path: each step leaves S and P = dS phi' in shared
// memory, and after the walk dq_t = S_t dy_t and dk_t = P_t write_t + S_{t-1} dr_t are computed from there. The tensor form needs
// no shared memory for them (walk_tensor). No atomics: every sum has one owner and one order.
//
// Large heads (16-bit storage, N > 32): updates are products, too (large). States are saved in 16 bits every 8 or 4 steps, and the
// backward keeps those of a segment in shared memory (walk_large). Up to N = 64 its helpers replay a segment while the next one is
// walked; without tanh they pass over the one before it at once, and only every second state is saved. If writes are also affine in
// the retrieved values (`delta`), sixteen steps are one triangular system, forward and backward (blocked).
//
//   plan      sizes and everything derived from them   args    arguments of a launch, shared memory, a thread's place
//   numbers   storage types and vectors                ptx     instructions of a warp
//   inputs    from global memory to fp32               step    one step on a state in registers
//   forward, backward, launch                          walk, walk_tensor, walk_large: a segment of the backward, three ways
//   line_sums sums of a walk over lines                gradients: from a walk's results to global memory
//   large     a step of a large head                   blocked  sixteen steps at once, forward and backward
#pragma once

#include <elman/matrix_state_launch.cuh>

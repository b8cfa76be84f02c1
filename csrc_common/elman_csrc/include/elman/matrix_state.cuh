// The matrix-state skeleton on the GPU: forward and backward over all T steps in one launch each. Cells: matrix_state_cell.h.
//
// Mapping. L lanes of a warp share one line, each with R = ceil(N/L) <= 8 of its N elements in registers; a warp holds C = 32/L
// lines, a team of up to WPH warps all lines of a head, or a part of them when there are many. Sums over a line take log2(L)
// shuffles; for 16-bit storage (`tensor`, with L = 4) they are products on the tensor cores. Inputs of 16 steps travel by
// cp.async while the previous 16 are computed, and become fp32 in shared memory once (with SiLU, the L2 norm and the decay, if
// asked for). Nothing in the loop over steps waits for memory or for another warp. In the tensor form all but that loop is done by
// helpers, as many warps again, which work a segment before and a segment behind the others.
//
// Backward. The state is saved in fp32 every 16 steps; a segment is replayed into registers (bit for bit the forward's arithmetic)
// and walked back. Sums over lines (dq, dk, the scalars) are off the critical path: each step leaves S and P = dS phi' in shared
// memory, and after the walk dq_t = S_t dy_t and dk_t = P_t write_t + S_{t-1} dr_t are taken from there; the tensor form needs
// no shared memory for it (walk_tensor). No atomics: every sum has one owner and one order.
//
// Large heads (16-bit storage, N > 32): updates are products, too (large); states are saved in 16 bits every 8 or 4 steps, and the
// backward has those of a segment in shared memory (walk_large). Up to N = 64 its helpers replay a segment while the next is walked
// over; without tanh they pass over the one before at once, and only every second state is saved. Where writes are affine, too, in what is
// retrieved (`delta`), sixteen steps are one triangular system, forward and backward (blocked).
//
//   plan      sizes, and what follows from them        args    what a launch is given, shared memory, a thread's place
//   numbers   storage types and vectors                ptx     instructions of a warp
//   inputs    from global memory to fp32               step    one step on a state in registers
//   forward, backward, launch                          walk, walk_tensor, walk_large: a segment of the backward, three ways
//   line_sums what a walk adds up over lines           gradients: what a segment of the backward gives
//   large     the same of a large head                 blocked  sixteen steps at once, forward and backward
#pragma once

#include <elman/matrix_state_launch.cuh>

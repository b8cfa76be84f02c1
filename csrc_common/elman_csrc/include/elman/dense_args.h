// Arguments of one launch of the dense skeleton. [T,B,d] is time-major; everything but a View is contiguous.
#pragma once

#include <cstddef>

namespace elman {

template <class Elem>
struct StridedView {  // of a [T,B,d] tensor: channels are adjacent, strides count elements
  const Elem* data;
  std::ptrdiff_t t, b;
};

template <class Elem, int extras>
struct DenseArgs {
  const Elem* w;                                     // [d,d], or the blocks of a block-diagonal one
  StridedView<Elem> extra[extras > 0 ? extras : 1];  // inputs of the cell beside u
  const unsigned char* mask;                         // [T,B], 0 = hold the state; null = no position is masked
  Elem* history;                                     // [T+1,B,d]: h_0, h_1 ... h_T. Written by the forward, read by the backward

  // forward
  StridedView<Elem> u;
  const float* h0;  // [B,d]
  Elem* y;          // [T,B,d]
  float* hT;        // [B,d]

  // backward
  StridedView<Elem> gy;
  const float* ghT;                             // [B,d]
  Elem* da;                                     // [T,B,d]
  Elem* dextra[extras > 0 ? extras : 1];        // [T,B,d]
  float* dh0;                                   // [B,d]

  // tied weights, with x in place of u; x is also given to the backward if SiLU is included
  const float* bias;  // [d]
  Elem* sums;         // [T+1,B,d]: h_0 + x_1, h_1 + x_2 ... h_T. Written by the forward, for the gradient of W
  Elem* dx;           // [T,B,d], by the backward
  float* dbias;       // [8 groups,d], by the backward: to be added up

  int T, B;
  int rows;   // batch rows of a tile: 1..8, or 1..16 in wide tiles; group g takes tiles g, g + groups, ...
  int tiles;  // ceil(B / rows)
  int delay;  // clocks between a step's sums and the first poll for the next step: polling too early costs a round trip to L2
  int* error;                       // set to 1 if a wait exceeds timeout_ns; may be host memory
  unsigned long long timeout_ns;

  Elem* a;  // [T,B,d]: W h_{t-1} + u_t, written by the forward and read by the backward if the cell uses it
  const unsigned char* starts;  // [T,B], 1 = the state is 0 before the step; read if packed
};

}  // namespace elman

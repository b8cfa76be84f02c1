// E56: h = tanh(W_h h' + u), y = h silu(z), with [W_x | W_h] = W and u = W_x x + b.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e56 {
using Cell = DenseCell<Tanh, SiluGate>;
}

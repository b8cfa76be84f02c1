// x_gated: h = tanh(W h' + u), y = h silu(m), m = x + b_g.
#pragma once

#include <elman/dense_cells.h>

namespace elman::x_gated {
using Cell = DenseCell<Tanh, SiluGate>;
}

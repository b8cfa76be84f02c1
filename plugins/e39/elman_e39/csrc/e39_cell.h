// E39: h = tanh(W h' + x), y = h silu(h).
#pragma once

#include <elman/dense_cells.h>

namespace elman::e39 {
using Cell = DenseCell<Tanh, SelfGate>;
}

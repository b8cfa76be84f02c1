// E33: h = tanh(W h' + u), y = h silu(h).
#pragma once

#include <elman/dense_cells.h>

namespace elman::e33 {
using Cell = DenseCell<Tanh, SelfGate>;
}

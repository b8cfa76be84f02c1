// E37v2: h = tanh(W h' + u), y = h silu(h), u = W x + b.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e37v2 {
using Cell = DenseCell<Tanh, SelfGate>;
}

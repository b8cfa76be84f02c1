// E36: h = W h' + u, y = h silu(h). Linear in the state; the self-gate is the only nonlinearity.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e36 {
using Cell = DenseCell<Linear, SelfGate>;
}

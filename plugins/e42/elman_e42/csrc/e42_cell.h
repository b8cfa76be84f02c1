// E42: h = W h' + u, y = h silu(h). Linear in the state; the self-gate is the only nonlinearity.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e42 {
using Cell = DenseCell<Linear, SelfGate>;
}

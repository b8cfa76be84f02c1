// E4: h = tanh(W h' + u), y = h silu(z), W = U V.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e4 {
using Cell = DenseCell<Tanh, SiluGate>;
}

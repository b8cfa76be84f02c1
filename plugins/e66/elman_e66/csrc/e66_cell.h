// E66: h = s(e) h' + (1 - s(e)) tanh(W h' + u), y = h silu(h), W = U V.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e66 {
using Cell = LeakyCell<Interpolate>;
}

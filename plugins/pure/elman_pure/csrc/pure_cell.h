// pure: h = tanh(W h' + u), y = h.
#pragma once

#include <elman/dense_cells.h>

namespace elman::pure {
using Cell = DenseCell<Tanh, Plain>;
}

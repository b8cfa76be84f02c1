// E2: h = tanh(W h' + u) of every slot, y = h. W is block-diagonal; slots are mixed after the loop.
#pragma once

#include <elman/dense_cells.h>

namespace elman::e2 {
using Cell = DenseCell<Tanh, Plain>;
}

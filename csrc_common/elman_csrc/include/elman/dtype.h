// Codes of the storage dtypes, shared by Python and every binding.
#pragma once

namespace elman {

enum class Dtype : int { f64 = 0, f32 = 1, bf16 = 2, f16 = 3 };

}  // namespace elman

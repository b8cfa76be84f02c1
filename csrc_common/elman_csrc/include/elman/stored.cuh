// The type in which tensors are stored, by its code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dtype.h"

namespace elman {

template <Dtype>
struct StoredAs;
template <>
struct StoredAs<Dtype::f32> {
  using type = float;
};
template <>
struct StoredAs<Dtype::bf16> {
  using type = __nv_bfloat16;
};
template <>
struct StoredAs<Dtype::f16> {
  using type = __half;
};
template <int code>
using Stored = typename StoredAs<static_cast<Dtype>(code)>::type;

}  // namespace elman

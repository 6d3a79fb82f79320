// Order-preserving image of a float.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float highest(float x) { // of the warp
  const u32 top = __reduce_max_sync(~0u, ordered(x));
  return __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
}

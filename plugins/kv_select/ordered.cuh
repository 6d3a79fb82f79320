// Order-preserving image of a float.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

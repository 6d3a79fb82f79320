// The query of a head as the scorer of one-bit keys reads it, published by the append kernel through words that say themselves whether they are there.
//
// Built with -DD, a multiple of 32. A head is fp16 channels over a power of two: word 4 m + c holds channels 32 m + c + 4 k, k = 0 to 7, and the last
// word four times the power's exponent. Words are empty, all ones, until the query is published, and are emptied by who chooses with it.
#pragma once
#include "common.cuh"

#define EMPTY 0xffffffffu // no pair of fp16 numbers that are published is that: NaN has one form
#define HEAD_WORDS (D / 8 + 1)
#define EXPONENT_ZERO 256

// To 2^exponent a query's largest magnitude, given by its bits, lies in [2^10, 2^11).
__device__ __forceinline__ int exponent_of(u32 top) { return min(max((int)(top >> 23) - 127 - 10, -100), 100); }
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }
__device__ __forceinline__ uint4 poll_query(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ bool is_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

// Channels d to d + 7 of a head, of which `lanes` neighbouring threads hold eight each; every thread of a warp takes part, those that publish write.
template <int LANES_OF_HEAD> __device__ __forceinline__ void publish_query(u32* head, const real (&x)[8], int d, bool publishes) {
  float value[8];
  u32 top = 0;
#pragma unroll
  for (int e = 0; e < 8; e++) value[e] = to_float(x[e]), top = max(top, __float_as_uint(fabsf(value[e])));
#pragma unroll
  for (int o = LANES_OF_HEAD / 2; o; o >>= 1) top = max(top, __shfl_xor_sync(~0u, top, o));
  const int exponent = exponent_of(top);
  const float down = power_of_two(-exponent);
  if (!publishes) return;
#pragma unroll
  for (int c = 0; c < 4; c++) __stcg(head + (d / 32 * 4 + c) * 4 + d / 8 % 4, pack_halves(value[c] * down, value[c + 4] * down));
  if (d < 32) __stcg(head + D / 2 + d / 8, (u32)(exponent + EXPONENT_ZERO));
}
// All heads of a row, by the threads of a block.
__device__ __forceinline__ void empty_query(uint4* row, int words, int threads) {
#pragma unroll 1
  for (int i = threadIdx.x; i < words; i += threads) __stcg(row + i, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
}

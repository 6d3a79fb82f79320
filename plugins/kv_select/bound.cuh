// A bound that scores reach or not, and what tells with little work which units may reach it.
//
// Built as pooling.cuh says, with SIEVE_BINS for counts of what reaches it.
#pragma once
#include "pooling.cuh"

struct Bound {
  float bound, factor;

  // Order-preserving; pooled softmaxes are not negative.
  __device__ __forceinline__ u32 image(float score) const { return HEADS > 1 ? __float_as_uint(score) : ordered(score); }
  __device__ __forceinline__ int bin_of(float score) const {
    if (HEADS > 1) return (int)min((__float_as_uint(score) - __float_as_uint(bound)) >> 15, SIEVE_BINS - 1u);
    return (int)fminf((score - bound) * factor, (float)(SIEVE_BINS - 1));
  }
  __device__ __forceinline__ int bin_again(u32 x) const {
    return bin_of(__uint_as_float(HEADS > 1 ? x : x & 0x80000000u ? x & 0x7fffffffu : ~x));
  }
  // Of a bin of the sample's keys: its lowest score.
  __device__ __forceinline__ void set(int bin, Scale scale) {
    const int lowest = max((bin << 6) - 1, 0); // key of the bin's lowest score, minus one
    bound = HEADS > 1 ? __uint_as_float((u32)lowest << 14) : scale.low + (float)lowest / scale.factor;
    factor = (float)(SIEVE_BINS - 1) / fmaxf(-bound, 1e-30f);
  }
  // What near() compares the scores of a head and part with, as a pair of halves; false where that is beyond its range.
  __device__ __forceinline__ bool low(float add, u32& out) const {
    __half2 two;
    bool inside = true;
    if (HEADS > 1) {
      const float low = fmaxf(add - log2f(bound) + 9.f, -110.f);
      inside = low < 110.f;
      two = __float2half2_rn(low * (1.f / 15.f));
    } else {
      const float low = bound - add;
      two = __float2half2_rn(low - fabsf(low) * 0x1p-10f - (fabsf(bound) + 1.f) * 0x1p-20f);
    }
    out = *reinterpret_cast<const u32*>(&two);
    return inside;
  }
  // Which of eight units may reach the bound, surely those that do: bits 0, 16, 2, 18, 4, ... Sums of exponentials are taken of halves, in units of a
  // 1024th of the bound: 2^y as an integer's bits, n = 64 (y - 1) of them, from 0 to 959. What is lost by rounding is less than the bound is lowered.
  __device__ __forceinline__ u32 near(const u32 (&h)[HEADS][4], const u32* low) const {
    u32 out = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 mask;
      if (HEADS > 1) {
        __half2 sum;
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
          const __half2 x = *reinterpret_cast<const __half2*>(&h[j][k]), c = *reinterpret_cast<const __half2*>(&low[j]);
          const __half2 n = __hfma2(__hfma2_sat(x, __float2half2_rn(1.f / 15.f), c), __float2half2_rn(959.f), __float2half2_rn(1024.f));
          const u32 image = *reinterpret_cast<const u32*>(&n) << 4;
          const __half2 one = *reinterpret_cast<const __half2*>(&image);
          sum = j == 0 ? one : MAXIMUM ? __hmax2(sum, one) : __hadd2(sum, one);
        }
        mask = __hge2_mask(sum, __float2half2_rn(960.f));
      } else {
        mask = __hge2_mask(*reinterpret_cast<const __half2*>(&h[0][k]), *reinterpret_cast<const __half2*>(&low[0]));
      }
      out |= mask & (0x10001u << 2 * k);
    }
    return out;
  }
};

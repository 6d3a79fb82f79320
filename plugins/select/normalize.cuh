// The normalizers of a row's heads, from what a scorer says about its parts.
#pragma once
#include "pooling.cuh"

// What is added to every part's scores, so that heads are normalized over the row; the range of raw scores. Uses lows and row_low of s, and sums
// [num_parts, HEADS]; first: this thread's part.
template <typename S> __device__ __forceinline__ void normalize(S& s, Share& share, const float4* parts, float4 first, int num_parts, float* sums) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  float lowest = 3e38f;
#pragma unroll 1
  for (int i = tid; i < num_parts * HEADS; i += THREADS) {
    const float4 v = i == tid ? first : parts[i];
    share.add[i] = v.x, sums[i] = v.y;
    lowest = fminf(lowest, v.z);
  }
  if (HEADS == 1) {
#pragma unroll
    for (int o = 16; o; o >>= 1) lowest = fminf(lowest, __shfl_xor_sync(~0u, lowest, o));
    if (lane == 0) s.lows[warp] = lowest;
  }
  __syncthreads();
  if (warp < HEADS) {
    float top = -3e38f, total = 0.f;
#pragma unroll 1
    for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, sums[p * HEADS + warp]);
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float zero = top; // raw scores: differences count at the top
    if (HEADS > 1) {
#pragma unroll 1
      for (int p = lane; p < num_parts; p += 32) total += exp2_fast(sums[p * HEADS + warp] - top);
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      zero += log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS));
    }
#pragma unroll 1
    for (int p = lane; p < num_parts; p += 32) share.add[p * HEADS + warp] -= zero;
    if (HEADS == 1) {
      float low = lane < THREADS / 32 ? s.lows[lane] : 3e38f;
#pragma unroll
      for (int o = 16; o; o >>= 1) low = fminf(low, __shfl_xor_sync(~0u, low, o));
      if (lane == 0) s.row_low = low - top;
    }
  }
  __syncthreads();
  share.scale = {0.f, 0.f};
  if (HEADS == 1) share.scale = {s.row_low, 65534.f / fmaxf(-s.row_low, 1e-30f)};
}

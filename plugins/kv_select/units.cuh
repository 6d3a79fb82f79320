// The scores that a block of a row holds, and how they are normalized over the row. Built as pooling.cuh says.
#pragma once
#include "mail.cuh"
#include "reading.cuh"
#include "pooling.cuh"

struct Cut { // the bin of the wanted-th unit, units in higher bins and in it
  int bin, above, count;
};
struct Chosen { // of the row, and units of lower blocks in higher bins and in it
  Cut cut;
  int lower_above, lower_count;
};
struct Desk {
  __align__(16) int own[BINS];       // counts of this block; bin 0 of the first count stays empty
  __align__(16) int total[BINS + 2]; // of the row
  __align__(16) u64 list[CROWD], few[CROWD];
  int warp_sums[64], listed, less, left, lower_above, lower_count, before;
  Cut cut;
  float add[HEADS], low;
  float2 range[THREADS / 32];
  float4 part; // HEADS 1: what the block has told
};

__device__ __forceinline__ void clear(Desk& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS + 2; i += THREADS) {
    s.total[i] = 0;
    if (i < BINS) s.own[i] = 0;
  }
  if (threadIdx.x == 0) s.listed = s.less = s.left = s.before = 0;
}

// What is added to this block's scores, so that heads are normalized over the row; s.low is the lowest of raw scores.
template <int MOST = 5> __device__ __forceinline__ void normalize(Desk& s, const Mail& mail, float (&add)[HEADS]) { // of at most 32 MOST blocks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int h = warp; h < HEADS; h += THREADS / 32) {
    float x[MOST], top = -3e38f, low = 3e38f, ref = 0.f, total = 0.f;
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      const int p = lane + 32 * k;
      x[k] = -3e38f;
      if (32 * k >= mail.blocks) continue;
      if (p < mail.blocks) {
        const uint4 v = await(mail.part(h, p), mail.stamp);
        x[k] = __uint_as_float(v.x), low = fminf(low, __uint_as_float(v.y));
        if (p == mail.rank) ref = __uint_as_float(v.z);
      }
      top = fmaxf(top, x[k]);
    }
    __syncwarp();
    ref = __shfl_sync(~0u, ref, mail.rank & 31);
    top = highest(top);
    float zero = top; // raw scores: differences count at the top
    if (HEADS > 1) {
#pragma unroll
      for (int k = 0; k < MOST; k++) {
        if (32 * k < mail.blocks) total += exp2_fast(x[k] - top);
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      constexpr float HEADS_LOG[] = {0.f, 0.f, 1.f, 1.5849625f, 2.f, 2.3219281f, 2.5849625f, 2.8073549f, 3.f};
      if (MOST < 5) zero += __log2f(total) + (MAXIMUM ? 0.f : HEADS_LOG[min(HEADS, 8)]); // few instructions
      else zero += log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS));
    } else {
      low = -highest(-low);
      if (lane == 0) s.low = low - top;
    }
    if (lane == 0) s.add[h] = ref - zero;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; h++) add[h] = s.add[h];
}

// The block's units: their scores [HEADS, stride] in shared memory, then order-preserving pooled scores, 0 where a unit is no candidate.
//
// Keys of fourteen bits. Pooled softmaxes: at most 1 / share units are above `share`, so the range is sixteen octaves below it, 1024 keys each. Raw
// scores: from the lowest to the highest. The upper eight bits are the bin.
struct Units {
  const __half* scores;
  int stride, begin, count, first, last; // first unit of the block and their number; candidates are [first, last)
  u32* exact;
  int base;
  float low, factor;
  int jump = 32; // units from a group of 32 of the block to its next

  __device__ __forceinline__ int unit(int i) const { return begin + (i >> 5) * jump + (i & 31); }  // the block's i-th
  __device__ __forceinline__ int place(int unit) const { return (unit - begin) / jump * 32 + ((unit - begin) & 31); }

  __device__ __forceinline__ void scale(float lowest, float share) {
    base = __float_as_int(share) - ((BINS - 1) << 19);
    if (HEADS == 1) low = lowest, factor = 16383.f / fmaxf(-lowest, 1e-30f);
  }
  __device__ __forceinline__ int key(float x) const {
    if (HEADS > 1) return min(max((__float_as_int(x) - base) >> 13, 0), 16383);
    return (int)fminf(fmaxf((x - low) * factor, 0.f), 16383.f);
  }
  __device__ __forceinline__ int key_again(u32 x) const { return key(__uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x)); }
  __device__ __forceinline__ int eligible(int upto) const { return max(0, min(upto, last) - first); } // candidates in front of a unit
  __device__ __forceinline__ int lower_eligible() const { // in lower blocks
    return jump == 32 ? eligible(begin) : max(0, dealt(last) - dealt(first));
  }
  // Units in front of one that lower blocks have been dealt, group by group in turn.
  __device__ __forceinline__ int dealt(int upto) const {
    const int group = upto >> 5, blocks = jump >> 5, rank = begin >> 5, turn = group % blocks;
    return (group / blocks * rank + min(turn, rank)) * 32 + (turn < rank ? upto & 31 : 0);
  }
  __device__ __forceinline__ void read(u32 (&v)[1], const __half* p) const { v[0] = *reinterpret_cast<const u32*>(p); }
  __device__ __forceinline__ void read(u32 (&v)[2], const __half* p) const {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    v[0] = w.x, v[1] = w.y;
  }
  __device__ __forceinline__ void read(u32 (&v)[4], const __half* p) const {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  }
  // Bins for what a block offers: eight an octave, over 32 octaves below `share`.
  __device__ __forceinline__ int wide_base() const { return base + ((BINS - 1) << 19) - ((BINS - 1) << 20); }
  __device__ __forceinline__ int wide_bin(float x) const { return min(max((__float_as_int(x) - wide_base()) >> 20, 0), BINS - 1); }
  // Pool 2 N units a thread, and count them: by the upper bits of their keys, or in wide bins.
  template <int N, int COUNTED = 1> __device__ __forceinline__ void pool_all(const float (&add)[HEADS], int* hist) const {
#pragma unroll 1
    for (int at = threadIdx.x * 2 * N; at < count; at += THREADS * 2 * N) {
      u32 h[HEADS][N], image[2 * N];
      float pooled[2 * N];
#pragma unroll
      for (int j = 0; j < HEADS; j++) read(h[j], scores + j * stride + at);
      pool<N>(h, add, pooled);
#pragma unroll
      for (int k = 0; k < 2 * N; k++) {
        const int u = unit(at) + k;
        image[k] = u >= first && u < last ? ordered(pooled[k]) : 0;
        const int bin = COUNTED == 2 ? wide_bin(pooled[k]) : key(pooled[k]) >> 6;
        if (COUNTED && image[k] && bin) atomicAdd(&hist[bin], 1); // where many are in the lowest bin, counting them would take longest
      }
#pragma unroll
      for (int k = 0; k < 2 * N; k += 2) *reinterpret_cast<uint2*>(exact + at + k) = make_uint2(image[k], image[k + 1]);
    }
  }
};

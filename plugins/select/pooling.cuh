// From a scorer's fp16 scores to pooled scores, and their 16-bit monotone keys, for the selector.
//
// Built with -DHEADS (scored heads a row: 1 ranks raw scores, more pool their softmaxes), -DMAXIMUM (pool by maximum instead of mean) and -DSTREAM
// where a block's keys do not fit in shared memory: they are computed again whenever they are looked at.
#pragma once
#include "ordered.cuh"

#ifndef THREADS
#define THREADS 1024
#endif
#ifdef STREAM
#define KEPT false
#else
#define KEPT true
#endif

__device__ __forceinline__ void load_halves(u32 (&v)[4], const __half* p) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_halves(u32 (&v)[1], const __half* p) {
  asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(v[0]) : "l"(p) : "memory");
}

struct Scale {
  float low, factor;
};

// Pooled score of 2 N units: h their halves minus the part's reference, c what is added to it.
template <int N> __device__ __forceinline__ void pool(const u32 (&h)[HEADS][N], const float* c, float (&out)[2 * N]) {
#pragma unroll
  for (int j = 0; j < HEADS; j++) {
    const float add = c[j];
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&h[j][k]));
      float x = f.x + add, y = f.y + add;
      if (HEADS > 1) {
        x = exp2_fast(x), y = exp2_fast(y);
        if (j > 0) {
          x = MAXIMUM ? fmaxf(out[2 * k], x) : out[2 * k] + x;
          y = MAXIMUM ? fmaxf(out[2 * k + 1], y) : out[2 * k + 1] + y;
        }
      }
      out[2 * k] = x, out[2 * k + 1] = y;
    }
  }
}
__device__ __forceinline__ float pool1(const __half* scores, long long stride, const float* c) {
  float out = 0.f;
#pragma unroll
  for (int j = 0; j < HEADS; j++) {
    float x = __half2float(scores[j * stride]) + c[j];
    if (HEADS > 1) x = exp2_fast(x);
    out = j == 0 ? x : MAXIMUM ? fmaxf(out, x) : out + x;
  }
  return out;
}
__device__ __forceinline__ u32 key_of(float score, Scale scale) {
  if (HEADS > 1) return min(__float_as_uint(score) >> 14, 65534u) + 1; // a pooled softmax is in [0, 1]: nine bits of mantissa
  return (u32)fminf(fmaxf((score - scale.low) * scale.factor, 0.f), 65534.f) + 1;
}

// What a block knows of its row.
struct Share {
  const __half* scores; // of the row
  long long stride;     // between heads
  int begin, units;     // first unit of this block and their number, multiples of 32
  int usable, first, last, wanted;
  int part_units;       // units of a part
  uint4* keys;          // [units / 8] eight keys each; none where STREAM
  u32* exact;           // [units] order-preserving scores, or null: then they are computed again
  float* add;           // [parts, HEADS]
  Scale scale;

  __device__ __forceinline__ u32 exact_score(int u) const {
    if (KEPT && exact) return exact[u - begin];
    return ordered(pool1(scores + u, stride, add + u / part_units * HEADS));
  }
  // Keys of units that may be chosen, from their pooled scores; 0 for others.
  template <int N> __device__ __forceinline__ void keys_of(const float (&pooled)[2 * N], int u, u32 (&key)[2 * N]) const {
#pragma unroll
    for (int k = 0; k < 2 * N; k++) key[k] = u + k >= first && u + k < last ? key_of(pooled[k], scale) : 0;
  }
  // The eight keys of a packet.
  __device__ __forceinline__ void packet(int p, u32 (&key)[8]) const {
    if (KEPT) {
      const uint4 v = keys[p];
      const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 8; k++) key[k] = (w[k >> 1] >> ((k & 1) * 16)) & 0xffffu;
    } else {
      const int u = begin + p * 8;
#pragma unroll
      for (int k = 0; k < 8; k++) key[k] = 0;
      if (u >= usable) return;
      u32 h[HEADS][4];
      float pooled[8];
#pragma unroll
      for (int j = 0; j < HEADS; j++) load_halves(h[j], scores + j * stride + u);
      pool<4>(h, add + u / part_units * HEADS, pooled);
      keys_of<4>(pooled, u, key);
    }
  }
};

// Loads packets of 2 N units a thread: the first while the normalizers are summed, the next while the last is counted.
template <int N> struct Packets {
  u32 h[HEADS][N];
  __device__ __forceinline__ void load(const Share& share, int at) {
    const int u = share.begin + at;
    if (at < share.units && u < share.usable) {
#pragma unroll
      for (int j = 0; j < HEADS; j++) load_halves(h[j], share.scores + j * share.stride + u);
    }
  }
  // Keys of all units of the block, and how many have which upper bits.
  __device__ __forceinline__ void count(const Share& share, int* hist) {
    int part = (share.begin + (int)threadIdx.x * 2 * N) / share.part_units;
    for (int at = threadIdx.x * 2 * N; at < share.units; at += THREADS * 2 * N) {
      const int u = share.begin + at;
      u32 key[2 * N];
#pragma unroll
      for (int k = 0; k < 2 * N; k++) key[k] = 0;
      if (u < share.usable) {
        while (u >= (part + 1) * share.part_units) part++;
        float pooled[2 * N];
        pool<N>(h, share.add + part * HEADS, pooled);
        load(share, at + THREADS * 2 * N);
        share.keys_of<N>(pooled, u, key);
#pragma unroll
        for (int k = 0; k < 2 * N; k++) {
          if (key[k]) atomicAdd(&hist[key[k] >> 4], 1);
        }
        if (KEPT && share.exact) {
#pragma unroll
          for (int k = 0; k < 2 * N; k += 2) *reinterpret_cast<uint2*>(share.exact + at + k) = make_uint2(ordered(pooled[k]), ordered(pooled[k + 1]));
        }
      }
      if (!KEPT) continue;
      u32* to = reinterpret_cast<u32*>(share.keys) + at / 2;
      if (N == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(key[0] | key[1] << 16, key[2 % (2 * N)] | key[3 % (2 * N)] << 16,
            key[4 % (2 * N)] | key[5 % (2 * N)] << 16, key[6 % (2 * N)] | key[7 % (2 * N)] << 16);
      } else {
        to[0] = key[0] | key[1] << 16;
      }
    }
  }
};

// Inclusive prefix sum over the block; the two halves of warp_sums are used in turn, so that one barrier is enough.
__device__ __forceinline__ int block_scan(int v, int* warp_sums, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  v = warp_scan(v);
  int* sums = warp_sums + turn * 32;
  turn ^= 1;
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  const int own = lane < THREADS / 32 ? sums[lane] : 0;
  return v + __shfl_sync(~0u, warp_scan(own) - own, warp);
}

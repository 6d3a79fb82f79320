// Attention of one warp over blocks of sixteen tokens whose keys and values lie in shared memory.
//
// Scores are K [16, D] times the heads' queries, outputs V transposed times the heads' weights, so that the query heads of the group fill the narrow side
// of mma.m16n8k16. Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G <= 16), -DWARPS, -DSTAGES and -DBF16.
#pragma once
#include "matrix.cuh"

#define TILE 16
#define TILES ((GROUP_HEADS + 7) / 8) // columns of eight heads
#define STAGE_BYTES (2 * TILE * ROW) // keys, then values
#define HEADS8 (8 * TILES)
#define LAID (D + 4) // floats of a head's output in shared memory, padded against bank conflicts
#define THREADS (WARPS * 32)

// What a warp has seen: the outputs of its share before normalization, the largest scores in log2 units and the sums of the weights.
struct Seen {
  float acc[TILES][D / 16][4], top[TILES][2], sum[TILES][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      top[t][0] = top[t][1] = -1e30f, sum[t][0] = sum[t][1] = 0.f;
#pragma unroll
      for (int k = 0; k < D / 16; k++) acc[t][k][0] = acc[t][k][1] = acc[t][k][2] = acc[t][k][3] = 0.f;
    }
  }

  // Attend to a block: bit r of ok says that token r exists; the values of the others are zero, because 0 times NaN is NaN.
  __device__ __forceinline__ void take(const u32 (&query)[TILES][D / 8], u32 stage, u32 ok, float scale_log2) {
    take(query, stage, ok, scale_log2, scale_log2, 1.f, 1.f);
  }
  // The same where the keys and values of a lane's two tokens stand for multiples of themselves: key0 and key1 are these times scale_log2.
  __device__ __forceinline__ void take(
      const u32 (&query)[TILES][D / 8], u32 stage, u32 ok, float key0, float key1, float value0, float value1) {
    u32 weights[TILES][2];
    weigh(weights, query, stage, ok, key0, key1, value0, value1);
    add(weights, stage + TILE * ROW);
  }
  // The first half of that: the weights of a block's tokens by its keys, at `keys`, brought to the largest scores so far.
  __device__ __forceinline__ void weigh(
      u32 (&p)[TILES][2], const u32 (&query)[TILES][D / 8], u32 keys, u32 ok, float key0, float key1, float value0, float value1) {
    const int lane = threadIdx.x & 31, gid = lane >> 2;
    float s[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4];
      read4(a, keys + place(lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
      for (int t = 0; t < TILES; t++) mma(s[t], a[0], a[1], a[2], a[3], query[t][2 * k], query[t][2 * k + 1]);
    }
    const bool ok0 = ok >> gid & 1, ok1 = ok >> (gid + 8) & 1;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float x0 = ok0 ? s[t][0] * key0 : -1e30f, y0 = ok0 ? s[t][1] * key0 : -1e30f;
      float x1 = ok1 ? s[t][2] * key1 : -1e30f, y1 = ok1 ? s[t][3] * key1 : -1e30f;
      float mx = fmaxf(x0, x1), my = fmaxf(y0, y1);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, o)), my = fmaxf(my, __shfl_xor_sync(~0u, my, o));
      mx = fmaxf(mx, top[t][0]), my = fmaxf(my, top[t][1]);
      if (__any_sync(~0u, mx != top[t][0] || my != top[t][1])) { // seldom once the first blocks are seen
        const float fx = exp2_fast(top[t][0] - mx), fy = exp2_fast(top[t][1] - my);
        top[t][0] = mx, top[t][1] = my;
        sum[t][0] *= fx, sum[t][1] *= fy;
#pragma unroll
        for (int k = 0; k < D / 16; k++) acc[t][k][0] *= fx, acc[t][k][1] *= fy, acc[t][k][2] *= fx, acc[t][k][3] *= fy;
      }
      x0 = ok0 ? exp2_fast(x0 - mx) : 0.f, x1 = ok1 ? exp2_fast(x1 - mx) : 0.f;
      y0 = ok0 ? exp2_fast(y0 - my) : 0.f, y1 = ok1 ? exp2_fast(y1 - my) : 0.f;
      sum[t][0] += x0 + x1, sum[t][1] += y0 + y1;
      p[t][0] = transpose8(pack_real(x0 * value0, y0 * value0)), p[t][1] = transpose8(pack_real(x1 * value1, y1 * value1));
    }
  }
  // The second: the tokens' values, at `values`, times their weights.
  __device__ __forceinline__ void add(const u32 (&p)[TILES][2], u32 values) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4]; // 8 x 8 blocks of V: tokens 0-7 and 8-15, channels 16 k and 16 k + 8; transposed they are rows of channels
      read4_transposed(a, values + place((lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
#pragma unroll
      for (int t = 0; t < TILES; t++) mma(acc[t][k], a[0], a[1], a[2], a[3], p[t][0], p[t][1]);
    }
  }
};

// The query heads of a key-value head as the other operand, from q [G, D].
__device__ __forceinline__ void load_query(u32 (&query)[TILES][D / 8], const real* q) {
  const int lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const u32* from = reinterpret_cast<const u32*>(q + (t * 8 + gid) * D) + tig;
#pragma unroll
    for (int k = 0; k < D / 8; k++) query[t][k] = t * 8 + gid < GROUP_HEADS ? __ldcg(from + k * 4) : 0u;
  }
}

// What the warps of a block have seen, brought to the block's largest scores.
struct Block {
  float warp_top[WARPS][HEADS8], warp_sum[WARPS][HEADS8], top[HEADS8], sum[HEADS8];

  // Lay the outputs of every warp down as laid [WARPS, HEADS8, LAID]: the first barrier is behind the last use of what lies there, the second before
  // the first read.
  __device__ __forceinline__ void gather(Seen& seen, float* laid) {
    note(seen);
    __syncthreads();
    lay(seen, laid);
    __syncthreads();
  }
  // What comes before the first barrier,
  __device__ __forceinline__ void note(Seen& seen) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float l0 = seen.sum[t][0], l1 = seen.sum[t][1];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) l0 += __shfl_xor_sync(~0u, l0, o), l1 += __shfl_xor_sync(~0u, l1, o);
      if (gid == 0) {
        const int h = t * 8 + 2 * tig;
        warp_top[warp][h] = seen.top[t][0], warp_top[warp][h + 1] = seen.top[t][1], warp_sum[warp][h] = l0, warp_sum[warp][h + 1] = l1;
      }
    }
  }
  // and what comes between the two.
  __device__ __forceinline__ void lay(Seen& seen, float* laid) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int h = t * 8 + 2 * tig;
      float m0 = warp_top[0][h], m1 = warp_top[0][h + 1];
#pragma unroll
      for (int w = 1; w < WARPS; w++) m0 = fmaxf(m0, warp_top[w][h]), m1 = fmaxf(m1, warp_top[w][h + 1]);
      const float f0 = exp2_fast(seen.top[t][0] - m0), f1 = exp2_fast(seen.top[t][1] - m1);
      float* to = laid + (warp * HEADS8 + h) * LAID + gid;
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        to[k * 16] = seen.acc[t][k][0] * f0, to[LAID + k * 16] = seen.acc[t][k][1] * f1;
        to[k * 16 + 8] = seen.acc[t][k][2] * f0, to[LAID + k * 16 + 8] = seen.acc[t][k][3] * f1;
      }
    }
    if (threadIdx.x < HEADS8) {
      const int h = threadIdx.x;
      float m = warp_top[0][h], l = 0.f;
#pragma unroll
      for (int w = 1; w < WARPS; w++) m = fmaxf(m, warp_top[w][h]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) l += warp_sum[w][h] * exp2_fast(warp_top[w][h] - m);
      top[h] = m, sum[h] = l;
    }
  }

  // The block's output of four channels from `channel` on of head h, before normalization.
  static __device__ __forceinline__ float4 output(const float* laid, int h, int channel) {
    const float* at = laid + h * LAID + channel;
    float4 x = *reinterpret_cast<const float4*>(at);
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      const float4 y = *reinterpret_cast<const float4*>(at + w * HEADS8 * LAID);
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    return x;
  }
};
__device__ __forceinline__ void store_output(real* to, float4 x, float factor) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_real(x.x * factor, x.y * factor), pack_real(x.z * factor, x.w * factor));
}

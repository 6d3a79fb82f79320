// What the blocks of a row have seen becomes its answer: each leaves its part, the one that ends last merges them.
#pragma once
#include "seen.cuh"

#define MOST_SPLITS 64

// Scratch as the kernels have it; ring is the block's dynamic shared memory, which nobody needs any more, ticket is shared; writes to [G, D]. Every thread
// calls it last.
__device__ __forceinline__ void merge_blocks(Seen& seen, Block& block, int& ticket, char* ring, real* to, float* parts, float* tops, int* counters) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, splits = gridDim.x;
  float* laid = reinterpret_cast<float*>(ring);
  block.gather(seen, laid);
  MARK(6)
  if (splits == 1) {
    for (int i = threadIdx.x * 4; i < GROUP_HEADS * D; i += THREADS * 4) store_output(to + i, Block::output(laid, i / D, i % D), 1.f / block.sum[i / D]);
    return;
  }
  const long long row = (long long)blockIdx.z * gridDim.y + blockIdx.y;
  float *part = parts + row * splits * (GROUP_HEADS * D), *top = tops + row * splits * (2 * HEADS8);
  for (int i = threadIdx.x * 4; i < GROUP_HEADS * D; i += THREADS * 4)
    __stcg(reinterpret_cast<float4*>(part + blockIdx.x * (GROUP_HEADS * D) + i), Block::output(laid, i / D, i % D));
  if (threadIdx.x < HEADS8)
    __stcg(reinterpret_cast<float2*>(top + (blockIdx.x * HEADS8 + threadIdx.x) * 2), make_float2(block.top[threadIdx.x], block.sum[threadIdx.x]));
  __threadfence();
  __syncthreads();
  MARK(7)
  if (threadIdx.x == 0) ticket = atomicAdd(counters + row, 1);
  __syncthreads();
  MARK(8)
  if (ticket != splits - 1) return;
  __threadfence();
  if (threadIdx.x == 0) counters[row] = 0;
  for (int h = warp; h < HEADS8; h += WARPS) { // each block's share of the softmax, a block a lane
    float m = -1e30f, l = 0.f;
    for (int i = lane; i < splits; i += 32) m = fmaxf(m, __ldcg(top + (i * HEADS8 + h) * 2));
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    for (int i = lane; i < splits; i += 32) {
      const float2 own = __ldcg(reinterpret_cast<const float2*>(top + (i * HEADS8 + h) * 2));
      const float f = exp2_fast(own.x - m);
      laid[i * HEADS8 + h] = f, l += f * own.y;
    }
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) l += __shfl_xor_sync(~0u, l, o);
    if (lane == 0) block.sum[h] = l;
  }
  __syncthreads();
  MARK(9)
  // Teams of threads share the parts; their sums meet in shared memory.
  const int cells = GROUP_HEADS * D / 4, teams = THREADS >= 2 * cells ? THREADS / cells : 1;
  float4* sums = reinterpret_cast<float4*>(laid + MOST_SPLITS * HEADS8);
  for (int i = threadIdx.x; i < cells * teams; i += THREADS) {
    const int cell = i % cells, h = cell * 4 / D;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int k = i / cells; k < splits; k += teams) {
      const float f = laid[k * HEADS8 + h];
      const float4 y = __ldcg(reinterpret_cast<const float4*>(part + k * (GROUP_HEADS * D)) + cell);
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
    if (teams == 1) store_output(to + cell * 4, x, 1.f / block.sum[h]);
    else sums[i] = x;
  }
  if (teams == 1) return;
  __syncthreads();
  for (int i = threadIdx.x; i < cells; i += THREADS) {
    float4 x = sums[i];
#pragma unroll
    for (int t = 1; t < teams; t++) {
      const float4 y = sums[t * cells + i];
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    store_output(to + i * 4, x, 1.f / block.sum[i * 4 / D]);
  }
  MARK(10)
}

// The choice of a row whose units above a bound are listed (list_units.cu): every block of the cluster makes it, and one writes it.
#pragma once
#include "pooling.cuh"

#define LIST_BINS (2 * THREADS)
#define MOST_TIED_IN_BIN 256 // units in the bin that is cut, at most

struct Marks { // shared memory, zero before
  __align__(16) int hist[LIST_BINS];
  __align__(16) u64 tied[MOST_TIED_IN_BIN];
  int listed, in_bin, bin, above, count; // the bin that is cut, one more than its index; units above it, and in it
};

struct Listed {
  Marks& s;
  uint2* list;  // [capacity] images of scores, and units
  u32* bitmap;  // a bit a unit of the row
  int capacity, words, wanted;
  float bound, factor;

  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < words; i += THREADS) bitmap[i] = 0;
  }
  __device__ __forceinline__ static float score_of(u32 image) {
    return __uint_as_float(HEADS > 1 ? image : image & 0x80000000u ? image & 0x7fffffffu : ~image);
  }
  __device__ __forceinline__ int bin_of(u32 image) const {
    if (HEADS > 1) return (int)min((image - __float_as_uint(bound)) >> 15, LIST_BINS - 1u);
    return (int)fminf((score_of(image) - bound) * factor, (float)(LIST_BINS - 1));
  }

  // Bring together and count what reaches the highest bound of all blocks' lists; false where one of them lacks a unit that does.
  __device__ __forceinline__ bool gather(const uint2* entries, const uint2* heads, int blocks, int room) {
    constexpr int AHEAD = 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, teams = THREADS / 32 / blocks, own = warp % blocks;
    const uint2 head = lane < blocks ? heads[lane] : make_uint2(0, 0);
    const u32 lowest = __reduce_max_sync(~0u, head.y);
    __syncthreads(); // counts and marks are cleared
    if (__any_sync(~0u, head.x > (u32)room) || __reduce_add_sync(~0u, (int)head.x) > capacity) return false;
    bound = score_of(lowest), factor = (float)(LIST_BINS - 1) / fmaxf(-bound, 1e-30f);
    const int count = __shfl_sync(~0u, (int)head.x, own);
    entries += (long long)own * room;
#pragma unroll 1
    for (int from = warp / blocks * 32 + lane; from < count && warp < teams * blocks; from += AHEAD * 32 * teams) {
      uint2 v[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) v[k] = from + k * 32 * teams < count ? entries[from + k * 32 * teams] : make_uint2(0, 0);
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        if (from + k * 32 * teams >= count || v[k].x < lowest) continue;
        list[atomicAdd(&s.listed, 1)] = v[k];
        atomicAdd(&s.hist[bin_of(v[k].x)], 1);
      }
    }
    __syncthreads();
    return true;
  }
  // The bin with the wanted-th unit; false where too few units are listed, or too many share it.
  __device__ __forceinline__ bool cut(int* warp_sums, int& turn) const {
    const int bin = LIST_BINS - 2 - 2 * threadIdx.x;
    const int2 two = *reinterpret_cast<const int2*>(s.hist + bin);
    const int mine = two.x + two.y, seen = block_scan(mine, warp_sums, turn) - mine;
    if (seen < wanted && seen + mine >= wanted) {
      const bool upper = seen + two.y >= wanted;
      s.bin = bin + upper + 1, s.above = upper ? seen : seen + two.y, s.count = upper ? two.y : two.x;
    }
    __syncthreads();
    return s.bin > 0 && s.count <= MOST_TIED_IN_BIN;
  }
  __device__ __forceinline__ void mark(u32 unit) const { atomicOr(&bitmap[unit >> 5], 1u << (unit & 31)); }
  // Mark what is chosen: all above the bin that is cut, and the best in it, the lowest units of equal ones.
  __device__ __forceinline__ void choose() const {
    const int tid = threadIdx.x, tied = s.count, need = wanted - s.above;
#pragma unroll 1
    for (int i = tid; i < s.listed; i += THREADS) {
      const uint2 v = list[i];
      const int bin = bin_of(v.x) + 1;
      if (bin > s.bin) mark(v.y);
      if (bin == s.bin) s.tied[atomicAdd(&s.in_bin, 1)] = (u64)v.x << 32 | ~v.y;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = tid >> 3; i < ((tied + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < tied ? s.tied[i] : 0;
      int better = 0;
#pragma unroll 1
      for (int k = tid & 7; k < tied; k += 8) better += s.tied[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      if ((tid & 7) == 0 && i < tied && better < need) mark(~(u32)own);
    }
    __syncthreads();
  }
  // Write the marked units, ascending.
  __device__ __forceinline__ void put(int* out, int* warp_sums, int& turn) const {
    const int each = (words + THREADS - 1) / THREADS, from = min(words, (int)threadIdx.x * each), to = min(words, from + each);
    int mine = 0;
#pragma unroll 1
    for (int i = from; i < to; i++) mine += __popc(bitmap[i]);
    int at = block_scan(mine, warp_sums, turn) - mine;
#pragma unroll 1
    for (int i = from; i < to; i++) {
      u32 flags = bitmap[i];
#pragma unroll 1
      for (; flags; flags &= flags - 1) out[at++] = i * 32 + __ffs(flags) - 1;
    }
  }
};

// Where many of a row's units share the key at the cut. A part of select.cu, whose types it knows.
#pragma once
#include "pooling.cuh"

// Split a bin of many ties by the lower four bits of its keys.
__device__ __forceinline__ void split_bin(Shared& s, const Share& share, int packets, u32 from, int wanted, int need) {
  const int tid = threadIdx.x;
  for (int p = tid; p < packets; p += THREADS) {
    u32 key[8];
    share.packet(p, key);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (key[k] >= from && key[k] <= (from | 15)) atomicAdd(&s.fine[key[k] & 15], 1);
    }
  }
  cluster_sync();
  if (tid < 32) {
    int sum = 0;
    if (tid < 16) {
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) sum += peer(s.fine, c)[15 - tid];
    }
    const int seen = warp_scan(sum) - sum;
    if (seen < need && seen + sum >= need) s.cut = {(int)((from & ~15u) | (15 - tid)), wanted - need + seen, sum};
  }
  __syncthreads();
}

// Rare: bisect for the lowest score, then the highest index, that still belong; every round counts over the cluster. Marks what belongs and returns
// how much of it lies in lower blocks.
__device__ __forceinline__ int bisect(Shared& s, const Share& share, int packets, u32 from, u32 to, int need, int rank, unsigned char* bytes, int& turn) {
  const int tid = threadIdx.x;
  u32 score_from = 0, score_to = 0xffffffffu; // largest cut with count(score >= cut) >= need lies in [score_from, score_to]
  u32 unit_from = 0, unit_to = share.last;    // smallest bound with count(score == cut, unit < bound) >= rest
  int rest = need;
  for (int round = 0; round < 64; round++) {
    const bool by_unit = score_from == score_to;
    if (by_unit && unit_from == unit_to) break;
    const u32 middle = by_unit ? unit_from + (unit_to - unit_from) / 2 : score_from + (score_to - score_from) / 2 + 1;
    int n = 0, over = 0;
    for (int p = tid; p < packets; p += THREADS) {
      u32 key[8];
      share.packet(p, key);
      for (int k = 0; k < 8; k++) {
        if (key[k] < from || key[k] > to) continue;
        const u32 u = share.begin + p * 8 + k, score = share.exact_score(u);
        n += by_unit ? score == score_from && u < middle : score >= middle;
        over += score > score_from;
      }
    }
    n = block_scan(n, s.warp_sums, turn);
    over = block_scan(over, s.warp_sums, turn);
    if (tid == THREADS - 1) s.round_count[0] = n, s.round_count[1] = over;
    cluster_sync();
    int sum = 0, sum_over = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += peer(s.round_count, c)[0], sum_over += peer(s.round_count, c)[1];
    cluster_sync();
    if (!by_unit) {
      if (sum >= need) score_from = middle;
      else score_to = middle - 1;
    } else {
      rest = need - sum_over;
      if (sum >= rest) unit_to = middle;
      else unit_from = middle + 1;
    }
  }
  int mine = 0;
  for (int p = tid; p < packets; p += THREADS) {
    u32 key[8], flags = bytes[p];
    share.packet(p, key);
    for (int k = 0; k < 8; k++) {
      if (key[k] < from || key[k] > to) continue;
      const u32 u = share.begin + p * 8 + k, score = share.exact_score(u);
      if (score > score_from || (score == score_from && u < unit_to)) flags |= 1u << k, mine++;
    }
    bytes[p] = flags;
  }
  mine = block_scan(mine, s.warp_sums, turn);
  if (tid == THREADS - 1) s.round_count[0] = mine;
  cluster_sync();
  int lower = 0;
  for (int c = 0; c < rank; c++) lower += peer(s.round_count, c)[0];
  return lower;
}

// The choice where a block has many units: what reaches a bound that more units than wanted reach goes into a list, and all later steps see only that.
//
// A sample of the row gives the bound, the same in every block of the cluster. Whether enough units reach it is counted, so the choice is exact: where too
// few do, or more than the list holds, every block of the cluster is told so, and they choose otherwise.
#pragma once
#include "pooling.cuh"

#ifndef LISTED
#define LISTED 6144 // units of a block's list
#endif
#ifndef SAMPLED
#define SAMPLED 512 // threads that sample eight units each
#endif
#ifndef TIMES
#define TIMES 3 // so many times the wanted units should reach the bound
#endif
#ifndef ORDER
#define ORDER 0
#endif
#ifndef DEPTH
#define DEPTH (HEADS > 4 ? 1 : 8 / HEADS) // packets of a thread under way
#endif
#define RING_SLOTS (DEPTH * HEADS)             // of sixteen bytes a thread in the ring
#define SIEVE_BINS (2 * THREADS)
#define CROWDED 512 // units of the cluster in the bin that is cut, at most

struct Sieved { // shared memory
  __align__(16) int sample[SIEVE_BINS], hist[SIEVE_BINS];
  __align__(16) u64 crowd[CROWDED];
  int listed, overflow, own_crowd, lower;
  int sample_bin, bin, above, count, start; // the bin that is cut: units above it, in it, and in it of lower blocks
};

__device__ __forceinline__ float disordered(u32 x) { return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x); }

struct Sieve {
  Sieved& s;
  const Share& share;
  u32 ring;    // shared address of this thread's first slot
  uint2* list; // [LISTED] order-preserving scores and units
  u32* bitmap; // a bit a unit
  float bound, factor;

  __device__ __forceinline__ void clear() const {
    const int tid = threadIdx.x;
    for (int i = tid; i < 2 * SIEVE_BINS; i += THREADS) s.sample[i] = 0; // and hist
    for (int i = tid; i < share.units / 32; i += THREADS) bitmap[i] = 0;
    if (tid == 0) s.listed = s.overflow = s.own_crowd = s.lower = 0, s.sample_bin = s.bin = -1;
  }
  __device__ __forceinline__ int bin_of(float score) const {
    if (HEADS > 1) return (int)min((__float_as_uint(score) - __float_as_uint(bound)) >> 15, SIEVE_BINS - 1u);
    return (int)fminf((score - bound) * factor, (float)(SIEVE_BINS - 1));
  }
  // Of the units [u, u + 8) those that may be chosen.
  __device__ __forceinline__ u32 eligible(int u) const {
    const int low = min(max(share.first - u, 0), 8), high = min(max(share.last - u, 0), 8);
    return (0xffu << low) & ((1u << high) - 1);
  }
  __device__ __forceinline__ int sampled_unit() const { return (int)threadIdx.x * (share.usable / 8) / SAMPLED * 8; }

  // Set the bound by the sampled units' scores h.
  __device__ __forceinline__ void sample(const u32 (&h)[HEADS][4], int* warp_sums, int& turn) {
    const int tid = threadIdx.x;
    if (tid < SAMPLED) {
      const int u = sampled_unit();
      const u32 may = eligible(u);
      float pooled[8];
      pool<4>(h, share.add + u / share.part_units * HEADS, pooled);
#pragma unroll
      for (int k = 0; k < 8; k++) {
        if (may >> k & 1) atomicAdd(&s.sample[key_of(pooled[k], share.scale) >> 5], 1);
      }
    }
    const int reach = max(1, (int)((long long)TIMES * share.wanted * (8 * SAMPLED) / share.usable));
    __syncthreads();
    const int2 v = *reinterpret_cast<const int2*>(s.sample + SIEVE_BINS - 2 - 2 * tid);
    const int seen = block_scan(v.x + v.y, warp_sums, turn) - v.x - v.y;
    if (seen < reach && seen + v.x + v.y >= reach) s.sample_bin = SIEVE_BINS - 2 - 2 * tid + (seen + v.y >= reach);
    __syncthreads();
    const int lowest = max((s.sample_bin << 5) - 1, 0); // key of the bin's lowest score, minus one
    bound = HEADS > 1 ? __uint_as_float((u32)lowest << 14) : share.scale.low + (float)lowest / share.scale.factor;
    factor = (float)(SIEVE_BINS - 1) / fmaxf(-bound, 1e-30f);
  }

  __device__ __forceinline__ int packet_of(int round) const {
    const int rounds = (share.units / 8 + THREADS - 1) / THREADS;
#if ORDER == 1
    return (round < rounds ? rounds - 1 - round : rounds) * THREADS + (int)threadIdx.x;
#elif ORDER == 2
    const int half = (rounds + 1) / 2, at = half - 1 - round / 2 + (round & 1 ? 0 : half);
    return (round >= 2 * half ? rounds : at) * THREADS + (int)threadIdx.x;
#else
    return round * THREADS + (int)threadIdx.x;
#endif
  }
  __device__ __forceinline__ void fetch(int round, int slot, int j, u64 policy) const {
    const int at = packet_of(round) * 8, u = share.begin + at;
    if (at < share.units && u < share.usable) copy16_once(ring + slot * (16 * THREADS), share.scores + j * share.stride + u, policy);
    copies_commit();
  }
  __device__ __forceinline__ void fetch_first(u64 policy) const {
#pragma unroll
    for (int i = 0; i < RING_SLOTS; i++) fetch(i / HEADS, i, i % HEADS, policy);
  }
  // Pool all units of the block and list those that reach the bound.
  __device__ __forceinline__ void load(u64 policy) const {
    const int rounds = (share.units / 8 + THREADS - 1) / THREADS;
    int part = (share.begin + (int)threadIdx.x * 8) / share.part_units, slot = 0;
#if ORDER == 2
    const int more = rounds & 1;
#else
    const int more = 0;
#endif
#pragma unroll 1
    for (int i = 0; i < rounds + more; i++) {
      const int at = packet_of(i) * 8, u = share.begin + at;
#if ORDER != 0
      part = u / share.part_units;
#endif
      while (u >= (part + 1) * share.part_units) part++;
      const float* add = share.add + part * HEADS;
      const bool there = at < share.units && u < share.usable;
      float pooled[8];
#pragma unroll
      for (int j = 0; j < HEADS; j++) {
        copies_wait<RING_SLOTS - 1>();
        const uint4 v = shared16(ring + (slot + j) * (16 * THREADS));
        const u32 one[1][4] = {{v.x, v.y, v.z, v.w}};
        add_head(one[0], there ? add[j] : 0.f, j == 0, pooled);
        fetch(i + DEPTH, slot + j, j, policy);
      }
      slot = slot + HEADS == RING_SLOTS ? 0 : slot + HEADS;
      u32 reach = 0;
#pragma unroll
#ifdef PROBE_NO_LIST
      for (int k = 0; k < 8; k++) reach |= pooled[k] == 12345.f ? 1u << k : 0;
#else
      for (int k = 0; k < 8; k++) reach |= pooled[k] >= bound ? 1u << k : 0;
#endif
      reach &= there ? eligible(u) : 0;
      if (reach) {
        int to = atomicAdd(&s.listed, __popc(reach));
#pragma unroll
        for (int k = 0; k < 8; k++) {
          if (reach >> k & 1) {
            if (to < LISTED) list[to] = make_uint2(ordered(pooled[k]), u + k);
            to++;
            atomicAdd(&s.hist[bin_of(pooled[k])], 1);
          }
        }
      }
    }
    copies_wait<0>();
  }
  // As pool() of pooling.cuh, a head at a time.
  __device__ __forceinline__ void add_head(const u32 (&h)[4], float c, bool first, float (&out)[8]) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&h[k]));
      float x = f.x + c, y = f.y + c;
      if (HEADS > 1) {
#ifndef PROBE_NO_EXP
        x = exp2_fast(x), y = exp2_fast(y);
#endif
        if (!first) {
          x = MAXIMUM ? fmaxf(out[2 * k], x) : out[2 * k] + x;
          y = MAXIMUM ? fmaxf(out[2 * k + 1], y) : out[2 * k + 1] + y;
        }
      }
      out[2 * k] = x, out[2 * k + 1] = y;
    }
  }

  // The bin with the wanted-th unit, from the counts of all blocks; false where the lists do not hold it.
  __device__ __forceinline__ bool cut(int rank, int* warp_sums, int& turn) const {
    const int tid = threadIdx.x, bin = SIEVE_BINS - 2 - 2 * tid, wanted = share.wanted;
    int2 all = make_int2(0, 0), lower = make_int2(0, 0);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const int2 v = *peer(reinterpret_cast<const int2*>(s.hist + bin), c);
      all.x += v.x, all.y += v.y;
      if (c < rank) lower.x += v.x, lower.y += v.y;
    }
    if (tid < CLUSTER && *peer(&s.listed, tid) > LISTED) s.overflow = 1;
    const int mine = all.x + all.y, seen = block_scan(mine, warp_sums, turn) - mine;
    if (seen < wanted && seen + mine >= wanted) {
      const bool upper = seen + all.y >= wanted;
      s.bin = bin + upper, s.above = upper ? seen : seen + all.y, s.count = upper ? all.y : all.x, s.start = upper ? lower.y : lower.x;
    }
    __syncthreads();
    if (s.bin < 0 || s.overflow || s.count > CROWDED) return false;
    const int before = __reduce_add_sync(~0u, (bin + 1 > s.bin ? lower.y : 0) + (bin > s.bin ? lower.x : 0));
    if ((tid & 31) == 0 && before) atomicAdd(&s.lower, before);
    return true;
  }
  __device__ __forceinline__ void mark(u32 unit) const { atomicOr(&bitmap[(unit - share.begin) >> 5], 1u << ((unit - share.begin) & 31)); }
  // Mark what is chosen; returns how much of it lies in lower blocks.
  __device__ __forceinline__ int choose() const {
    const int tid = threadIdx.x, count = s.listed;
    for (int i = tid; i < count; i += THREADS) {
      const uint2 v = list[i];
      const int bin = bin_of(disordered(v.x));
      if (bin > s.bin) mark(v.y);
      if (bin == s.bin) {
        const int at = s.start + atomicAdd(&s.own_crowd, 1);
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) *peer(&s.crowd[at], c) = (u64)v.x << 32 | ~v.y;
      }
    }
    MARK(7)
    cluster_sync(); // nobody reads or writes others' memory any more
    MARK(8)
    const int crowd = s.count, need = share.wanted - s.above, end = s.start + s.own_crowd;
    for (int i = tid >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < crowd ? s.crowd[i] : 0;
      int better = 0;
      for (int k = tid & 7; k < crowd; k += 8) better += s.crowd[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      if ((tid & 7) || i >= end || better >= need) continue;
      if (i < s.start) atomicAdd(&s.lower, 1);
      else mark(~(u32)own);
    }
    __syncthreads();
    return s.lower;
  }
  // Write the marked units, ascending, from out[at] on.
  __device__ __forceinline__ void put(int* out, int at, int* warp_sums, int& turn) const {
    const int words = share.units / 32, each = (words + THREADS - 1) / THREADS, from = min(words, (int)threadIdx.x * each), to = min(words, from + each);
    int mine = 0;
    for (int i = from; i < to; i++) mine += __popc(bitmap[i]);
    at += block_scan(mine, warp_sums, turn) - mine;
    for (int i = from; i < to; i++) {
      u32 flags = bitmap[i];
      while (flags) {
        out[at++] = share.begin + i * 32 + __ffs(flags) - 1;
        flags &= flags - 1;
      }
    }
  }
};

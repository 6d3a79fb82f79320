// The choice where a block has many units: what reaches a bound that more units than wanted reach goes into a list, and all later steps see only that.
//
// A sample of the row gives the bound, the same in every block of the cluster. Whether enough units reach it is counted, so the choice is exact: where too
// few do, or more than the list holds, every block of the cluster is told so, and they choose otherwise.
#pragma once
#include "inbox.cuh"
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
#ifndef DEPTH
#define DEPTH (HEADS > 4 ? 1 : 8 / HEADS) // packets of a thread under way
#endif
#define RING_SLOTS (DEPTH * HEADS) // of sixteen bytes a thread
#define SIEVE_BINS (2 * THREADS)
#define CROWDED 512 // units of the cluster in the bin that is cut, at most
#define OVERFLOWN 0xffffu
#ifdef DESCENDING
#define STEP (-8 * THREADS)
#else
#define STEP (8 * THREADS)
#endif

struct Sieved { // shared memory
  __align__(16) int sample[SIEVE_BINS], hist[SIEVE_BINS];
  __align__(16) u64 crowd[CROWDED];
  __align__(16) u32 told[CLUSTER > 1 ? CLUSTER - 1 : 1][SIEVE_BINS / 2]; // counts of the other blocks, two in a word
  u64 box[2];
  int listed, overflow, own_crowd, lower;
  int sample_bin, bin, above, count, start; // the bin that is cut: units above it, in it, and in it of lower blocks
};

struct Sieve {
  Sieved& s;
  const Share& share;
  u32 ring;    // shared address of this thread's first slot
  uint2* list; // [LISTED] images of scores, and units
  u32* bitmap; // a bit a unit
  float bound, factor;

  // Counts are zero already, and boxes open.
  __device__ __forceinline__ void clear() const {
    const int tid = threadIdx.x;
    for (int i = tid; i < share.units / 32; i += THREADS) bitmap[i] = 0;
    if (tid == 0) {
      s.listed = s.overflow = s.own_crowd = s.lower = 0, s.sample_bin = s.bin = -1;
      if (CLUSTER > 1) inbox_expect(&s.box[0], (CLUSTER - 1) * SIEVE_BINS * 2);
    }
  }
  // Order-preserving; pooled softmaxes are not negative.
  __device__ __forceinline__ u32 image(float score) const { return HEADS > 1 ? __float_as_uint(score) : ordered(score); }
  __device__ __forceinline__ int bin_of(float score) const {
    if (HEADS > 1) return (int)min((__float_as_uint(score) - __float_as_uint(bound)) >> 15, SIEVE_BINS - 1u);
    return (int)fminf((score - bound) * factor, (float)(SIEVE_BINS - 1));
  }
  __device__ __forceinline__ int bin_again(u32 x) const {
    return bin_of(__uint_as_float(HEADS > 1 ? x : x & 0x80000000u ? x & 0x7fffffffu : ~x));
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

  __device__ __forceinline__ int rounds() const { return (share.units + 8 * THREADS - 1) / (8 * THREADS); }
  __device__ __forceinline__ int first_at() const { return threadIdx.x * 8 + (STEP < 0 ? (rounds() - 1) * 8 * THREADS : 0); }
  // The packet at `at` units of the block, and of `from`, into a slot.
  __device__ __forceinline__ void fetch(const __half* from, int at, u32 slot, u64 policy) const {
    if (at >= 0 && at < share.units && share.begin + at < share.usable) {
      const char* p = reinterpret_cast<const char*>(from);
      const u32 stride = (u32)share.stride * 2;
#pragma unroll
      for (int j = 0; j < HEADS; j++) copy16_once(slot + j * (16 * THREADS), p + j * stride, policy);
    }
    copies_commit();
  }
  __device__ __forceinline__ void fetch_first(u64 policy) const {
    const int at = first_at();
#pragma unroll
    for (int i = 0; i < DEPTH; i++) fetch(share.scores + share.begin + at + i * STEP, at + i * STEP, ring + i * HEADS * (16 * THREADS), policy);
  }
  // Pool all units of the block and list those that reach the bound.
  __device__ __forceinline__ void load(u64 policy) const {
    const u32 slots_end = ring + RING_SLOTS * (16 * THREADS);
    int at = first_at(), part = (share.begin + at) / share.part_units;
    u32 slot = ring;
    const __half* from = share.scores + share.begin + at + DEPTH * STEP;
#pragma unroll 1
    for (int i = rounds(); i; i--, at += STEP, from += STEP) {
      const int u = share.begin + at;
      u32 h[HEADS][4];
      copies_wait<DEPTH - 1>();
#pragma unroll
      for (int j = 0; j < HEADS; j++) {
        const uint4 v = shared16(slot + j * (16 * THREADS));
        h[j][0] = v.x, h[j][1] = v.y, h[j][2] = v.z, h[j][3] = v.w;
      }
      fetch(from, at + DEPTH * STEP, slot, policy);
      slot += HEADS * (16 * THREADS);
      if (slot == slots_end) slot = ring;
      if (at >= share.units || u >= share.usable) continue;
      if (STEP < 0) part = u / share.part_units;
      while (u >= (part + 1) * share.part_units) part++;
      float pooled[8];
      pool<4>(h, share.add + part * HEADS, pooled);
      u32 reach = 0;
#pragma unroll
      for (int k = 0; k < 8; k++) {
#ifdef PROBE_NO_LIST
        reach |= pooled[k] == 12345.f ? 1u << k : 0;
#else
        reach |= pooled[k] >= bound ? 1u << k : 0;
#endif
      }
      if (u < share.first || u + 8 > share.last) reach &= eligible(u);
      if (reach) {
        int to = atomicAdd(&s.listed, __popc(reach));
        const bool room = to + 8 <= LISTED;
        uint2* place = list + to;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          if (reach >> k & 1) {
            if (room) *place++ = make_uint2(image(pooled[k]), u + k);
            atomicAdd(&s.hist[bin_of(pooled[k])], 1);
          }
        }
      }
    }
    copies_wait<0>();
  }

  // The bin with the wanted-th unit, from the counts of all blocks; false where the lists do not hold it.
  __device__ __forceinline__ bool cut(int rank, int* warp_sums, int& turn) const {
    const int tid = threadIdx.x, bin = SIEVE_BINS - 2 - 2 * tid, wanted = share.wanted;
    __syncthreads(); // all are counted
    const bool overflow = s.listed > LISTED - 8;
    if (CLUSTER > 1 && tid < SIEVE_BINS / 8) {
      const int4 a = *reinterpret_cast<const int4*>(s.hist + 8 * tid), b = *reinterpret_cast<const int4*>(s.hist + 8 * tid + 4);
      const uint4 v = make_uint4(a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, overflow ? OVERFLOWN << 16 : b.z | b.w << 16);
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) {
        if (c != rank) inbox_put(reinterpret_cast<uint4*>(s.told[rank - (rank > c)]) + tid, v, &s.box[0], c);
      }
    }
    int2 all = *reinterpret_cast<const int2*>(s.hist + bin), lower = make_int2(0, 0);
    bool over = overflow;
    if (CLUSTER > 1) inbox_wait(&s.box[0]);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      if (CLUSTER == 1 || c == rank) continue;
      const u32 v = s.told[c - (c > rank)][bin / 2], x = v & 0xffff, y = v >> 16;
      all.x += x, all.y += y, over |= y == OVERFLOWN;
      if (c < rank) lower.x += x, lower.y += y;
    }
    if (over) s.overflow = 1;
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
  __device__ __forceinline__ int choose(int rank) const {
    const int tid = threadIdx.x, count = s.listed, cut = s.bin, start = s.start, crowd = s.count, own_crowd = s.hist[cut];
    if (CLUSTER > 1 && tid == 0) inbox_expect(&s.box[1], (crowd - own_crowd) * 8);
#pragma unroll 1
    for (int i = tid; i < count; i += THREADS) {
      const uint2 v = list[i];
      const int bin = bin_again(v.x);
      if (bin > cut) mark(v.y);
      if (bin == cut) {
        const int at = start + atomicAdd(&s.own_crowd, 1);
        const u64 one = (u64)v.x << 32 | ~v.y;
        s.crowd[at] = one;
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) {
          if (CLUSTER > 1 && c != rank) inbox_put(&s.crowd[at], one, &s.box[1], c);
        }
      }
    }
    MARK(7)
    __syncthreads();
    if (CLUSTER > 1) inbox_wait(&s.box[1]);
    MARK(8)
    const int need = share.wanted - s.above, end = start + own_crowd;
    for (int i = tid >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < crowd ? s.crowd[i] : 0;
      int better = 0;
      for (int k = tid & 7; k < crowd; k += 8) better += s.crowd[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      if ((tid & 7) || i >= end || better >= need) continue;
      if (i < start) atomicAdd(&s.lower, 1);
      else mark(~(u32)own);
    }
    __syncthreads();
    return s.lower;
  }
#ifdef DISCARD
  // Scores are not needed any more: what of them is still in the second-level cache need not be written to memory.
  __device__ __forceinline__ void discard() const {
    const int last = min(share.begin + share.units, share.usable) / 64;
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
      for (int i = (share.begin + 63) / 64 + threadIdx.x; i < last; i += THREADS) {
        const __half* line = share.scores + j * share.stride + i * 64;
        if (((u64)line & 127) == 0) asm volatile("discard.global.L2 [%0],128;" ::"l"(line) : "memory");
      }
    }
  }
#endif
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

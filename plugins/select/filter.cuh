// The choice where a block has many units: what reaches a bound that more units than wanted reach goes into a list, and all later steps see only that.
//
// A sample of the row gives the bound, the same in every block of the cluster. Whether enough units reach it is counted, so the choice is exact: where too
// few do, or more than the list holds, every block of the cluster is flagged, and they choose otherwise.
#pragma once
#include "dsmem.cuh"
#include "pooling.cuh"

#define REACH 200         // percent of the wanted units that should reach the bound
#define DEPTH (8 / HEADS) // packets of a thread under way: at most four heads
#define SLOT (16 * THREADS)         // bytes of a head's packets of all threads
#define RING (DEPTH * HEADS * SLOT) // bytes
#define FILTER_BINS (2 * THREADS)
#define SAMPLE_BINS THREADS
#define MOST_TIED_IN_BIN 256 // units of the cluster in the bin that is cut, at most
#define OVERFLOWN 0xffffu
#define STEP 256 // units from a warp's packets to its next: a warp has neighbours, so that all warps' first ones are a sample

struct Filtered { // shared memory
  __align__(16) int sample[SAMPLE_BINS], hist[FILTER_BINS];
  __align__(16) u64 tied[MOST_TIED_IN_BIN];
  __align__(16) u32 peer_sample[CLUSTER > 1 ? CLUSTER - 1 : 1][SAMPLE_BINS / 2], peer_hist[CLUSTER > 1 ? CLUSTER - 1 : 1][FILTER_BINS / 2]; // others' counts
  u64 box[3];
  int listed, overflow, own_tied, lower;
  int sample_bin, bin, above, count, start; // the bin that is cut: units above it, in it, and in it of lower blocks
};

struct Filter {
  Filtered& s;
  const Share& share;
  char* ring;  // this thread's first slot
  u32* filter; // [parts, HEADS], pairs of halves
  uint2* list; // [capacity] images of scores, and units
  int capacity;
  u32* bitmap; // a bit a unit
  float bound, factor;

  // Counts are zero already, and boxes open.
  __device__ __forceinline__ void clear() const {
    const int tid = threadIdx.x;
#pragma unroll 1
    for (int i = tid; i < share.units / 32; i += THREADS) bitmap[i] = 0;
    if (tid == 0) {
      s.listed = s.overflow = s.own_tied = s.lower = 0, s.sample_bin = s.bin = -1;
      if (CLUSTER > 1) dsmem_expect(&s.box[0], (CLUSTER - 1) * SAMPLE_BINS * 2), dsmem_expect(&s.box[1], (CLUSTER - 1) * FILTER_BINS * 2);
    }
  }
  // Order-preserving; pooled softmaxes are not negative.
  __device__ __forceinline__ u32 image(float score) const { return HEADS > 1 ? __float_as_uint(score) : ordered(score); }
  __device__ __forceinline__ int bin_of(float score) const {
    if (HEADS > 1) return (int)min((__float_as_uint(score) - __float_as_uint(bound)) >> 15, FILTER_BINS - 1u);
    return (int)fminf((score - bound) * factor, (float)(FILTER_BINS - 1));
  }
  __device__ __forceinline__ int bin_again(u32 x) const {
    return bin_of(__uint_as_float(HEADS > 1 ? x : x & 0x80000000u ? x & 0x7fffffffu : ~x));
  }
  __device__ __forceinline__ int rounds() const { return (share.units + 8 * THREADS - 1) / (8 * THREADS); }
  __device__ __forceinline__ int first_at() const { return (threadIdx.x >> 5) * STEP * rounds() + (threadIdx.x & 31) * 8; }
  __device__ __forceinline__ bool there(int at) const { return at < share.units && share.begin + at < share.usable; }

  // Tell the other blocks counts of N bins; flagged: in the last one.
  template <int N> __device__ __forceinline__ void exchange_counts(const int* counts, u32 (*peer_hist)[N / 2], u64* box, int rank, bool flagged) const {
    const int tid = threadIdx.x;
    if (CLUSTER == 1 || tid >= N / 8) return;
    const int4 a = *reinterpret_cast<const int4*>(counts + 8 * tid), b = *reinterpret_cast<const int4*>(counts + 8 * tid + 4);
    const uint4 v = make_uint4(a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, flagged ? OVERFLOWN << 16 : b.z | b.w << 16);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      if (c != rank) dsmem_store(reinterpret_cast<uint4*>(peer_hist[rank - (rank > c)]) + tid, v, box, c);
    }
  }
  // Set the bound by half of every thread's first units.
  __device__ __forceinline__ void sample(int rank, int* warp_sums, int& turn) {
    const int tid = threadIdx.x, at = first_at(), u = share.begin + at;
    copies_wait<DEPTH - 1>();
    if (there(at)) {
      u32 h[HEADS][2];
      float pooled[4];
#pragma unroll
      for (int j = 0; j < HEADS; j++) {
        const uint2 v = *reinterpret_cast<const uint2*>(ring + j * SLOT);
        h[j][0] = v.x, h[j][1] = v.y;
      }
      pool<2>(h, share.add + u / share.part_units * HEADS, pooled);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (u + k >= share.first && u + k < share.last) atomicAdd(&s.sample[key_of(pooled[k], share.scale) >> 6], 1);
      }
    }
    const int reach = max(1, REACH * share.wanted / (200 * rounds()));
    __syncthreads();
    exchange_counts<SAMPLE_BINS>(s.sample, s.peer_sample, &s.box[0], rank, false);
    const int bin = SAMPLE_BINS - 1 - tid;
    int mine = s.sample[bin];
    if (CLUSTER > 1) {
      dsmem_wait(&s.box[0]);
#pragma unroll
      for (int c = 0; c < CLUSTER - 1; c++) mine += s.peer_sample[c][bin / 2] >> 16 * (bin & 1) & 0xffff;
    }
    const int seen = block_scan(mine, warp_sums, turn) - mine;
    if (seen < reach && seen + mine >= reach) s.sample_bin = bin;
    __syncthreads();
    const int lowest = max((s.sample_bin << 6) - 1, 0); // key of the bin's lowest score, minus one
    bound = HEADS > 1 ? __uint_as_float((u32)lowest << 14) : share.scale.low + (float)lowest / share.scale.factor;
    factor = (float)(FILTER_BINS - 1) / fmaxf(-bound, 1e-30f);
#pragma unroll 1
    for (int i = tid; i < (share.usable + share.part_units - 1) / share.part_units * HEADS; i += THREADS) {
      __half2 two;
      if (HEADS > 1) {
        const float low = fmaxf(share.add[i] - log2f(bound) + 9.f, -110.f);
        if (!(low < 110.f)) s.overflow = 1;
        two = __float2half2_rn(low * (1.f / 15.f));
      } else {
        const float low = bound - share.add[i];
        two = __float2half2_rn(low - fabsf(low) * 0x1p-10f - (fabsf(bound) + 1.f) * 0x1p-20f);
      }
      filter[i] = *reinterpret_cast<const u32*>(&two);
    }
    __syncthreads();
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

  // The packet at `at` units of the block, and of `from`, into a slot.
  __device__ __forceinline__ void fetch(const __half* from, int at, char* slot, u64 policy) const {
    if (there(at)) {
      const char* p = reinterpret_cast<const char*>(from);
      const u32 stride = (u32)share.stride * 2, to = shared_at(slot);
#pragma unroll
      for (int j = 0; j < HEADS; j++) copy16_once(to + j * SLOT, p + j * stride, policy);
    }
    copies_commit();
  }
  __device__ __forceinline__ void fetch_first(u64 policy) const {
    const int at = first_at();
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      fetch(share.scores + share.begin + at + i * STEP, at + i * STEP, ring + i * HEADS * SLOT, policy);
      if (i == 0) __syncthreads(); // all first packets are asked for before others: they are the sample
    }
  }
  // List the units of the block that reach the bound.
  __device__ __forceinline__ void load(u64 policy) const {
    char *slot = ring, *const end = ring + RING;
    int at = first_at(), part = (share.begin + at) / share.part_units;
    const __half* from = share.scores + share.begin + at + DEPTH * STEP;
#pragma unroll 1
    for (int i = rounds(); i; i--, at += STEP, from += STEP) {
      const int u = share.begin + at;
      copies_wait<DEPTH - 1>();
      if (there(at)) {
        while (u >= (part + 1) * share.part_units) part++;
        u32 h[HEADS][4];
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
          const uint4 v = *reinterpret_cast<const uint4*>(slot + j * SLOT);
          h[j][0] = v.x, h[j][1] = v.y, h[j][2] = v.z, h[j][3] = v.w;
        }
        u32 left = near(h, filter + part * HEADS);
#pragma unroll 1
        for (; left; left &= left - 1) {
          const int bit = __ffs(left) - 1;
          keep(slot, share.add + part * HEADS, u, (bit & 15) + (bit >> 4));
        }
      }
      fetch(from, at + DEPTH * STEP, slot, policy);
      slot += HEADS * SLOT;
      if (slot == end) slot = ring;
    }
    copies_wait<0>();
  }
  // Pool the k-th unit of a packet as pooling.cuh does, and list it where it reaches the bound.
  __device__ __forceinline__ void keep(const char* slot, const float* add, int u, int k) const {
    float score = 0.f;
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
      float x = __half2float(*reinterpret_cast<const __half*>(slot + j * SLOT + k * 2)) + add[j];
      if (HEADS > 1) x = exp2_fast(x);
      score = j == 0 ? x : MAXIMUM ? fmaxf(score, x) : score + x;
    }
    if (!(score >= bound) || u + k < share.first || u + k >= share.last) return;
    const int to = atomicAdd(&s.listed, 1);
    if (to < capacity) list[to] = make_uint2(image(score), u + k);
    atomicAdd(&s.hist[bin_of(score)], 1);
  }

  // The bin with the wanted-th unit, from the counts of all blocks; false where the lists do not hold it.
  __device__ __forceinline__ bool cut(int rank, int* warp_sums, int& turn) const {
    const int tid = threadIdx.x, bin = FILTER_BINS - 2 - 2 * tid, wanted = share.wanted;
    __syncthreads(); // all are counted
    const bool overflow = s.listed > capacity;
    exchange_counts<FILTER_BINS>(s.hist, s.peer_hist, &s.box[1], rank, overflow);
    int2 all = *reinterpret_cast<const int2*>(s.hist + bin), lower = make_int2(0, 0);
    bool over = overflow;
    if (CLUSTER > 1) dsmem_wait(&s.box[1]);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      if (CLUSTER == 1 || c == rank) continue;
      const u32 v = s.peer_hist[c - (c > rank)][bin / 2], x = v & 0xffff, y = v >> 16;
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
    if (s.bin < 0 || s.overflow || s.count > MOST_TIED_IN_BIN) return false;
    const int before = __reduce_add_sync(~0u, (bin + 1 > s.bin ? lower.y : 0) + (bin > s.bin ? lower.x : 0));
    if ((tid & 31) == 0 && before) atomicAdd(&s.lower, before);
    return true;
  }
  __device__ __forceinline__ void mark(u32 unit) const { atomicOr(&bitmap[(unit - share.begin) >> 5], 1u << ((unit - share.begin) & 31)); }
  // Mark what is chosen; returns how much of it lies in lower blocks.
  __device__ __forceinline__ int choose(int rank) const {
    const int tid = threadIdx.x, count = s.listed, cut = s.bin, start = s.start, tied = s.count, own_tied = s.hist[cut];
    if (CLUSTER > 1 && tid == 0) dsmem_expect(&s.box[2], (tied - own_tied) * 8);
#pragma unroll 1
    for (int i = tid; i < count; i += THREADS) {
      const uint2 v = list[i];
      const int bin = bin_again(v.x);
      if (bin > cut) mark(v.y);
      if (bin == cut) {
        const int at = start + atomicAdd(&s.own_tied, 1);
        const u64 one = (u64)v.x << 32 | ~v.y;
        s.tied[at] = one;
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) {
          if (CLUSTER > 1 && c != rank) dsmem_store(&s.tied[at], one, &s.box[2], c);
        }
      }
    }
    MARK(7)
    __syncthreads();
    if (CLUSTER > 1) dsmem_wait(&s.box[2]);
    MARK(8)
    const int need = share.wanted - s.above, end = start + own_tied;
#pragma unroll 1
    for (int i = tid >> 3; i < ((tied + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < tied ? s.tied[i] : 0;
      int better = 0;
#pragma unroll 1
      for (int k = tid & 7; k < tied; k += 8) better += s.tied[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      if ((tid & 7) || i >= end || better >= need) continue;
      if (i < start) atomicAdd(&s.lower, 1);
      else mark(~(u32)own);
    }
    __syncthreads();
    return s.lower;
  }
  // Write the marked units, ascending, from out[at] on.
  __device__ __forceinline__ void put(int* out, int at, int* warp_sums, int& turn) const {
    const int words = share.units / 32, each = (words + THREADS - 1) / THREADS, from = min(words, (int)threadIdx.x * each), to = min(words, from + each);
    int mine = 0;
#pragma unroll 1
    for (int i = from; i < to; i++) mine += __popc(bitmap[i]);
    at += block_scan(mine, warp_sums, turn) - mine;
    MARK(11)
#pragma unroll 1
    for (int i = from; i < to; i++) {
      u32 flags = bitmap[i];
      while (flags) {
        out[at++] = share.begin + i * 32 + __ffs(flags) - 1;
        flags &= flags - 1;
      }
    }
  }
};

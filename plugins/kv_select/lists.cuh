// The choice where a row has many units: what reaches a bound that more units than wanted reach goes into a list, and all later steps see only lists.
//
// Several blocks share a row. Each takes the same sample of the row, hence the same bound, lists what reaches it in the pieces of the row that are its own,
// and tells the others its list through words of global memory. All find the same cut among the lists of all, and each writes what is chosen in a stretch
// of the row. Whether enough units
// reach the bound is counted, so the choice is exact: where too few do, or more than a list holds, or a block waits for another one's list in vain (they
// need not run at the same time), it chooses from the whole row by itself.
#pragma once
#include "async.cuh"
#include "post.cuh"
#include "ranked.cuh"

#ifndef REACH
#define REACH 250
#endif // percent of the wanted units that should reach the bound
// DEPTH: stages of the ring, STAGE units of every head each, eight units a thread of every other warp: half of the warps look through one stage, half through
// the next.
#define STAGE (4 * THREADS)         // units
#define SLOT (2 * STAGE)            // bytes of a head
#define RING (DEPTH * HEADS * SLOT) // bytes
#define SIEVE_BINS (2 * THREADS)
#define SAMPLE_BINS THREADS
#define SAMPLED (2 * THREADS) // units of the sample, four at a place
#ifndef PIECE
#define PIECE 512
#endif             // units: they are dealt to a row's blocks in turn, because what is chosen often lies together
#ifndef EARLY
#define EARLY min(DEPTH - 1, max(1, 14 / HEADS)) // stages that are asked for before the bound is known
#endif
#define TEAM (THREADS / 2)
#define SHARERS 8    // blocks of a row, at most
#define FEWEST 24    // units of the sample that reach the bound, at least: of few nothing follows
#define CROWDED 1024 // units of the row in the bin that is cut, at most
// PATIENCE: looks for a word

#include "bound.cuh"

struct Sieved { // shared memory
  __align__(16) int sample[SAMPLE_BINS], hist[SIEVE_BINS];
  union {
    __align__(16) u64 crowd[CROWDED];
    unsigned char queue[THREADS / 32][256]; // what a warp looks at, before
  };
  int listed, overflow, crowded, lower;
  int undecided, late; // what others tell is not all or did not come: its length, and the rest
  int sample_bin, bin, above, count; // the bin that is cut: units above it and in it
  int counts[SHARERS];
  u32 stamp;
  int done[DEPTH]; // how many warps have read a stage in this place
  u64 full[DEPTH];
};

// What blocks of a row tell each other: of each the length of its list and whether that is all, then two entries a word.
struct Letters {
  uint4* words;
  int room, rank, blocks;
  __device__ __forceinline__ uint4* of(int block) const { return words + (long long)block * room; }
};

struct Sieve : Bound {
  Sieved& s;
  const Share& share;
  const Letters& mail;
  char* ring;
  u32* filter; // [parts, HEADS], pairs of halves
  uint2* list; // [capacity] images of scores, and units, counted within the block's pieces
  int capacity;
  u32* bitmap; // a bit a unit

  // Counts are zero already.
  __device__ __forceinline__ void clear() const {
    const int tid = threadIdx.x;
#pragma unroll 1
    for (int i = tid; i < share.units / 32; i += THREADS) bitmap[i] = 0;
    if (tid < DEPTH) s.done[tid] = 0;
    if (tid == 0) s.listed = s.overflow = s.crowded = s.lower = s.undecided = s.late = 0, s.sample_bin = s.bin = -1;
  }
  // Units in the pieces of this block, and where one of a block's lies in the row.
  __device__ __forceinline__ int limit() const {
    const int whole = share.usable / PIECE, rest = whole % mail.blocks == mail.rank ? share.usable % PIECE : 0;
    return max(0, whole - mail.rank + mail.blocks - 1) / mail.blocks * PIECE + rest;
  }
  __device__ __forceinline__ int in_row(int block, int at) const { return (at / PIECE * mail.blocks + block) * PIECE + at % PIECE; }
  __device__ __forceinline__ int rounds() const { return (limit() + STAGE - 1) / STAGE; }

  // This thread's two units of the sample, which lies spread over the row.
  __device__ __forceinline__ int sampled() const { return (int)(threadIdx.x >> 1) * (share.usable >> 2) / (THREADS / 2) * 4 + (threadIdx.x & 1) * 2; }
  __device__ __forceinline__ void ask(u32 (&h)[HEADS][1]) const {
#pragma unroll
    for (int j = 0; j < HEADS; j++) load_halves(h[j], share.scores + j * share.stride + sampled());
  }
  // Set the bound by the sample.
  __device__ __forceinline__ void sample(const u32 (&h)[HEADS][1], int* warp_sums, int& turn) {
    const int tid = threadIdx.x, u = sampled();
    float pooled[2];
    pool<1>(h, share.add + u / share.part_units * HEADS, pooled);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (u + k >= share.first && u + k < share.last) atomicAdd(&s.sample[key_of(pooled[k], share.scale) >> 6], 1);
    }
    const int reach = max(FEWEST, REACH * share.wanted / 100 * SAMPLED / max(1, share.usable));
    __syncthreads();
    const int bin = SAMPLE_BINS - 1 - tid, mine = s.sample[bin], seen = block_scan(mine, warp_sums, turn) - mine;
    if (seen < reach && seen + mine >= reach) s.sample_bin = bin;
    __syncthreads();
    set(s.sample_bin, share.scale);
#pragma unroll 1
    for (int i = tid; i < (share.usable + share.part_units - 1) / share.part_units * HEADS; i += THREADS) {
      if (!low(share.add[i], filter[i])) s.overflow = 1;
    }
    __syncthreads();
  }
  // Ask for a stage, by one warp, a lane a piece of a head. It waits until the copies are on their way.
  __device__ __forceinline__ void fetch(int stage, u64 policy) const {
    const int lane = threadIdx.x & 31, slot = stage % DEPTH, count = min(STAGE, limit() - stage * STAGE) + 7 & ~7;
    if (stage >= rounds()) return;
    if (lane == 0) barrier_expect(&s.full[slot], count * HEADS * 2);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < HEADS * (STAGE / PIECE); i += 32) {
      const int head = i / (STAGE / PIECE), at = i % (STAGE / PIECE) * PIECE;
      if (at >= count) continue;
      const __half* from = share.scores + head * share.stride + in_row(mail.rank, stage * STAGE + at);
      bulk_copy(shared_at(ring + slot * HEADS * SLOT + head * SLOT + at * 2), from, min(PIECE, count - at) * 2, &s.full[slot], policy);
    }
  }
  // List the units of the block that reach the bound.
  __device__ __forceinline__ void load(u64 policy) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tid = threadIdx.x % TEAM, units = limit();
    int slot = threadIdx.x / TEAM % DEPTH, phase = threadIdx.x / TEAM / DEPTH;
    int at = threadIdx.x / TEAM * STAGE + tid * 8, unit = in_row(mail.rank, at), part = unit / share.part_units;
    unsigned char* queue = s.queue[warp];
#pragma unroll 1
    for (int i = threadIdx.x / TEAM; i < rounds(); i += 2, at += 2 * STAGE, unit += 2 * STAGE * mail.blocks) {
      count_await(&s.done[slot], phase * (TEAM / 32)); // the stage before this one was the other half's: a barrier's phases are told apart by one bit
      barrier_await(&s.full[slot], phase & 1);
      const char* stage = ring + slot * HEADS * SLOT;
      u32 left = 0;
      while (unit >= (part + 1) * share.part_units) part++;
      if (at < units) {
        u32 h[HEADS][4];
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
          const uint4 v = *reinterpret_cast<const uint4*>(stage + j * SLOT + tid * 16);
          h[j][0] = v.x, h[j][1] = v.y, h[j][2] = v.z, h[j][3] = v.w;
        }
        left = near(h, filter + part * HEADS);
      }
      // What may reach the bound is looked at by one lane each.
      const int mine = __popc(left), end = warp_scan(mine), total = __shfl_sync(~0u, end, 31);
#pragma unroll 1
      for (int to = end - mine; left; left &= left - 1) queue[to++] = lane << 3 | (__ffs(left) - 1 & 15) + (__ffs(left) - 1 >> 4);
      __syncwarp();
#pragma unroll 1
      for (int k = lane; k < (total + 31 & ~31); k += 32) {
        const int one = k < total ? queue[k] : 0, from = one >> 3;
        const int from_part = __shfl_sync(~0u, part, from), from_at = __shfl_sync(~0u, at, from), from_unit = __shfl_sync(~0u, unit, from);
        if (k < total) keep(stage + (tid - lane + from) * 16, share.add + from_part * HEADS, from_unit, from_at, one & 7);
      }
      __syncwarp();
      int last = 0; // the last warp that has read a stage asks for the one that follows in its place
      if (lane == 0) last = atomicAdd(&s.done[slot], 1) % (TEAM / 32) == TEAM / 32 - 1;
      if (__shfl_sync(~0u, last, 0)) fetch(i + DEPTH, policy);
      if ((slot += 2) >= DEPTH) slot -= DEPTH, phase++;
    }
  }
  // Pool the k-th unit of a packet as pooling.cuh does, and list it where it reaches the bound.
  __device__ __forceinline__ void keep(const char* slot, const float* add, int u, int at, int k) const {
    float score = 0.f;
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
      float x = __half2float(*reinterpret_cast<const __half*>(slot + j * SLOT + k * 2)) + add[j];
      if (HEADS > 1) x = exp2_fast(x);
      score = j == 0 ? x : MAXIMUM ? fmaxf(score, x) : score + x;
    }
    if (!(score >= bound) || u + k < share.first || u + k >= share.last) return;
    const int to = atomicAdd(&s.listed, 1);
    if (to < capacity) list[to] = make_uint2(image(score), at + k);
    atomicAdd(&s.hist[bin_of(score)], 1);
  }

  // Look for a word until it is there; false where that takes too long.
  __device__ __forceinline__ bool came(uint4& v, const uint4* from) const {
#pragma unroll 1
    for (int left = PATIENCE; v.w != s.stamp; left--) {
      if (left == 0) return false;
      v = look(from);
    }
    return true;
  }
  // Tell this block's list, and learn how long the others' are: one warp looks for that, the others leave the paths to memory to blocks that still read.
  __device__ __forceinline__ void tell() const {
    const int tid = threadIdx.x, over = s.listed > capacity || s.overflow, count = over ? 0 : s.listed;
    uint4* words = mail.of(mail.rank);
#pragma unroll 1
    for (int i = tid; 2 * i < count && mail.blocks > 1; i += THREADS) {
      const uint4 two = *reinterpret_cast<const uint4*>(list + 2 * i); // the last one's second half may be nothing
      post(words + 1 + i, two.x, two.z, (two.y & 0xffff) | two.w << 16, s.stamp);
    }
    if (tid < mail.blocks) {
      uint4 head = make_uint4(count, over, 0, s.stamp);
      if (tid == mail.rank) {
        if (mail.blocks > 1) post(words, count, over, 0, s.stamp);
      } else {
        head.w = ~s.stamp;
        if (!came(head, mail.of(tid))) head.x = 0, head.y = 1;
      }
      s.counts[tid] = head.x;
      if (head.y) s.undecided = 1;
    }
    __syncthreads();
  }
  // Bring the lists of all blocks to `all`, and count them; returns how many units they have, -1 where they do not decide.
  __device__ __forceinline__ int gather(uint2* all, int room) const {
    constexpr int ASKED = 4; // words of a thread at once, all of one block
    const int tid = threadIdx.x, each = THREADS / max(1, mail.blocks - 1), team = tid / each, other = team + (team >= mail.rank);
    __syncthreads(); // all are listed
    tell();
    int total = 0, before = 0, count = 0;
#pragma unroll 1
    for (int c = 0; c < mail.blocks; c++) {
      if (c == other) before = total, count = s.counts[c];
      total += s.counts[c];
      if (c == mail.rank) {
        for (int i = tid; i < s.counts[c] && total <= room; i += THREADS) all[total - s.counts[c] + i] = make_uint2(list[i].x, in_row(c, list[i].y));
      }
    }
    if (s.undecided || total > room) return -1;
    const uint4* words = mail.of(other) + 1;
    bool here = true;
#pragma unroll 1
    for (int at = tid - team * each; 2 * at < count && here; at += ASKED * each) {
      uint4 v[ASKED];
#pragma unroll
      for (int k = 0; k < ASKED; k++) {
        if (2 * (at + k * each) < count) v[k] = look(words + at + k * each);
      }
#pragma unroll
      for (int k = 0; k < ASKED; k++) {
        const int i = at + k * each;
        if (2 * i >= count || !here) continue;
        here = came(v[k], words + i);
        uint2* to = all + before + 2 * i;
        to[0] = make_uint2(v[k].x, in_row(other, v[k].z & 0xffff)), atomicAdd(&s.hist[bin_again(v[k].x)], 1);
        if (2 * i + 1 < count) to[1] = make_uint2(v[k].y, in_row(other, v[k].z >> 16)), atomicAdd(&s.hist[bin_again(v[k].y)], 1);
      }
    }
    if (!here) s.late = 1;
    __syncthreads();
    return s.late ? -1 : total;
  }
  // The bin with the wanted-th unit, from the counts of all blocks; false where the lists do not hold it.
  __device__ __forceinline__ bool cut(int* warp_sums, int& turn) const {
    const int bin = SIEVE_BINS - 2 - 2 * threadIdx.x, wanted = share.wanted;
    const int2 v = *reinterpret_cast<const int2*>(s.hist + bin);
    const int seen = block_scan(v.x + v.y, warp_sums, turn) - v.x - v.y;
    if (seen < wanted && seen + v.x + v.y >= wanted) {
      const bool upper = seen + v.y >= wanted;
      s.bin = bin + upper, s.above = upper ? seen : seen + v.y, s.count = upper ? v.y : v.x;
    }
    __syncthreads();
    return s.bin >= 0 && s.count <= CROWDED;
  }
  // What is chosen is marked where it is the block's, and counted where it lies in lower ones.
  __device__ __forceinline__ int take(u32 unit) const {
    const u32 at = unit - share.begin;
    if ((int)at >= 0 && at < share.units) atomicOr(&bitmap[at >> 5], 1u << (at & 31));
    return unit < share.begin;
  }
  // Mark what is chosen of `all`; returns how much of it lies in lower blocks.
  __device__ __forceinline__ int choose(const uint2* all, int total) const {
    const int tid = threadIdx.x, cut = s.bin, crowd = s.count, need = share.wanted - s.above;
    int lower = 0;
#pragma unroll 1
    for (int i = tid; i < total; i += THREADS) {
      const uint2 v = all[i];
      const int bin = bin_again(v.x);
      if (bin > cut) lower += take(v.y);
      if (bin == cut) s.crowd[atomicAdd(&s.crowded, 1)] = (u64)v.x << 32 | ~v.y;
    }
    MARK(7)
    __syncthreads();
#pragma unroll 1
    for (int i = tid >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < crowd ? s.crowd[i] : 0;
      int better = 0;
#pragma unroll 1
      for (int k = tid & 7; k < crowd; k += 8) better += s.crowd[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      if ((tid & 7) == 0 && i < crowd && better < need) lower += take(~(u32)own);
    }
    lower = __reduce_add_sync(~0u, lower);
    if ((tid & 31) == 0 && lower) atomicAdd(&s.lower, lower);
    MARK(8)
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

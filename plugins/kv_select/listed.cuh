// The choice of a row's best units among packets that a scorer listed, by one cluster: pooled, counted, cut, marked in a bitmap of the row.
//
// Packets are dealt to the blocks as they lie in the lists, 32 to a warp, whatever units they hold: every block has as many, whichever units are heavy,
// and nothing that is read depends on something read before. What is marked goes to the block that writes those units.
#pragma once
#include "forced.cuh"
#include "inbox.cuh"
#include "pooling.cuh"

#define LOG_BINS (CLUSTER > 8 ? 9 : 10) // a block tells its counts to all others
#define BINS (1 << LOG_BINS)
#define FIRST_SHIFT (26 - LOG_BINS) // of the first count: its bins span eight octaves
#define LEVELS 6                    // counts, at most: each but the first leaves a 2^LOG_BINS-th of 2^31 images
#define CROWDED 512                 // units of the cluster that are compared, at most
#define SCORER_WARPS 8
#define WARPS (THREADS / 32)
#define PAIRS ((HEADS + 1) / 2)
#define PACKET (16 * PAIRS) // bytes: four halves of a head, four of the next, and so on
#define PEERS (CLUSTER > 1 ? CLUSTER - 1 : 1)
#define SEGMENT 4096 // units whose bits a warp sends at once
#define NOWHERE 0x7fffff00

struct Desk { // shared memory
  __align__(16) int hist[BINS];
  __align__(16) u32 told[2][PEERS][BINS / 2]; // others' counts, of even and odd levels
  __align__(16) u64 crowd[CROWDED];           // images of scores, and units, so that the better one is greater
  u64 boxes[LEVELS + 1];                      // for counts, and for what is marked
  u32 most[WARPS];                            // packets of a region, found by each warp
  float bound[HEADS];
  int warp_sums[64], own_crowd, lower; // chosen units of lower blocks
  int bin, above, count, start;        // the bin that is cut: units above it, in it, and in it of lower blocks
};

// Where a warp's next packets lie: the regions take turns, 32 packets each.
struct Place {
  int chunk, region, layer;
};
struct Lists { // of a row
  const char* row;
  const int* counts; // [regions]
  int region_bytes, capacity, regions, step_region, step_layer;

  __device__ __forceinline__ Place first(int rank) const {
    const int chunk = (threadIdx.x >> 5) * CLUSTER + rank;
    return {chunk, chunk % regions, chunk / regions};
  }
  __device__ __forceinline__ Place next(Place at) const {
    at.chunk += WARPS * CLUSTER, at.region += step_region, at.layer += step_layer;
    if (at.region >= regions) at.region -= regions, at.layer++;
    return at;
  }
};

// Four neighbouring units. Read before it is known whether there is one: its region has the place.
struct Packet {
  uint4 pairs[PAIRS];
  u32 unit;
  int count; // of packets in the region

  __device__ __forceinline__ void load(const Lists& lists, const Place& at) {
    const int slot = at.layer * 32 + (threadIdx.x & 31);
    count = 0;
    if (slot >= lists.capacity) return;
    const char* region = lists.row + (long long)at.region * lists.region_bytes;
    count = lists.counts[at.region], unit = *reinterpret_cast<const u32*>(region + lists.capacity * PACKET + slot * 4);
#pragma unroll
    for (int m = 0; m < PAIRS; m++) pairs[m] = *reinterpret_cast<const uint4*>(region + slot * PACKET + 16 * m);
  }
};

// Images [low, high) of scores, counted by bins of 2^shift from base on; what is below belongs to the first bin, what is above to the last. An image is
// a pooled softmax's bits and one; 0: none.
struct Images {
  u32 low, high, base;
  int shift;
  __device__ __forceinline__ int bin(u32 x) const { return min(max((int)(x - base) >> shift, 0), BINS - 1); }
  __device__ __forceinline__ bool has(u32 x) const { return x >= low && x < high; }
  // Only those of a bin, which are not counted yet.
  __device__ __forceinline__ void narrow(int bin) {
    const u32 from = bin ? base + ((u32)bin << shift) : low, to = bin < BINS - 1 ? base + ((bin + 1u) << shift) : high;
    low = from, high = to;
  }
  __device__ __forceinline__ void spread() {
    base = low, shift = 0;
#pragma unroll 1
    while ((high - 1 - low) >> shift >= BINS) shift++;
  }
};

struct Choice {
  Desk& s;
  const Lists& lists;
  const Bounds& bounds;
  const float* add; // [parts, HEADS]
  uint4* images;    // [rounds, THREADS] of four units each
  u32* units;       // [rounds, THREADS]
  uint4* bitmap;    // [CLUSTER, 32 segments]: a bit a unit of the row
  uint4* inbox;     // [PEERS, 32 segments]: what others marked of this block's units
  u32* table;       // [PEERS, rank segments]: how many they marked of lower ones
  int segments, rank, chunks;

  __device__ __forceinline__ int slot_of(int from, int at) const { return from - (from > at); } // of a block at another
  // Counts of others may come from now on.
  __device__ __forceinline__ void open() const {
    const int tid = threadIdx.x;
    if (tid == 0) {
#pragma unroll 1
      for (int i = 0; CLUSTER > 1 && i <= LEVELS; i++) {
        inbox_open(&s.boxes[i]);
        if (i < LEVELS) inbox_expect(&s.boxes[i], (CLUSTER - 1) * BINS * 2);
      }
      s.own_crowd = s.lower = 0, s.bin = -1;
    }
  }
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.hist[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < CLUSTER * 32 * segments; i += THREADS) bitmap[i] = make_uint4(0, 0, 0, 0);
  }
  // Pool a packet, keep its images and count those that are high enough.
  __device__ __forceinline__ void take(const Packet& p, const Place& at, int round, const Images& range) const {
    const int slot = at.layer * 32 + (threadIdx.x & 31), to = round * THREADS + threadIdx.x;
    const u32 unit = slot < p.count ? p.unit : NOWHERE;
    u32 h[HEADS][2], image[4];
    float pooled[4];
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
      const uint4 v = p.pairs[j / 2];
      h[j][0] = j & 1 ? v.z : v.x, h[j][1] = j & 1 ? v.w : v.y;
    }
    pool<2>(h, add + at.region / SCORER_WARPS * HEADS, pooled);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int u = unit + k;
      image[k] = u >= bounds.first && u < bounds.last ? __float_as_uint(pooled[k]) + 1 : 0;
      if (image[k] >= range.low) atomicAdd(&s.hist[range.bin(image[k])], 1);
    }
    images[to] = make_uint4(image[0], image[1], image[2], image[3]), units[to] = unit;
  }
  template <typename F> __device__ __forceinline__ void each(F use) const {
#pragma unroll 1
    for (int chunk = (threadIdx.x >> 5) * CLUSTER + rank, to = threadIdx.x; chunk < chunks; chunk += WARPS * CLUSTER, to += THREADS)
      use(images[to], units[to]);
  }
  __device__ __forceinline__ void count_again(const Images& range) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.hist[i] = 0;
    __syncthreads();
    each([&](const uint4& v, u32) {
      const u32 image[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (range.has(image[k])) atomicAdd(&s.hist[range.bin(image[k])], 1);
      }
    });
  }
  __device__ __forceinline__ void tell(int level) const {
    constexpr int QUADS = BINS / 8;
#pragma unroll
    for (int i = threadIdx.x; i < CLUSTER * QUADS; i += THREADS) {
      const int c = i / QUADS, quad = i % QUADS;
      const int4 a = *reinterpret_cast<const int4*>(s.hist + 8 * quad), b = *reinterpret_cast<const int4*>(s.hist + 8 * quad + 4);
      const uint4 v = make_uint4(a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16);
      if (c != rank) inbox_put(reinterpret_cast<uint4*>(s.told[level & 1][slot_of(rank, c)]) + quad, v, &s.boxes[level], c);
    }
  }
  // The bin with the wanted-th image, from the counts of all blocks.
  __device__ __forceinline__ void find(int level, int wanted, int& turn) const {
    static_assert(BINS <= 2 * THREADS, "a thread has two bins");
    const int bin = BINS - 2 - 2 * (int)threadIdx.x;
    int2 all = make_int2(0, 0), lower = make_int2(0, 0);
    if (CLUSTER > 1) tell(level);
    if (bin >= 0) all = *reinterpret_cast<const int2*>(s.hist + bin);
    if (CLUSTER > 1) inbox_wait(&s.boxes[level]);
    if (bin >= 0) {
#pragma unroll
      for (int i = 0; i < CLUSTER - 1; i++) {
        const u32 v = s.told[level & 1][i][bin / 2], x = v & 0xffff, y = v >> 16;
        all.x += x, all.y += y;
        if (i < rank) lower.x += x, lower.y += y;
      }
    }
    const int mine = all.x + all.y, seen = block_scan(mine, s.warp_sums, turn) - mine;
    if (seen < wanted && seen + mine >= wanted) {
      const bool upper = seen + all.y >= wanted;
      s.bin = bin + upper, s.above = upper ? seen : seen + all.y, s.count = upper ? all.y : all.x, s.start = upper ? lower.y : lower.x;
    }
    __syncthreads();
  }
  // Until few images share the bin that is cut, or all of them are chosen; false where too few were counted, or too many are equal. wanted: what is
  // left of it for that bin.
  __device__ __forceinline__ bool cut(Images& range, int& wanted, int& turn) const {
#pragma unroll 1
    for (int level = 0;; level++) {
      __syncthreads(); // all are counted
      if (level == 0) cluster_wait(); // every block has begun
      MARK(4)
      find(level, wanted, turn);
      MARK(5)
      if (s.bin < 0) return false;
      range.narrow(s.bin), wanted -= s.above;
      if (s.count <= CROWDED || s.count == wanted) return true;
      if (range.high - range.low == 1 || level + 1 == LEVELS) return false;
      range.spread();
      count_again(range);
    }
  }
  // Mark what is surely chosen in the bitmap, and bring those that are to be compared to all blocks.
  __device__ __forceinline__ void mark(const Images& range, bool all) const {
    const u32 sure = all ? range.low : range.high;
    const int start = s.start;
    if (CLUSTER > 1 && threadIdx.x == 0) {
      const int crowd = all ? 0 : s.count - s.hist[s.bin];
      inbox_expect(&s.boxes[LEVELS], (CLUSTER - 1) * segments * (512 + rank * 4) + crowd * 8);
    }
    each([&](const uint4& v, u32 unit) {
      const u32 chosen = (v.x >= sure) | (v.y >= sure) << 1 | (v.z >= sure) << 2 | (v.w >= sure) << 3;
      u32 near = ((v.x >= range.low) | (v.y >= range.low) << 1 | (v.z >= range.low) << 2 | (v.w >= range.low) << 3) & ~chosen;
      if (chosen) atomicOr(reinterpret_cast<u32*>(bitmap) + (unit >> 5), chosen << (unit & 31));
#pragma unroll 1
      for (; near; near &= near - 1) {
        const int k = __ffs(near) - 1, at = start + atomicAdd(&s.own_crowd, 1);
        const u64 one = (u64)(k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w) << 32 | ~(unit + k);
        s.crowd[at] = one;
#pragma unroll 1
        for (int c = 0; CLUSTER > 1 && c < CLUSTER; c++) {
          if (c != rank) inbox_put(&s.crowd[at], one, &s.boxes[LEVELS], c);
        }
      }
    });
  }
  // Send what is marked to the blocks that write those units, and how much it is to all behind them.
  __device__ __forceinline__ void send() const {
    const int lane = threadIdx.x & 31;
    if (CLUSTER == 1) return;
#pragma unroll 1
    for (int segment = threadIdx.x >> 5; segment < CLUSTER * segments; segment += WARPS) {
      const uint4 v = bitmap[segment * 32 + lane];
      const int owner = segment / segments, count = __reduce_add_sync(~0u, __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w));
      const int at = (slot_of(rank, owner) * segments + segment - owner * segments) * 32 + lane;
      if (owner != rank) inbox_put(inbox + at, v, &s.boxes[LEVELS], owner);
      if (owner < rank && lane == 0 && count) atomicAdd(&s.lower, count);
      if (lane > owner && lane < CLUSTER && lane != rank)
        inbox_put(table + slot_of(rank, lane) * lane * segments + segment, (u32)count, &s.boxes[LEVELS], lane);
    }
  }
  // Mark the best of those that are compared, in this block's units, and count those of lower blocks. What this block marked may not have been sent yet,
  // so they are marked where others' marks have come.
  __device__ __forceinline__ void compare(int crowd, int need) const {
    const u32 begin = rank * segments * SEGMENT, end = begin + segments * SEGMENT;
    u32* marks = reinterpret_cast<u32*>(CLUSTER > 1 ? inbox : bitmap);
#pragma unroll 1
    for (int i = threadIdx.x >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < crowd ? s.crowd[i] : 0;
      int better = 0;
#pragma unroll 1
      for (int k = threadIdx.x & 7; k < crowd; k += 8) better += s.crowd[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      const u32 unit = ~(u32)own;
      if ((threadIdx.x & 7) || i >= crowd || better >= need || unit >= end) continue;
      if (unit < begin) atomicAdd(&s.lower, 1);
      else atomicOr(marks + (unit - begin) / 32, 1u << (unit & 31));
    }
  }
  // Bring this block's part of the bitmap together, and write its units, ascending, from out[at] on behind those of lower blocks.
  __device__ __forceinline__ void put(int* out, int at, int& turn) const {
    const int words = segments * 128, all = (words + THREADS - 1) / THREADS, from = min(words, (int)threadIdx.x * all), to = min(words, from + all);
    u32* own = reinterpret_cast<u32*>(bitmap) + rank * words;
    const u32* others = reinterpret_cast<const u32*>(inbox);
    int mine = 0;
#pragma unroll 1
    for (int i = from; i < to; i++) {
      u32 flags = own[i];
#pragma unroll
      for (int c = 0; c < CLUSTER - 1; c++) flags |= others[c * words + i];
      own[i] = flags, mine += __popc(flags);
    }
    at += block_scan(mine, s.warp_sums, turn) - mine;
    at += s.lower;
#pragma unroll 1
    for (int i = from; i < to; i++) {
      const int unit = rank * segments * SEGMENT + i * 32;
#pragma unroll 1
      for (u32 flags = own[i]; flags; flags &= flags - 1) out[at++] = unit + __ffs(flags) - 1;
    }
  }
  // Marks of others of units of lower blocks.
  __device__ __forceinline__ void add_lower() const {
    int lower = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < PEERS * rank * segments; i += THREADS) lower += table[i];
    lower = __reduce_add_sync(~0u, lower);
    if ((threadIdx.x & 31) == 0 && lower) atomicAdd(&s.lower, lower);
  }
};

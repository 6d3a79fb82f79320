// The choice of a row's best units among packets that a scorer listed, by one cluster: pooled, counted, cut, marked in a bitmap of the row.
//
// Packets are dealt to the blocks as they lie in the lists, 32 to a warp, whatever units they hold: every block has as many, whichever units are heavy,
// and nothing that is read depends on something read before. What is marked goes to the block that writes those units. Nearly all of this runs once, so
// sizes are known when it is compiled, and most loops stay loops.
#pragma once
#include "forced.cuh"
#include "inbox.cuh"

#define LOG_BINS (CLUSTER > 8 ? 9 : 10) // a block tells its counts to all others
#define BINS (1 << LOG_BINS)
#define FIRST_SHIFT (26 - LOG_BINS) // of the first count: its bins span eight octaves
#define LEVELS 6                    // counts, at most: each but the first leaves a 2^LOG_BINS-th of 2^31 images
#define CROWDED 512                 // units of the cluster that are compared, at most
#define WARPS (THREADS / 32)
#define SCORER_WARPS 8
#define REGIONS (PARTS * SCORER_WARPS)
#define PAIRS ((HEADS + 1) / 2)
#ifndef DEPTH
#define DEPTH 2 // packets of a thread under way
#endif
#define PACKET (16 * PAIRS) // bytes: four halves of a head, four of the next, and so on
#define REGION_BYTES ((long long)HEADS * STRIDE * 2 / REGIONS / 128 * 128)
#define CAPACITY ((int)(REGION_BYTES / (PACKET + 4)) / 32 * 32)
#define PEERS (CLUSTER > 1 ? CLUSTER - 1 : 1)
#define SEGMENT 4096 // units whose bits a warp sends at once
#define SEGMENTS ((STRIDE + SEGMENT * CLUSTER - 1) / (SEGMENT * CLUSTER)) // that a block writes
#define WORDS (SEGMENTS * SEGMENT / 32)

struct Desk { // shared memory
  __align__(16) int hist[BINS];
  __align__(16) u32 told[2][PEERS][BINS / 2]; // others' counts, of even and odd levels
  __align__(16) u64 crowd[CROWDED];           // images of scores, and units, so that the better one is greater
  u64 boxes[LEVELS + 1];                      // for counts, and for what is marked
  u32 most[WARPS];                            // packets of a region, found by each warp
  float bound[HEADS];
  int sums[32], own_crowd, lower; // chosen units of lower blocks
  int bin, above, count;                         // the bin that is cut: units above it, and in it
};
struct Room { // more of it
  uint4 images[ROUNDS * THREADS];         // of four units each
  uint4 bitmap[CLUSTER * WORDS / 4];      // a bit a unit of the row
  uint4 inbox[PEERS * WORDS / 4];        // what others marked of this block's units
  u32 units[ROUNDS * THREADS];
  u32 table[PEERS * PEERS * SEGMENTS]; // [PEERS, rank segments]: how many others marked of lower blocks' units
  int counts[REGIONS];
  float add[PARTS * HEADS];
};

// Images [low, high) of scores, counted by bins of 2^shift from base on; what is below belongs to the first bin, what is above to the last. An image is
// a pooled softmax's bits and one; 0: none.
struct Images {
  u32 low, high, base;
  int shift;
  __device__ __forceinline__ int bin(u32 x) const { return min((max(x, base) - base) >> shift, BINS - 1u); }
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

// Four neighbouring units, read before it is known whether there are any: the region has the place.
struct Packet {
  uint4 pairs[PAIRS];
  u32 unit;

  __device__ __forceinline__ void load(const char* lists, int chunk) {
    const int region = chunk % REGIONS, layer = chunk / REGIONS, slot = layer * 32 + (threadIdx.x & 31);
    if (layer * 32 >= CAPACITY) return;
    const char* from = lists + region * REGION_BYTES;
    unit = *reinterpret_cast<const u32*>(from + CAPACITY * PACKET + slot * 4);
#pragma unroll
    for (int m = 0; m < PAIRS; m++) pairs[m] = *reinterpret_cast<const uint4*>(from + slot * PACKET + 16 * m);
  }
  // As select.cu pools.
  __device__ __forceinline__ void pool(const float* add, float (&pooled)[4]) const {
    u32 h[HEADS][2];
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
      const uint4 v = pairs[j / 2];
      h[j][0] = j & 1 ? v.z : v.x, h[j][1] = j & 1 ? v.w : v.y;
    }
    ::pool<2>(h, add, pooled);
  }
};

struct Choice {
  Desk& s;
  Room& room;
  const char* lists; // of the row
  int rank, first, last;

  __device__ __forceinline__ int first_chunk() const { return (threadIdx.x >> 5) * CLUSTER + rank; }
  __device__ __forceinline__ int left(int chunk) const { return room.counts[chunk % REGIONS] - chunk / REGIONS * 32; } // from there on
  // Pool all packets, keep their images and count those that are high enough. Returns where the thread's images end.
  __device__ __forceinline__ int take(Packet (&packets)[DEPTH], int chunks, const Images& range) const {
    int to = threadIdx.x;
#pragma unroll 1
    for (int chunk = first_chunk(); chunk < chunks; chunk += WARPS * CLUSTER) {
      const int there = left(chunk), later = chunk + DEPTH * WARPS * CLUSTER;
      if (there > 0) {
        const int from = (threadIdx.x & 31) < there ? first : 0x7fffffff;
        u32 image[4];
        float pooled[4];
        packets[0].pool(room.add + chunk % REGIONS / SCORER_WARPS * HEADS, pooled);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int u = packets[0].unit + k;
          image[k] = u >= from && u < last ? __float_as_uint(pooled[k]) + 1 : 0;
          if (image[k] >= range.low) atomicAdd(&s.hist[range.bin(image[k])], 1);
        }
        room.images[to] = make_uint4(image[0], image[1], image[2], image[3]), room.units[to] = packets[0].unit;
        to += THREADS;
      }
#pragma unroll
      for (int i = 1; i < DEPTH; i++) packets[i - 1] = packets[i];
      if (later < chunks && left(later) > 0) packets[DEPTH - 1].load(lists, later);
    }
    return to;
  }
  template <typename F> __device__ __forceinline__ void each(int end, F use) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < end; i += THREADS) use(room.images[i], room.units[i]);
  }
  __device__ __forceinline__ void count_again(int end, const Images& range) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.hist[i] = 0;
    __syncthreads();
    each(end, [&](const uint4& v, u32) {
      const u32 image[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (range.has(image[k])) atomicAdd(&s.hist[range.bin(image[k])], 1);
      }
    });
  }

  __device__ __forceinline__ int slot_of(int from, int at) const { return from - (from > at); } // of a block at another
  __device__ __forceinline__ void tell(int level) const {
    constexpr int QUADS = BINS / 8;
#pragma unroll
    for (int round = 0; round < (CLUSTER * QUADS + THREADS - 1) / THREADS; round++) {
      const int i = round * THREADS + threadIdx.x, c = i / QUADS, quad = i % QUADS;
      if (c >= CLUSTER || c == rank) continue;
      const int4 a = *reinterpret_cast<const int4*>(s.hist + 8 * quad), b = *reinterpret_cast<const int4*>(s.hist + 8 * quad + 4);
      const uint4 v = make_uint4(a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16);
      inbox_put(reinterpret_cast<uint4*>(s.told[level & 1][slot_of(rank, c)]) + quad, v, &s.boxes[level], c);
    }
  }
  // Sum over the warps in front of this one; sum: of this one.
  __device__ __forceinline__ int lower_warps(int v, int& sum) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    sum = __reduce_add_sync(~0u, v);
    if (lane == 0) s.sums[warp] = sum;
    __syncthreads();
    return __reduce_add_sync(~0u, lane < warp ? s.sums[lane] : 0);
  }
  // The bin with the wanted-th image, from the counts of all blocks. No count of the cluster is above 65,535, so two are added at once.
  __device__ __forceinline__ void find(int level, int wanted) const {
    static_assert(BINS <= 2 * THREADS, "a thread has two bins");
    const int pair = BINS / 2 - 1 - (int)threadIdx.x;
    int low = 0, high = 0;
    if (CLUSTER > 1) tell(level), inbox_wait(&s.boxes[level]);
    if (pair >= 0) {
      const int2 own = *reinterpret_cast<const int2*>(s.hist + 2 * pair);
      u32 both = own.x | own.y << 16;
#pragma unroll
      for (int i = 0; i < CLUSTER - 1; i++) both += s.told[level & 1][i][pair];
      low = both & 0xffff, high = both >> 16;
    }
    int sum;
    const int before = lower_warps(low + high, sum);
    if (before < wanted && before + sum >= wanted) { // the warp has it
      const int end = before + warp_scan(low + high), seen = end - low - high;
      if (seen < wanted && end >= wanted) {
        const bool upper = seen + high >= wanted;
        s.bin = 2 * pair + upper, s.above = upper ? seen : seen + high, s.count = upper ? high : low;
      }
    }
    __syncthreads();
  }
  // Until few images share the bin that is cut, or all of them are chosen. Returns the last count; -1 where too few were counted, or too many are equal.
  // wanted: what is left of it for that bin.
  __device__ __forceinline__ int cut(int end, Images& range, int& wanted) const {
#pragma unroll 1
    for (int level = 0;; level++) {
      __syncthreads(); // all are counted
      if (level == 0) cluster_wait(); // every block has begun
      MARK(4)
      find(level, wanted);
      MARK(5)
      if (s.bin < 0) return -1;
      range.narrow(s.bin), wanted -= s.above;
      if (s.count <= CROWDED || s.count == wanted) return level;
      if (range.high - range.low == 1 || level + 1 == LEVELS) return -1;
      range.spread();
      count_again(end, range);
    }
  }
  // Mark what is surely chosen in the bitmap, list what is to be compared. start: what lower blocks list.
  __device__ __forceinline__ void mark(int end, const Images& range, u32 sure, int start) const {
    each(end, [&](const uint4& v, u32 unit) {
      const u32 chosen = (v.x >= sure) | (v.y >= sure) << 1 | (v.z >= sure) << 2 | (v.w >= sure) << 3;
      u32 near = ((v.x >= range.low) | (v.y >= range.low) << 1 | (v.z >= range.low) << 2 | (v.w >= range.low) << 3) & ~chosen;
      if (chosen) atomicOr(reinterpret_cast<u32*>(room.bitmap) + (unit >> 5), chosen << (unit & 31));
#pragma unroll 1
      for (; near; near &= near - 1) {
        const int k = __ffs(near) - 1;
        s.crowd[start + atomicAdd(&s.own_crowd, 1)] = (u64)(k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w) << 32 | ~(unit + k);
      }
    });
  }
  // Send what is marked to the blocks that write those units, how much it is to all behind them, and what is to be compared to all.
  __device__ __forceinline__ void send(int start, int crowd) const {
    const int lane = threadIdx.x & 31;
    u64* box = &s.boxes[LEVELS];
#pragma unroll 1
    for (int segment = threadIdx.x >> 5; segment < CLUSTER * SEGMENTS; segment += WARPS) {
      const uint4 v = room.bitmap[segment * 32 + lane];
      const int owner = segment / SEGMENTS, count = __reduce_add_sync(~0u, __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w));
      if (owner != rank) inbox_put(room.inbox + (slot_of(rank, owner) * SEGMENTS + segment % SEGMENTS) * 32 + lane, v, box, owner);
      if (owner < rank && lane == 0 && count) atomicAdd(&s.lower, count);
      if (lane > owner && lane < CLUSTER && lane != rank) inbox_put(room.table + slot_of(rank, lane) * lane * SEGMENTS + segment, (u32)count, box, lane);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < crowd * CLUSTER; i += THREADS) {
      if (i % CLUSTER != rank) inbox_put(s.crowd + start + i / CLUSTER, s.crowd[start + i / CLUSTER], box, i % CLUSTER);
    }
  }
  // Marks of others of units of lower blocks.
  __device__ __forceinline__ void add_lower() const {
    int lower = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < PEERS * SEGMENTS * rank; i += THREADS) lower += room.table[i];
    lower = __reduce_add_sync(~0u, lower);
    if ((threadIdx.x & 31) == 0 && lower) atomicAdd(&s.lower, lower);
  }
  // Mark the best of those that are compared, in this block's units, and count those of lower blocks. What this block marked may not have been sent yet,
  // so they are marked where others' marks have come.
  __device__ __forceinline__ void compare(int crowd, int need) const {
    u32* marks = reinterpret_cast<u32*>(CLUSTER > 1 ? room.inbox : room.bitmap);
#pragma unroll 1
    for (int i = threadIdx.x >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
      const u64 own = i < crowd ? s.crowd[i] : 0;
      int better = 0;
#pragma unroll 1
      for (int k = threadIdx.x & 7; k < crowd; k += 8) better += s.crowd[k] > own;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
      const int unit = ~(u32)own - rank * SEGMENTS * SEGMENT;
      if ((threadIdx.x & 7) || i >= crowd || better >= need || unit >= SEGMENTS * SEGMENT) continue;
      if (unit < 0) atomicAdd(&s.lower, 1);
      else atomicOr(marks + (unit >> 5), 1u << (unit & 31));
    }
  }
  // Bring this block's part of the bitmap together, and write its units, ascending, from out[0] on behind those of lower blocks.
  __device__ __forceinline__ void put(int* out) const {
    constexpr int EACH = (WORDS + THREADS - 1) / THREADS;
    const int from = threadIdx.x * EACH;
    u32 flags[EACH];
    int mine = 0, sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      flags[i] = 0;
      if (from + i < WORDS) {
        flags[i] = reinterpret_cast<const u32*>(room.bitmap)[rank * WORDS + from + i];
#pragma unroll
        for (int c = 0; c < CLUSTER - 1; c++) flags[i] |= reinterpret_cast<const u32*>(room.inbox)[c * WORDS + from + i];
      }
      mine += __popc(flags[i]);
    }
    int* to = out + (lower_warps(mine, sum) + warp_scan(mine) - mine + s.lower);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int unit = rank * SEGMENTS * SEGMENT + (from + i) * 32 - 1;
#pragma unroll 1
      for (u32 left = flags[i]; left; left &= left - 1) *to++ = unit + __ffs(left);
    }
  }
};

// Of rows with many units, those that reach a bound which more units than wanted reach: the selector then sees nothing else (listed.cuh).
//
// Built as pooling.cuh says, with -DUNIT and -DGROUP as select.cu. The blocks of a row take pieces of it in turn, so that what each sees first is a sample
// of the row, from which it takes its bound. They exchange nothing: whether enough units reach the highest bound of all is the selector's to count.
#define THREADS 512
#include "normalize.cuh"
#include "reading.cuh"

#define REACH 200 // percent of the wanted units that should reach the bound
#define PIECE 64  // units that neighbouring lanes take at once
#define WALKERS (8 * THREADS / PIECE)
#define DEPTH (HEADS > 6 ? 1 : 12 / HEADS) // packets of a thread under way
#define SLOT (16 * THREADS)                // bytes of a head's packets of all threads
#define RING (DEPTH * HEADS * SLOT)        // bytes
#define SAMPLE_BINS (2 * THREADS)
#define OVERFLOWN 0xffffffffu

struct Desk {
  __align__(16) int sample[SAMPLE_BINS];
  int warp_sums[64], listed, sample_bin, overflow;
  float lows[32], row_low;
};

// Where this thread's packets of eight units lie: those of a round lie all over the row.
struct Walk {
  int at, step, rounds, usable;
  __device__ __forceinline__ Walk(int rank, int blocks, int usable_) : step(blocks * PIECE), usable(usable_) {
    rounds = (usable + WALKERS * step - 1) / (WALKERS * step);
    at = ((int)threadIdx.x / (PIECE / 8) * rounds * blocks + rank) * PIECE + (int)threadIdx.x % (PIECE / 8) * 8;
  }
  __device__ __forceinline__ bool there(int ahead) const { return at + ahead * step < usable; }
};

// Order-preserving; pooled softmaxes are not negative.
__device__ __forceinline__ u32 image(float score) { return HEADS > 1 ? __float_as_uint(score) : ordered(score); }

// The packet so many rounds ahead, into a slot.
__device__ __forceinline__ void fetch(const Share& share, const Walk& walk, int ahead, char* slot, u64 policy) {
  if (walk.there(ahead)) {
    const char* p = reinterpret_cast<const char*>(share.scores + walk.at + ahead * walk.step);
    const u32 stride = (u32)share.stride * 2, to = shared_at(slot);
#pragma unroll
    for (int j = 0; j < HEADS; j++) copy16_once(to + j * SLOT, p + j * stride, policy);
  }
  copies_commit();
}

// This round's packet from its slot, which takes the one DEPTH rounds ahead.
__device__ __forceinline__ void take(const Share& share, const Walk& walk, char* slot, u64 policy, u32 (&h)[HEADS][4]) {
  copies_wait<DEPTH - 1>();
#pragma unroll
  for (int j = 0; j < HEADS; j++) {
    const uint4 v = *reinterpret_cast<const uint4*>(slot + j * SLOT);
    h[j][0] = v.x, h[j][1] = v.y, h[j][2] = v.z, h[j][3] = v.w;
  }
  __syncwarp(); // the next packet overwrites this one
  fetch(share, walk, DEPTH, slot, policy);
}

// The bound, by half of every thread's first units.
__device__ __forceinline__ float sampled_bound(Desk& s, const Share& share, const Walk& walk, const u32 (&h)[HEADS][4], int blocks) {
  const int tid = threadIdx.x, u = walk.at, bin = SAMPLE_BINS - 2 - 2 * tid;
  if (walk.there(0)) {
    u32 half[HEADS][2];
    float pooled[4];
#pragma unroll
    for (int j = 0; j < HEADS; j++) half[j][0] = h[j][0], half[j][1] = h[j][1];
    pool<2>(half, share.add + u / share.part_units * HEADS, pooled);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (u + k >= share.first && u + k < share.last) atomicAdd(&s.sample[key_of(pooled[k], share.scale) >> 6], 1);
    }
  }
  const int reach = max(1, REACH * share.wanted / (200 * walk.rounds * blocks));
  __syncthreads();
  int turn = 0;
  const int2 two = *reinterpret_cast<const int2*>(s.sample + bin);
  const int mine = two.x + two.y, seen = block_scan(mine, s.warp_sums, turn) - mine;
  if (seen < reach && seen + mine >= reach) s.sample_bin = bin + (seen + two.y >= reach);
  __syncthreads();
  const int lowest = max((s.sample_bin << 6) - 1, 0); // key of the bin's lowest score, minus one
  return HEADS > 1 ? __uint_as_float((u32)lowest << 14) : share.scale.low + (float)lowest / share.scale.factor;
}

// What `near` compares with, for every part: filter [parts, HEADS], pairs of halves.
__device__ __forceinline__ void filters(Desk& s, const Share& share, float bound, u32* filter) {
#pragma unroll 1
  for (int i = threadIdx.x; i < (share.usable + share.part_units - 1) / share.part_units * HEADS; i += THREADS) {
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
__device__ __forceinline__ u32 near(const u32 (&h)[HEADS][4], const u32* low) {
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
// The pooled score of one of eight units, by its bit of `near`, in the order of pooling.cuh.
__device__ __forceinline__ float pool_one(const u32 (&h)[HEADS][4], const float* add, int bit) {
  const int pair = (bit & 15) >> 1;
  float score = 0.f;
#pragma unroll
  for (int j = 0; j < HEADS; j++) {
    const u32 two = pair & 2 ? (pair & 1 ? h[j][3] : h[j][2]) : (pair & 1 ? h[j][1] : h[j][0]);
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&two));
    float x = (bit & 16 ? f.y : f.x) + add[j];
    if (HEADS > 1) x = exp2_fast(x);
    score = j == 0 ? x : MAXIMUM ? fmaxf(score, x) : score + x;
  }
  return score;
}

// List the block's units that reach the bound: up to `capacity` entries of score and unit, in any order. h: the first packet.
__device__ __forceinline__ void list(Desk& s, const Share& share, Walk walk, u32 (&h)[HEADS][4], char* ring, float bound, const u32* filter,
    uint2* entries, int capacity, u64 policy) {
  char* slot = ring;
  int part = walk.at / share.part_units;
#pragma unroll 1
  for (int i = walk.rounds;;) {
    u32 left = 0;
    if (walk.there(0)) {
      while (walk.at >= (part + 1) * share.part_units) part++;
      left = near(h, filter + part * HEADS);
    }
#pragma unroll 1
    for (; left; left &= left - 1) {
      const int bit = __ffs(left) - 1, u = walk.at + (bit & 15) + (bit >> 4);
      const float score = pool_one(h, share.add + part * HEADS, bit);
      if (!(score >= bound) || u < share.first || u >= share.last) continue;
      const int to = atomicAdd(&s.listed, 1);
      if (to < capacity) entries[to] = make_uint2(image(score), u);
    }
    if (--i == 0) break;
    slot = slot + HEADS * SLOT == ring + RING ? ring : slot + HEADS * SLOT;
    walk.at += walk.step;
    take(share, walk, slot, policy, h);
  }
}

// scores, parts, lens, slots, budgets and the numbers up to window as select.cu says. Writes, where a row does not read all, entries [R, blocks, capacity]:
// image of the score, unit; and heads [R, blocks]: how many of these, more than capacity where the list does not hold what reaches the bound, and the
// bound's image. Grid (blocks, R). Dynamic shared memory: RING, and 8 bytes a part and head.
extern "C" __global__ void __launch_bounds__(THREADS, 2) list_units(const __half* scores, const float4* parts, const int* lens, uint2* entries, uint2* heads,
    const int* slots, const int* budgets, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below, int room, int sink,
    int window, int capacity) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Desk s;
  const int rank = blockIdx.x, blocks = gridDim.x, tid = threadIdx.x;
  const long long row = blockIdx.y, own = row * blocks + rank;
  const int sequence = (int)row / rows_per_sequence, stored = lens[sequence], closed = stored / GROUP * GROUP, usable = closed / UNIT;
  const Reading reading(stored, closed, UNIT, Budget(budgets ? budgets[slots[sequence]] : 0, budget, dense_below, room, UNIT), sink, window);
  for (int i = tid; i < SAMPLE_BINS; i += THREADS) s.sample[i] = 0;
  if (tid == 0) s.listed = s.overflow = 0, s.sample_bin = -1;
  MARK(0)
  dependency_wait();
  MARK(1)
  if (reading.plain) return;
  if (8ll * reading.wanted > reading.last - reading.first) { // little to leave out
    if (tid == 0) heads[own] = make_uint2(OVERFLOWN, 0);
    return;
  }
  float* add = reinterpret_cast<float*>(dynamic + RING); // [num_parts, HEADS], twice
  u32* filter = reinterpret_cast<u32*>(add + num_parts * HEADS);
  char* ring = dynamic + tid * 16;
  Share share = {scores + row * HEADS * score_stride, score_stride, 0, usable, usable, reading.first, reading.last, reading.wanted,
      (((usable + 31) >> 5) + num_parts - 1) / num_parts * 32, nullptr, nullptr, add};
  const Walk walk(rank, blocks, usable);
  const u64 policy = read_once_policy();
  parts += row * num_parts * HEADS;
  const float4 part = tid < num_parts * HEADS ? parts[tid] : make_float4(0.f, 0.f, 0.f, 0.f); // asked for before scores
#pragma unroll
  for (int i = 0; i < DEPTH; i++) fetch(share, walk, i, ring + i * HEADS * SLOT, policy);
  normalize(s, share, parts, part, num_parts, reinterpret_cast<float*>(filter));
  MARK(2)
  u32 h[HEADS][4];
  take(share, walk, ring, policy, h);
  const float bound = sampled_bound(s, share, walk, h, blocks);
  filters(s, share, bound, filter);
  MARK(3)
  if (s.overflow == 0) list(s, share, walk, h, ring, bound, filter, entries + own * capacity, capacity, policy);
  copies_wait<0>();
  __syncthreads();
  if (tid == 0) heads[own] = make_uint2(s.overflow ? OVERFLOWN : (u32)s.listed, image(bound));
  MARK(4)
}

// The choice of a row's best units by several blocks, each of which holds the scores of its share: three exchanges, each as short as it can be.
//
// Built as pooling.cuh says.
#pragma once
#include "messages.cuh"
#include "reading.cuh"
#include "pooling.cuh"

struct Cut { // the bin of the wanted-th unit, units in higher bins and in it
  int bin, above, count;
};
struct Chosen { // of the row, and units of lower blocks in higher bins and in it
  Cut cut;
  int lower_above, lower_count;
};
struct Desk {
  __align__(16) int own[BINS];       // counts of this block; bin 0 of the first count stays empty
  __align__(16) int total[BINS + 2]; // of the row
  __align__(16) u64 list[MOST_TIED], few[MOST_TIED];
  int warp_sums[64], listed, less, left, lower_above, lower_count;
  Cut cut;
  float add[HEADS], low;
  float2 range[THREADS / 32];
};

__device__ __forceinline__ void clear(Desk& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS + 2; i += THREADS) {
    s.total[i] = 0;
    if (i < BINS) s.own[i] = 0;
  }
  if (threadIdx.x == 0) s.listed = s.less = s.left = 0;
}

// What is added to this block's scores, so that heads are normalized over the row; s.low is the lowest of raw scores.
__device__ __forceinline__ void normalize(Desk& s, const Messages& messages, float (&add)[HEADS]) {
  constexpr int MOST = 5; // 160 blocks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int h = warp; h < HEADS; h += THREADS / 32) {
    float x[MOST], top = -3e38f, low = 3e38f, ref = 0.f, total = 0.f;
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      const int p = lane + 32 * k;
      x[k] = -3e38f;
      if (32 * k >= messages.blocks) continue;
      if (p < messages.blocks) {
        const uint4 v = receive(messages.part(h, p), messages.stamp);
        x[k] = __uint_as_float(v.x), low = fminf(low, __uint_as_float(v.y));
        if (p == messages.rank) ref = __uint_as_float(v.z);
      }
      top = fmaxf(top, x[k]);
    }
    __syncwarp();
    ref = __shfl_sync(~0u, ref, messages.rank & 31);
    top = highest(top);
    float zero = top; // raw scores: differences count at the top
    if (HEADS > 1) {
#pragma unroll
      for (int k = 0; k < MOST; k++) {
        if (32 * k < messages.blocks) total += exp2_fast(x[k] - top);
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      zero += log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS));
    } else {
      low = -highest(-low);
      if (lane == 0) s.low = low - top;
    }
    if (lane == 0) s.add[h] = ref - zero;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; h++) add[h] = s.add[h];
}

// The block's units: their scores [HEADS, stride] in shared memory, then order-preserving pooled scores, 0 where a unit is no candidate.
//
// Keys of fourteen bits. Pooled softmaxes: at most 1 / share units are above `share`, so the range is sixteen octaves below it, 1024 keys each. Raw
// scores: from the lowest to the highest. The upper eight bits are the bin.
struct Units {
  const __half* scores;
  int stride, begin, count, first, last; // first unit of the block and their number; candidates are [first, last)
  u32* exact;
  int base;
  float low, factor;

  __device__ __forceinline__ void scale(float lowest, float share) {
    base = __float_as_int(share) - ((BINS - 1) << 19);
    low = lowest, factor = 16383.f / fmaxf(-lowest, 1e-30f);
  }
  __device__ __forceinline__ int key(float x) const {
    if (HEADS > 1) return min(max((__float_as_int(x) - base) >> 13, 0), 16383);
    return (int)fminf(fmaxf((x - low) * factor, 0.f), 16383.f);
  }
  __device__ __forceinline__ int key_again(u32 x) const { return key(__uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x)); }
  __device__ __forceinline__ int eligible(int upto) const { return max(0, min(upto, last) - first); } // candidates in front of a unit
  __device__ __forceinline__ void read(u32 (&v)[1], const __half* p) const { v[0] = *reinterpret_cast<const u32*>(p); }
  __device__ __forceinline__ void read(u32 (&v)[2], const __half* p) const {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    v[0] = w.x, v[1] = w.y;
  }
  __device__ __forceinline__ void read(u32 (&v)[4], const __half* p) const {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  }
  // Pool 2 N units a thread, and count by the upper bits of their keys.
  template <int N, bool COUNTED = true> __device__ __forceinline__ void pool_all(const float (&add)[HEADS], int* hist) const {
#pragma unroll 1
    for (int at = threadIdx.x * 2 * N; at < count; at += THREADS * 2 * N) {
      u32 h[HEADS][N], image[2 * N];
      float pooled[2 * N];
#pragma unroll
      for (int j = 0; j < HEADS; j++) read(h[j], scores + j * stride + at);
      pool<N>(h, add, pooled);
#pragma unroll
      for (int k = 0; k < 2 * N; k++) {
        const int u = begin + at + k;
        image[k] = u >= first && u < last ? ordered(pooled[k]) : 0;
        const int bin = key(pooled[k]) >> 6;
        if (COUNTED && image[k] && bin) atomicAdd(&hist[bin], 1); // where many are in the lowest bin, counting them would take longest
      }
#pragma unroll
      for (int k = 0; k < 2 * N; k += 2) *reinterpret_cast<uint2*>(exact + at + k) = make_uint2(image[k], image[k + 1]);
    }
  }
};

// Counts of lower blocks in six bins from `bin` on that a thread has added up.
struct Lower {
  int bin, counts[6];
};
// Tell all blocks the counts of this one, and add theirs up: the row's in s.total, lower blocks' where they were read. A thread takes a word of several
// blocks, because adding in shared memory takes longest.
template <int N> __device__ __forceinline__ Lower add_counts(Desk& s, const Messages& messages, uint4* words) {
  constexpr int OWN = WORDS_OF(N), TEAMS = THREADS / OWN, UNDER_WAY = 3;
  const int tid = threadIdx.x, team = tid / OWN, word = tid - team * OWN;
  if (tid < OWN) {
    u32 v[6];
#pragma unroll
    for (int k = 0; k < 6; k++) v[k] = 6 * tid + k < N ? s.own[min(6 * tid + k, N - 1)] : 0;
    send(words + messages.rank * OWN + tid, v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, messages.stamp);
  }
  Lower lower = {word * 6, {0, 0, 0, 0, 0, 0}};
  int total[6] = {0, 0, 0, 0, 0, 0};
#pragma unroll 1
  for (int from = team; from < messages.blocks && team < TEAMS; from += UNDER_WAY * TEAMS) {
    uint4 v[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      if (from + k * TEAMS < messages.blocks) v[k] = poll(words + (from + k * TEAMS) * OWN + word);
    }
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      const int p = from + k * TEAMS;
      if (p >= messages.blocks) break;
      while (v[k].w != messages.stamp) v[k] = poll(words + p * OWN + word);
      const u32 pairs[3] = {v[k].x, v[k].y, v[k].z};
#pragma unroll
      for (int c = 0; c < 6; c++) {
        const int one = pairs[c / 2] >> 16 * (c & 1) & 0xffff;
        total[c] += one, lower.counts[c] += p < messages.rank ? one : 0;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 6; c++) {
    if (total[c]) atomicAdd(&s.total[lower.bin + c], total[c]);
  }
  __syncthreads();
  return lower;
}
// The bin with the wanted-th unit, found by one warp; s.own is cleared for the next count beside it. What no bin counts is in the lowest.
template <int N> __device__ __forceinline__ void find(Desk& s, const int* totals, int wanted, int eligible) {
  constexpr int EACH = N / 32;
  const int lane = threadIdx.x & 31, base = N - EACH * (lane + 1);
  if (threadIdx.x >= 32) {
    if (totals != s.own && threadIdx.x - 32 < DIGIT) s.own[threadIdx.x - 32] = 0;
    if (threadIdx.x == 32) s.lower_above = s.lower_count = 0;
  } else {
    int total[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      const int2 t = *reinterpret_cast<const int2*>(totals + base + i);
      total[i] = t.x, total[i + 1] = t.y, sum += t.x + t.y;
    }
    const int end = warp_scan(sum);
    int above = end - sum, bin = -1, count = 0;
    if (above < wanted && end >= wanted) {
#pragma unroll
      for (int i = EACH - 1; i >= 0; i--) {
        if (bin < 0) {
          if (above + total[i] >= wanted) bin = base + i, count = total[i];
          else above += total[i];
        }
      }
      s.cut = {bin, above, count};
    }
    if (lane == 31 && end < wanted) s.cut = {0, end, eligible - end};
  }
  __syncthreads();
}
// The same of the row, and what of it lies in lower blocks, of which so many units may be chosen.
template <int N> __device__ __forceinline__ Chosen cut_row(Desk& s, const Lower& lower, int wanted, int eligible, int lower_eligible) {
  find<N>(s, s.total, wanted, eligible);
  const Cut cut = s.cut;
  int above = 0, inside = 0;
#pragma unroll
  for (int c = 0; c < 6; c++) {
    above += lower.bin + c > cut.bin ? lower.counts[c] : 0;
    inside += lower.bin + c == cut.bin ? lower.counts[c] : 0;
  }
  above = __reduce_add_sync(~0u, above), inside = __reduce_add_sync(~0u, inside);
  if ((threadIdx.x & 31) == 0) {
    if (above) atomicAdd(&s.lower_above, above);
    if (inside) atomicAdd(&s.lower_count, inside);
  }
  __syncthreads();
  const bool uncounted = N == BINS && cut.bin == 0;
  return {cut, s.lower_above, uncounted ? lower_eligible - s.lower_above : s.lower_count};
}

// Candidates of the row: units whose key and value begin like this; better ones are chosen.
struct Candidates {
  int bin, need, tied, before, start; // how many are wanted of how many; chosen units and candidates of lower blocks
  int key;                             // the lower six bits of their keys, -1: any
  u64 prefix;                          // of their values, shifted
  int shift;
  __device__ __forceinline__ static u64 value(u32 exact, int unit) { return (u64)exact << 28 | (0xfffffff - unit); }
  // Of a unit of the bin, 1: better, 0: one of them, -1: worse.
  __device__ __forceinline__ int place(const Units& units, u32 exact, int unit) const {
    if (key < 0) return 0;
    const int own = units.key_again(exact) & (DIGIT - 1);
    if (own != key) return own > key ? 1 : -1;
    const u64 upper = value(exact, unit) >> shift;
    return upper == prefix ? 0 : upper > prefix ? 1 : -1;
  }
};

// Rare: as many digits of key, score and unit as leave few enough candidates.
__device__ __forceinline__ void split(Desk& s, const Messages& messages, const Units& units, Candidates& of) {
#pragma unroll 1
  for (int round = 0; of.tied > MOST_TIED && of.tied != of.need; round++) {
    __syncthreads(); // the counts have been read
    clear(s);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < units.count; i += THREADS) {
      const u32 exact = units.exact[i];
      if (exact == 0 || units.key_again(exact) >> 6 != of.bin || of.place(units, exact, units.begin + i) != 0) continue;
      const int digit = round == 0 ? units.key_again(exact) : (int)(Candidates::value(exact, units.begin + i) >> (of.shift - 6));
      atomicAdd(&s.own[digit & (DIGIT - 1)], 1);
    }
    __syncthreads();
    const Lower lower = add_counts<DIGIT>(s, messages, messages.round(round));
    const Chosen found = cut_row<DIGIT>(s, lower, of.need, 0, 0);
    of.need -= found.cut.above, of.tied = found.cut.count, of.before += found.lower_above, of.start = found.lower_count;
    if (round == 0) of.key = found.cut.bin;
    else of.prefix = of.prefix << 6 | found.cut.bin, of.shift -= 6;
  }
}

// Mark in flags, a bit a unit, what is chosen; returns how much lower blocks choose.
__device__ __forceinline__ int choose(Desk& s, const Messages& messages, const Units& units, Candidates of, unsigned char* flags) {
  const int tid = threadIdx.x, packets = units.count / 8;
  const bool whole = of.tied == of.need;
#pragma unroll 1
  for (int p = tid; p < packets; p += THREADS) {
    const uint4 a = reinterpret_cast<const uint4*>(units.exact)[2 * p], b = reinterpret_cast<const uint4*>(units.exact)[2 * p + 1];
    const u32 exact[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    u32 set = 0, near = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int bin = exact[k] ? units.key_again(exact[k]) >> 6 : -1;
      set |= (u32)(bin > of.bin) << k, near |= (u32)(bin == of.bin) << k;
    }
#pragma unroll 1
    while (near) {
      const int k = __ffs(near) - 1, u = units.begin + p * 8 + k;
      const u32 own = units.exact[p * 8 + k];
      const int place = of.place(units, own, u);
      near &= near - 1;
      if (place > 0 || (place == 0 && whole)) set |= 1u << k;
      else if (place == 0) send(messages.list() + of.start + atomicAdd(&s.listed, 1), own, ~(u32)u, 0, messages.stamp);
    }
    flags[p] = set;
  }
  MARK(11)
  if (whole) {
    __syncthreads();
    return of.before + of.start;
  }
  const bool fine = of.key < 0 && of.tied > COMPARED; // many: the lower six bits of their keys leave few to compare
#pragma unroll 1
  for (int i = tid; i < of.tied; i += THREADS) {
    const uint4 v = receive(messages.list() + i, messages.stamp);
    s.list[i] = (u64)v.x << 32 | v.y;
    if (fine) atomicAdd(&s.own[units.key_again(v.x) & (DIGIT - 1)], 1);
  }
  __syncthreads();
  MARK(12)
  const int own_end = of.start + s.listed;
  const u64* few = s.list;
  int left = of.tied, need = of.need, sub = -1;
  if (fine) {
    find<DIGIT>(s, s.own, of.need, 0);
    sub = s.cut.bin, need -= s.cut.above, left = s.cut.count, few = s.few;
#pragma unroll 1
    for (int i = tid; i < of.tied; i += THREADS) {
      if ((units.key_again((u32)(s.list[i] >> 32)) & (DIGIT - 1)) == sub) s.few[atomicAdd(&s.left, 1)] = s.list[i];
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int i = tid; i < of.tied; i += THREADS) {
    const u64 own = s.list[i];
    const int digit = fine ? units.key_again((u32)(own >> 32)) & (DIGIT - 1) : sub;
    int better = 0;
    if (digit == sub) {
      for (int k = 0; k < left; k++) better += few[k] > own;
    }
    if (digit < sub || better >= need) continue;
    if (i < of.start) {
      atomicAdd(&s.less, 1);
    } else if (i < own_end) {
      const int at = (int)~(u32)own - units.begin;
      atomicOr(reinterpret_cast<u32*>(flags) + (at >> 5), 1u << (at & 31));
    }
  }
  __syncthreads();
  return of.before + s.less;
}

// Write the block's chosen units, ascending, from out[at] on.
__device__ __forceinline__ void put_chosen(Desk& s, const Units& units, const unsigned char* flags, int* out, int at) {
  const int packets = units.count / 8, each = (packets + THREADS - 1) / THREADS;
  const int from = min(packets, (int)threadIdx.x * each), to = min(packets, from + each);
  int mine = 0, turn = 0;
#pragma unroll 1
  for (int i = from; i < to; i++) mine += __popc(flags[i]);
  at += block_scan(mine, s.warp_sums, turn) - mine;
#pragma unroll 1
  for (int i = from; i < to; i++) {
    u32 set = flags[i];
#pragma unroll 1
    while (set) {
      out[at++] = units.begin + i * 8 + __ffs(set) - 1;
      set &= set - 1;
    }
  }
}

// For checks: the block's scores as a scorer leaves them.
__device__ __forceinline__ void put_scores(const Units& units, __half* scores, long long stride) {
#pragma unroll 1
  for (int i = threadIdx.x; i < HEADS * units.count; i += THREADS) {
    const int h = i / units.count, u = i - h * units.count;
    scores[h * stride + units.begin + u] = units.scores[h * units.stride + u];
  }
}

// What a row's list holds beside the units that are chosen; all blocks write some of it.
__device__ __forceinline__ void put_forced(const Messages& messages, const Reading& row, int* out) {
  const int at = messages.rank * THREADS + threadIdx.x, step = messages.blocks * THREADS;
#pragma unroll 1
  for (int i = at; i < row.first; i += step) out[i] = i;
#pragma unroll 1
  for (int i = at; i < row.units - row.last; i += step) out[row.first + row.wanted + i] = row.last + i;
#pragma unroll 1
  for (int i = row.width + at; i < row.room; i += step) out[i] = -1;
}
// The list's length, and the stamp for the next launch: every block has read this one's, because it has sent its part.
__device__ __forceinline__ void put_stamp(const Messages& messages, const Reading& row, int* out, u32* stamp) {
  if (messages.rank == 0 && threadIdx.x == 0) out[row.room] = row.width, *stamp = messages.stamp;
}

// From the block's scores in shared memory and what all blocks have sent about theirs to the block's part of the row's list.
__device__ __forceinline__ void choose_units(Desk& s, const Messages& messages, const Reading& row, Units& units, unsigned char* flags, int* out, u32* stamp) {
  float add[HEADS];
  normalize(s, messages, add);
  units.scale(s.low, (MAXIMUM ? HEADS : 1) / (float)row.wanted);
  MARK(6)
  if (units.count <= 2 * THREADS) units.pool_all<1>(add, s.own);
  else units.pool_all<4>(add, s.own);
  __syncthreads();
  MARK(7)
  const Lower lower = add_counts<BINS>(s, messages, messages.bins());
  MARK(9)
  const Chosen found = cut_row<BINS>(s, lower, row.wanted, units.eligible(row.last), units.eligible(units.begin));
  Candidates candidates = {found.cut.bin, row.wanted - found.cut.above, found.cut.count, found.lower_above, found.lower_count, -1, 0, 60};
  MARK(10)
  split(s, messages, units, candidates);
  const int before = choose(s, messages, units, candidates, flags);
  MARK(13)
  put_chosen(s, units, flags, out, row.first + before);
  put_forced(messages, row, out);
  put_stamp(messages, row, out, stamp);
  MARK(14)
}

// What the blocks of a row tell each other through global memory, and the choice of a row's best units over it, in few steps of latency.
//
// A word is twelve bytes and the launch's stamp, written and read as one: who sees the stamp has the bytes, so there is no barrier, no fence and nothing
// to clear. Every block of the grid must be resident (a cooperative launch). Built as pooling.cuh says.
#pragma once
#include "pooling.cuh"

#define DIGIT 64                        // bins of a count
#define COUNT_WORDS ((DIGIT + 5) / 6)   // words of six counts
#define ROUNDS 10                       // digits of a score and a unit
#define CROWD 512                       // candidates that are ranked
#define MAIL_WORDS (HEADS + COUNT_WORDS * (1 + DIGIT + ROUNDS)) // a block of a row; CROWD words a row beside

__device__ __forceinline__ void post(uint4* to, u32 a, u32 b, u32 c, u32 stamp) {
  const u64 low = (u64)b << 32 | a, high = (u64)stamp << 32 | c;
  asm volatile("{.reg .b128 v;\n mov.b128 v,{%1,%2};\n st.relaxed.gpu.global.b128 [%0],v;}" ::"l"(to), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v;\n ld.relaxed.gpu.global.b128 v,[%2];\n mov.b128 {%0,%1},v;}" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ __forceinline__ uint4 await(const uint4* from, u32 stamp) {
  uint4 v = look(from);
  while (v.w != stamp) v = look(from);
  return v;
}

// Mail of a row with `blocks` blocks. Words of a reader's warp lie side by side.
struct Mail {
  uint4* words;
  int blocks, rank;
  u32 stamp;
  __device__ __forceinline__ uint4* part(int head, int block) const { return words + head * blocks + block; }
  __device__ __forceinline__ uint4* coarse() const { return words + HEADS * blocks; }                                    // [blocks, COUNT_WORDS]
  __device__ __forceinline__ uint4* fine(int bin) const { return coarse() + (1 + bin) * blocks * COUNT_WORDS; }         // of a coarse bin
  __device__ __forceinline__ uint4* round(int i) const { return coarse() + (1 + DIGIT + i) * blocks * COUNT_WORDS; }
  __device__ __forceinline__ uint4* list() const { return coarse() + (1 + DIGIT + ROUNDS) * blocks * COUNT_WORDS; }     // [CROWD]
};

// What a block tells about its share goes out at once, from one thread a head.
__device__ __forceinline__ void post_part(const Mail& mail, int head, float4 part) {
  post(mail.part(head, mail.rank), __float_as_uint(part.y), __float_as_uint(part.z), __float_as_uint(part.x), mail.stamp);
}

struct Chosen { // the bin of the wanted-th unit: units in higher bins and in it, of the row and of lower blocks
  int bin, above, count, lower_above, lower_count;
};
struct Desk {
  __align__(16) int hist[DIGIT * DIGIT];
  __align__(16) u64 list[CROWD];
  int own[DIGIT], total[2][DIGIT + 2], lower[2][DIGIT + 2], warp_sums[64]; // counts of this block; of the row and of lower blocks, two rounds in turn
  float add[HEADS], low;
  int listed, less;
};

__device__ __forceinline__ void clear(Desk& s) {
  for (int i = threadIdx.x; i < DIGIT * DIGIT; i += THREADS) s.hist[i] = 0;
  for (int i = threadIdx.x; i < 2 * (DIGIT + 2); i += THREADS) s.total[0][i] = s.lower[0][i] = 0;
  if (threadIdx.x == 0) s.listed = s.less = 0;
}

// What is added to this block's scores, so that heads are normalized over the row; the range of raw scores.
__device__ __forceinline__ void normalize(Desk& s, const Mail& mail, float (&add)[HEADS], Scale& scale) {
  constexpr int MOST = 5; // 160 blocks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp < HEADS) {
    float x[MOST], top = -3e38f, low = 3e38f, ref = 0.f, total = 0.f;
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      const int p = lane + 32 * k;
      x[k] = -3e38f;
      if (p < mail.blocks) {
        const uint4 v = await(mail.part(warp, p), mail.stamp);
        x[k] = __uint_as_float(v.x), low = fminf(low, __uint_as_float(v.y));
        if (p == mail.rank) ref = __uint_as_float(v.z);
      }
      top = fmaxf(top, x[k]);
    }
    __syncwarp();
    ref = __shfl_sync(~0u, ref, mail.rank & 31);
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float zero = top; // raw scores: differences count at the top
    if (HEADS > 1) {
#pragma unroll
      for (int k = 0; k < MOST; k++) total += exp2_fast(x[k] - top);
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      zero += log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS));
    } else {
#pragma unroll
      for (int o = 16; o; o >>= 1) low = fminf(low, __shfl_xor_sync(~0u, low, o));
      if (lane == 0) s.low = low - top;
    }
    if (lane == 0) s.add[warp] = ref - zero;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; h++) add[h] = s.add[h];
  scale = {0.f, 0.f};
  if (HEADS == 1) scale = {s.low, 65534.f / fmaxf(-s.low, 1e-30f)};
}

// The block's units: their scores [HEADS, stride] in shared memory, then order-preserving pooled scores, 0 where a unit is no candidate.
struct Units {
  const __half* scores;
  int stride, begin, count, first, last; // first unit of the block and their number; candidates are [first, last)
  u32* exact;
  Scale scale;

  __device__ __forceinline__ u32 key(u32 x) const { // as key_of
    if (x == 0) return 0;
    if (HEADS > 1) return min((x & 0x7fffffffu) >> 14, 65534u) + 1;
    return key_of(__uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x), scale);
  }
  __device__ __forceinline__ void read(u32 (&v)[1], const __half* p) const { v[0] = *reinterpret_cast<const u32*>(p); }
  __device__ __forceinline__ void read(u32 (&v)[4], const __half* p) const {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  }
  // Pool 2 N units a thread, and count by the upper bits of their keys.
  template <int N> __device__ __forceinline__ void pool_all(const float (&add)[HEADS], int* hist) const {
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
        if (image[k]) atomicAdd(&hist[key_of(pooled[k], scale) >> 4], 1);
      }
#pragma unroll
      for (int k = 0; k < 2 * N; k += 2) *reinterpret_cast<uint2*>(exact + at + k) = make_uint2(image[k], image[k + 1]);
    }
  }
};

__device__ __forceinline__ void post_counts(uint4* to, const int* counts, int w, u32 stamp) { // word w of DIGIT counts
  u32 v[6];
#pragma unroll
  for (int k = 0; k < 6; k++) v[k] = 6 * w + k < DIGIT ? counts[6 * w + k] : 0;
  post(to + w, v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, stamp);
}
// Add up the counts of all blocks.
__device__ __forceinline__ void add_counts(Desk& s, const Mail& mail, const uint4* from, int turn) {
  for (int i = threadIdx.x; i < mail.blocks * COUNT_WORDS; i += THREADS) {
    const int p = i / COUNT_WORDS, bin = (i - p * COUNT_WORDS) * 6;
    const uint4 v = await(from + i, mail.stamp);
    const u32 counts[6] = {v.x & 0xffff, v.x >> 16, v.y & 0xffff, v.y >> 16, v.z & 0xffff, v.z >> 16};
#pragma unroll
    for (int k = 0; k < 6; k++) {
      if (counts[k]) {
        atomicAdd(&s.total[turn][bin + k], (int)counts[k]);
        if (p < mail.rank) atomicAdd(&s.lower[turn][bin + k], (int)counts[k]);
      }
    }
  }
  __syncthreads();
}
// The bin with the wanted-th unit; every warp looks for itself.
__device__ __forceinline__ Chosen find(const Desk& s, int turn, int wanted) {
  const int lane = threadIdx.x & 31, *total = s.total[turn], *lower = s.lower[turn];
  const int high = DIGIT - 1 - 2 * lane, a = total[high], b = total[high - 1];
  const int end = warp_scan(a + b), seen = end - a - b;
  const int there = __ffs(__ballot_sync(~0u, seen < wanted && end >= wanted)) - 1;
  const bool second = seen + a < wanted;
  Chosen found;
  found.bin = __shfl_sync(~0u, second ? high - 1 : high, there);
  found.above = __shfl_sync(~0u, second ? seen + a : seen, there), found.count = __shfl_sync(~0u, second ? b : a, there);
  int less = (high > found.bin ? lower[high] : 0) + (high - 1 > found.bin ? lower[high - 1] : 0);
#pragma unroll
  for (int o = 16; o; o >>= 1) less += __shfl_xor_sync(~0u, less, o);
  found.lower_above = less, found.lower_count = lower[found.bin];
  return found;
}

// Candidates of the row: units with a key of `bin` whose value has this prefix above `shift`; better ones are chosen.
struct Candidates {
  int bin, need, crowd, before, start; // how many are wanted of how many; chosen units and candidates of lower blocks
  u64 prefix;
  int shift;
  __device__ __forceinline__ static u64 value(u32 exact, int unit) { return (u64)exact << 28 | (0xfffffff - unit); }
  // 2: better, 1: one of them, 0: worse
  __device__ __forceinline__ int place(const Units& units, u32 exact, int unit) const {
    const u32 key = units.key(exact);
    if (key == 0 || (int)(key >> 4) < bin) return 0;
    if ((int)(key >> 4) > bin) return 2;
    const u64 upper = value(exact, unit) >> shift;
    return upper > prefix ? 2 : upper == prefix;
  }
};

// The row's histogram: the upper six bits of all keys, then the next six of the bin that is cut.
__device__ __forceinline__ Candidates cut_row(Desk& s, const Mail& mail, int wanted) {
  const int tid = threadIdx.x;
  constexpr int EACH = DIGIT * DIGIT / THREADS, LANES = DIGIT / EACH; // bins of a thread, threads of a coarse bin
  static_assert(LANES >= 1 && LANES <= 32 && EACH % 4 == 0, "coarse bins are added up inside a warp");
  int sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i += 4) {
    const int4 v = *reinterpret_cast<const int4*>(s.hist + tid * EACH + i);
    sum += v.x + v.y + v.z + v.w;
  }
#pragma unroll
  for (int o = 1; o < LANES; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (tid % LANES == 0) s.own[tid / LANES] = sum;
  __syncthreads();
  if (tid < COUNT_WORDS) post_counts(mail.coarse() + mail.rank * COUNT_WORDS, s.own, tid, mail.stamp);
  for (int i = tid; i < DIGIT * COUNT_WORDS; i += THREADS) {
    const int bin = i / COUNT_WORDS;
    post_counts(mail.fine(bin) + mail.rank * COUNT_WORDS, s.hist + bin * DIGIT, i - bin * COUNT_WORDS, mail.stamp);
  }
  MARK(8)
  add_counts(s, mail, mail.coarse(), 0);
  const Chosen coarse = find(s, 0, wanted);
  MARK(9)
  add_counts(s, mail, mail.fine(coarse.bin), 1);
  const Chosen fine = find(s, 1, wanted - coarse.above);
  return {coarse.bin * DIGIT + fine.bin, wanted - coarse.above - fine.above, fine.count, coarse.lower_above + fine.lower_above, fine.lower_count, 0, 6 * ROUNDS};
}

// Rare: as many digits of score and unit as leave few enough candidates.
__device__ __forceinline__ void split(Desk& s, const Mail& mail, const Units& units, Candidates& of) {
  for (int round = 0; of.crowd > CROWD && of.crowd != of.need; round++) {
    const int turn = round & 1;
    __syncthreads(); // the counts of this turn have been read
    for (int i = threadIdx.x; i < DIGIT + 2; i += THREADS) {
      s.total[turn][i] = s.lower[turn][i] = 0;
      if (i < DIGIT) s.own[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < units.count; i += THREADS) {
      const u32 exact = units.exact[i];
      if (of.place(units, exact, units.begin + i) == 1) atomicAdd(&s.own[Candidates::value(exact, units.begin + i) >> (of.shift - 6) & (DIGIT - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < COUNT_WORDS) post_counts(mail.round(round) + mail.rank * COUNT_WORDS, s.own, threadIdx.x, mail.stamp);
    add_counts(s, mail, mail.round(round), turn);
    const Chosen found = find(s, turn, of.need);
    of.need -= found.above, of.crowd = found.count, of.before += found.lower_above, of.start = found.lower_count;
    of.prefix = of.prefix << 6 | found.bin, of.shift -= 6;
  }
}

// Mark in flags, a bit a unit, what is chosen; returns how much lower blocks choose.
__device__ __forceinline__ int choose(Desk& s, const Mail& mail, const Units& units, Candidates of, unsigned char* flags) {
  const int tid = threadIdx.x, packets = units.count / 8;
  const bool whole = of.crowd == of.need;
  for (int p = tid; p < packets; p += THREADS) {
    const uint4 a = reinterpret_cast<const uint4*>(units.exact)[2 * p], b = reinterpret_cast<const uint4*>(units.exact)[2 * p + 1];
    const u32 exact[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    u32 set = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int u = units.begin + p * 8 + k, place = of.place(units, exact[k], u);
      if (place == 2 || (place == 1 && whole)) set |= 1u << k;
      else if (place == 1) post(mail.list() + of.start + atomicAdd(&s.listed, 1), exact[k], ~(u32)u, 0, mail.stamp);
    }
    flags[p] = set;
  }
  MARK(11)
  if (whole) {
    __syncthreads();
    return of.before + of.start;
  }
  for (int i = tid; i < of.crowd; i += THREADS) {
    const uint4 v = await(mail.list() + i, mail.stamp);
    s.list[i] = (u64)v.x << 32 | v.y;
  }
  for (int i = of.crowd + tid; i < min(CROWD, (of.crowd + 1) & ~1); i += THREADS) s.list[i] = 0; // below every value
  __syncthreads();
  MARK(12)
  const int own_end = of.start + s.listed;
  for (int i = tid >> 3; i < ((of.crowd + 3) & ~3); i += THREADS / 8) { // eight lanes compare one with all
    const u64 own = i < of.crowd ? s.list[i] : 0;
    int better = 0;
    for (int k = (tid & 7) * 2; k < of.crowd; k += 16) {
      const uint4 two = *reinterpret_cast<const uint4*>(s.list + k);
      better += (((u64)two.y << 32 | two.x) > own) + (((u64)two.w << 32 | two.z) > own);
    }
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o);
    if (i >= of.crowd || (tid & 7) || better >= of.need) continue;
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
  for (int i = from; i < to; i++) mine += __popc(flags[i]);
  at += block_scan(mine, s.warp_sums, turn) - mine;
  for (int i = from; i < to; i++) {
    u32 set = flags[i];
    while (set) {
      out[at++] = units.begin + i * 8 + __ffs(set) - 1;
      set &= set - 1;
    }
  }
}

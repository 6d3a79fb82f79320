// The choice of a row's best units in one exchange: every block sends the scores of its units, and all blocks choose the same ones.
//
// For rows of few units, where the steps that follow each other in exchange.cuh take longer than to read all scores again: raw scores go out while
// others are still computed, pooled ones once they are normalized. A row that this does not decide is left to exchange.cuh. Built as pooling.cuh says.
#pragma once
#include "exchange.cuh"

#define SET 16                           // units that a thread looks at
#define SET_WORDS (HEADS > 1 ? 6 : 3)    // of three pooled scores or six raw ones
#define MOST_SHORT_UNITS (SET * THREADS) // of a row
#define MOST_SHORT_BLOCKS 32             // of a row
#define MOST_SHORT_WARPS 8               // of a block
#define SHORT_BINS 128
#define SHORT_MESSAGES(blocks) (MOST_SHORT_WARPS * (blocks) + 256 * 6)

// The scores of a row in sets of its units, and before them what every warp of every block says of its raw ones: [warps, blocks].
struct Scores {
  uint4* heads;
  int blocks;
  __device__ __forceinline__ explicit Scores(const Messages& messages) : heads(messages.list() + MOST_TIED), blocks(messages.blocks) {}
  __device__ __forceinline__ uint4* head(int warp, int block) const { return heads + warp * blocks + block; }
  __device__ __forceinline__ uint4* set(int unit) const { return heads + MOST_SHORT_WARPS * blocks + unit / SET * SET_WORDS; }
};

// A warp sends sixteen raw scores; own: of the first of them.
__device__ __forceinline__ void send_raw(const Messages& messages, const __half* own, int unit) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
  if (lane < SET_WORDS) {
    const u32* from = reinterpret_cast<const u32*>(own) + 3 * lane; // the last two halves of the last word are of nothing
    send(Scores(messages).set(unit) + lane, from[0], from[1], from[min(2, 7 - 3 * lane)], messages.stamp);
  }
}
// And the reference of its scores, the highest and the lowest.
__device__ __forceinline__ void send_range(const Messages& messages, float ref, float high, float low) {
  high = highest(high), low = -highest(-low);
  uint4* to = Scores(messages).head(threadIdx.x >> 5, messages.rank);
  if ((threadIdx.x & 31) == 0) send(to, __float_as_uint(high), __float_as_uint(low), __float_as_uint(ref), messages.stamp);
}
// A block sends the pooled scores of its units.
__device__ __forceinline__ void send_pooled(const Messages& messages, const Units& units) {
  const Scores scores(messages);
#pragma unroll 1
  for (int i = threadIdx.x; i < units.count / SET * SET_WORDS; i += THREADS) {
    const u32 set = (u32)i / SET_WORDS, at = i - set * SET_WORDS;
    const u32* from = units.exact + set * SET + 3 * at;
    const int more = at < SET_WORDS - 1; // the last word holds one
    send(scores.set(units.begin) + i, max(from[0], 0x80000000u), max(from[more], 0x80000000u), max(from[2 * more], 0x80000000u), messages.stamp);
  }
}

// The bin with the wanted-th unit, in all lanes; bin -1 where there are fewer. A warp for itself.
__device__ __forceinline__ Cut warp_cut(const int* counts, int wanted) {
  const int lane = threadIdx.x & 31, base = SHORT_BINS - 4 * (lane + 1);
  const int4 v = *reinterpret_cast<const int4*>(counts + base);
  const int end = warp_scan(v.x + v.y + v.z + v.w);
  const u32 found = __ballot_sync(~0u, end >= wanted);
  if (found == 0) return {-1, 0, 0};
  int bin = base, above = end - v.x, count = v.x;
  if (above >= wanted) bin++, count = v.y, above -= v.y;
  if (above >= wanted) bin++, count = v.z, above -= v.z;
  if (above >= wanted) bin++, count = v.w, above -= v.w;
  const int from = __ffs(found) - 1;
  return {__shfl_sync(~0u, bin, from), __shfl_sync(~0u, above, from), __shfl_sync(~0u, count, from)};
}

// A thread's set as all blocks see it: bins of its units, four a word: unit 4 j + k is byte j of word k. No unit of bin 0 is chosen.
struct Bins {
  u32 word[4];
  // A bit a unit, bit 8 j + k: those above a bin.
  __device__ __forceinline__ u32 above(int bin) const {
    u32 set = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) set |= (word[k] + (SHORT_BINS - 1 - bin) * 0x01010101u & 0x80808080u) >> (7 - k);
    return set;
  }
  __device__ __forceinline__ static int unit(int bit) { return (bit >> 3) * 4 + (bit & 7); }
  __device__ __forceinline__ static int bit(int unit) { return (unit >> 2) * 8 + (unit & 3); }
};

// What the thread's units are compared by, from the words of its set.
struct Set {
  uint4 v[SET_WORDS];
  float add, base, factor; // raw scores
  int lowest;              // pooled ones: the image of bin 0's end

  __device__ __forceinline__ u32 image(int unit) const {
    if (HEADS > 1) {
      u32 found = 0;
#pragma unroll
      for (int i = 0; i < SET_WORDS; i++) {
        const u32 w[3] = {v[i].x, v[i].y, v[i].z};
#pragma unroll
        for (int k = 0; k < 3; k++) found = 3 * i + k == unit ? w[k] : found;
      }
      return found;
    }
    u32 both = 0;
#pragma unroll
    for (int i = 0; i < SET_WORDS; i++) {
      const u32 w[3] = {v[i].x, v[i].y, v[i].z};
#pragma unroll
      for (int k = 0; k < 3; k++) both = 3 * i + k == unit >> 1 ? w[k] : both;
    }
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&both));
    return ordered((unit & 1 ? f.y : f.x) + add);
  }
  // Bins of all units of the set, counted; bits of `live` say which may be chosen.
  __device__ __forceinline__ Bins count(int* counts, u32 live) const {
    u32 bin[SET];
#pragma unroll
    for (int i = 0; i < SET; i += 2) {
      if (HEADS > 1) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const u32 w[3] = {v[(i + k) / 3].x, v[(i + k) / 3].y, v[(i + k) / 3].z};
          bin[i + k] = min(max((int)(w[(i + k) % 3] - (u32)lowest) >> 20, 0), SHORT_BINS - 1); // eight an octave, over the octaves of pooled keys
        }
      } else {
        const u32 w[3] = {v[i / 6].x, v[i / 6].y, v[i / 6].z};
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i / 2 % 3]));
        // The scores themselves are rounded as the selector's, so that equal ones share a bin; an integer is the lower bits of a float above 2^23.
        bin[i] = __float_as_uint(fma_sat(f.x + add, factor, base) * (SHORT_BINS - 1.f) + 8388608.f);
        bin[i + 1] = __float_as_uint(fma_sat(f.y + add, factor, base) * (SHORT_BINS - 1.f) + 8388608.f);
      }
    }
    if (live != 0xffffu) {
#pragma unroll
      for (int i = 0; i < SET; i++) bin[i] = live >> i & 1 ? bin[i] : 0;
    }
    Bins bins;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (HEADS == 1 || bin[4 * j + k]) atomicAdd(counts + (bin[4 * j + k] & (SHORT_BINS - 1)), 1);
      }
      bins.word[k] = __byte_perm(__byte_perm(bin[k], bin[4 + k], 0x0040), __byte_perm(bin[8 + k], bin[12 + k], 0x0040), 0x5410);
    }
    return bins;
  }
};

// Read the thread's set, and say what its raw scores are compared by.
__device__ __forceinline__ void read_set(Desk& s, const Messages& messages, int unit, int block, bool live, Set& set) {
  const Scores scores(messages);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint4 *words = scores.set(unit), *head = scores.head(warp, lane);
  const bool asks = HEADS == 1 && lane < messages.blocks;
  uint4 received = {0, 0, 0, messages.stamp - 1};
  bool ready;
#pragma unroll
  for (int i = 0; i < SET_WORDS; i++) set.v[i] = received;
  do { // all that is missing at once: one after the other would take as many round trips
    ready = true;
    if (asks && received.w != messages.stamp) received = poll(head);
#pragma unroll
    for (int i = 0; i < SET_WORDS; i++) {
      if (live && set.v[i].w != messages.stamp) set.v[i] = poll(words + i);
    }
    if (asks) ready = received.w == messages.stamp;
#pragma unroll
    for (int i = 0; i < SET_WORDS; i++) {
      if (live) ready &= set.v[i].w == messages.stamp;
    }
  } while (!ready);
  __syncwarp();
  if (HEADS > 1) return;
  float top = asks ? __uint_as_float(received.x) : -3e38f, low = asks ? __uint_as_float(received.y) : 3e38f;
  const float ref = __shfl_sync(~0u, __uint_as_float(received.z), block);
  top = highest(top), low = -highest(-low);
  if (lane == 0) s.range[warp] = make_float2(top, low);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) top = fmaxf(top, s.range[i].x), low = fminf(low, s.range[i].y);
  set.add = ref - top, set.factor = 1.f / fmaxf(top - low, 1e-30f), set.base = (top - low) * set.factor;
}

// As choose_units where that decides; false, in all blocks, where it does not. s.own has been cleared and counts nothing; per: units of every block.
__device__ __forceinline__ bool choose_short(Desk& s, const Messages& messages, const Reading& row, Units& units, int* out, u32* stamp, int per) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, unit = tid * SET;
  Set set;
  if (HEADS > 1) {
    float add[HEADS];
    normalize(s, messages, add);
    units.scale(s.low, (MAXIMUM ? HEADS : 1) / (float)row.wanted);
    set.lowest = units.base | 0x80000000;
    MARK(6)
    if (units.count <= 2 * THREADS) units.pool_all<1, false>(add, s.own);
    else units.pool_all<2, false>(add, s.own);
    __syncthreads();
    send_pooled(messages, units);
  }
  MARK(7)
  const int block = min(unit / per, messages.blocks - 1);
  const u32 live = ((1u << max(min(row.last - unit, SET), 0)) - 1) & ~((1u << max(min(row.first - unit, SET), 0)) - 1);
  put_forced(messages, row, out);
  read_set(s, messages, unit, block, live != 0, set);
  MARK(8)
  Bins bins = {0, 0, 0, 0};
  if (live) bins = set.count(s.total, live);
  __syncthreads();
  MARK(9)
  const Cut cut = warp_cut(s.total, row.wanted);
  const int need = row.wanted - cut.above;
  if (cut.bin <= 0 || (cut.count > MOST_TIED && cut.count != need)) return false;
  u32 chosen = bins.above(cut.bin), near = bins.above(cut.bin - 1) & ~chosen;
  if (cut.count == need) {
    chosen |= near;
  } else {
#pragma unroll 1
    for (; near; near &= near - 1) {
      const int u = Bins::unit(__ffs(near) - 1);
      s.list[atomicAdd(&s.listed, 1)] = Candidates::value(set.image(u), unit + u);
    }
    __syncthreads();
    auto settle = [&](u64 own, int better) {
      const int u = 0xfffffff - (int)(own & 0xfffffff);
      if (better < need) atomicOr(reinterpret_cast<u32*>(s.own) + u / SET, 1u << Bins::bit(u % SET));
    };
    if (cut.count <= 32) { // nearly always: a warp's comparisons all at once, and lane k settles the k-th
      const u64 other = lane < cut.count ? s.list[lane] : 0;
      u64 own = 0;
      int better = 0;
#pragma unroll
      for (int k = 0; k < 32 * 32 / THREADS; k++) {
        const u64 one = s.list[k * (THREADS / 32) + warp];
        const int above = __popc(__ballot_sync(~0u, other > one));
        if (lane == k) own = one, better = above;
      }
      if (lane * (THREADS / 32) + warp < cut.count) settle(own, better);
    } else {
#pragma unroll 1
      for (int i = warp; i < cut.count; i += THREADS / 32) { // a warp compares one with all
        const u64 own = s.list[i];
        int better = 0;
        for (int k = lane; k < cut.count; k += 32) better += s.list[k] > own;
        better = __reduce_add_sync(~0u, better);
        if (lane == 0) settle(own, better);
      }
    }
    __syncthreads();
    chosen |= s.own[tid];
  }
  MARK(10)
  // Where the thread's units stand among the row's: counts up to sixteen, bit by bit.
  const int mine = __popc(chosen);
  int to = 0, all = 0;
#pragma unroll
  for (int k = 0; k < 5; k++) {
    const u32 set_bits = __ballot_sync(~0u, mine >> k & 1);
    to += __popc(set_bits & ((1u << lane) - 1)) << k, all += __popc(set_bits) << k;
  }
  if (lane == 0) s.warp_sums[warp] = all;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) to += i < warp ? s.warp_sums[i] : 0;
  MARK(13)
  if (block == messages.rank) {
#pragma unroll 1
    for (; chosen; chosen &= chosen - 1) out[row.first + to++] = unit + Bins::unit(__ffs(chosen) - 1);
  }
  if (messages.rank == 0 && tid == 0) put_stamp(messages, row, out, stamp);
  MARK(14)
  return true;
}

// The choice of a row's best units by several blocks, each of which holds the scores of its share: three exchanges, each as short as it can be.
//
// Built as pooling.cuh says, with -DDEALT where groups of 32 units are dealt to blocks in turn.
#pragma once
#include "put_list.cuh"

// Counts of lower blocks in six bins from `bin` on that a thread has added up.
struct Lower {
  int bin, counts[6];
};
// Tell all blocks the counts of this one, and add theirs up: the row's in s.total, lower blocks' where they were read. A thread takes a word of several
// blocks, because adding in shared memory takes longest.
template <int N> __device__ __forceinline__ Lower add_counts(Desk& s, const Mail& mail, uint4* words) {
  constexpr int OWN = WORDS_OF(N), TEAMS = THREADS / OWN, UNDER_WAY = 3;
  const int tid = threadIdx.x, team = tid / OWN, word = tid - team * OWN;
  if (tid < OWN) {
    u32 v[6];
#pragma unroll
    for (int k = 0; k < 6; k++) v[k] = 6 * tid + k < N ? s.own[min(6 * tid + k, N - 1)] : 0;
    post(words + mail.rank * OWN + tid, v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, mail.stamp);
  }
  Lower lower = {word * 6, {0, 0, 0, 0, 0, 0}};
  int total[6] = {0, 0, 0, 0, 0, 0};
#pragma unroll 1
  for (int from = team; from < mail.blocks && team < TEAMS; from += UNDER_WAY * TEAMS) {
    uint4 v[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      if (from + k * TEAMS < mail.blocks) v[k] = look(words + (from + k * TEAMS) * OWN + word);
    }
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      const int p = from + k * TEAMS;
      if (p >= mail.blocks) break;
      while (v[k].w != mail.stamp) v[k] = look(words + p * OWN + word);
      const u32 pairs[3] = {v[k].x, v[k].y, v[k].z};
#pragma unroll
      for (int c = 0; c < 6; c++) {
        const int one = pairs[c / 2] >> 16 * (c & 1) & 0xffff;
        total[c] += one, lower.counts[c] += p < mail.rank ? one : 0;
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
  int bin, need, crowd, before, start; // how many are wanted of how many; chosen units and candidates of lower blocks
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
__device__ __forceinline__ void split(Desk& s, const Mail& mail, const Units& units, Candidates& of) {
#pragma unroll 1
  for (int round = 0; of.crowd > CROWD && of.crowd != of.need; round++) {
    __syncthreads(); // the counts have been read
    clear(s);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < units.count; i += THREADS) {
      const u32 exact = units.exact[i];
      if (exact == 0 || units.key_again(exact) >> 6 != of.bin || of.place(units, exact, units.unit(i)) != 0) continue;
      const int digit = round == 0 ? units.key_again(exact) : (int)(Candidates::value(exact, units.unit(i)) >> (of.shift - 6));
      atomicAdd(&s.own[digit & (DIGIT - 1)], 1);
    }
    __syncthreads();
    const Lower lower = add_counts<DIGIT>(s, mail, mail.round(round));
    const Chosen found = cut_row<DIGIT>(s, lower, of.need, 0, 0);
    of.need -= found.cut.above, of.crowd = found.cut.count, of.before += found.lower_above, of.start = found.lower_count;
    if (round == 0) of.key = found.cut.bin;
    else of.prefix = of.prefix << 6 | found.cut.bin, of.shift -= 6;
  }
}

// Mark in flags, a bit a unit, what is chosen; returns how much lower blocks choose.
__device__ __forceinline__ int choose(Desk& s, const Mail& mail, const Units& units, Candidates of, unsigned char* flags) {
  const int tid = threadIdx.x, packets = units.count / 8;
  const bool whole = of.crowd == of.need;
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
      const int k = __ffs(near) - 1, u = units.unit(p * 8 + k);
      const u32 own = units.exact[p * 8 + k];
      const int place = of.place(units, own, u);
      near &= near - 1;
      if (place > 0 || (place == 0 && whole)) set |= 1u << k;
      else if (place == 0) post(mail.list() + of.start + atomicAdd(&s.listed, 1), own, ~(u32)u, 0, mail.stamp);
    }
    flags[p] = set;
  }
  MARK(11)
  if (whole) {
    __syncthreads();
    return of.before + of.start;
  }
  const bool fine = of.key < 0 && of.crowd > COMPARED; // many: the lower six bits of their keys leave few to compare
#pragma unroll 1
  for (int i = tid; i < of.crowd; i += THREADS) {
    const uint4 v = await(mail.list() + i, mail.stamp);
    s.list[i] = (u64)v.x << 32 | v.y;
    if (fine) atomicAdd(&s.own[units.key_again(v.x) & (DIGIT - 1)], 1);
  }
  __syncthreads();
  MARK(12)
  const int own_end = of.start + s.listed;
  const u64* few = s.list;
  int left = of.crowd, need = of.need, sub = -1;
  if (fine) {
    find<DIGIT>(s, s.own, of.need, 0);
    sub = s.cut.bin, need -= s.cut.above, left = s.cut.count, few = s.few;
#pragma unroll 1
    for (int i = tid; i < of.crowd; i += THREADS) {
      if ((units.key_again((u32)(s.list[i] >> 32)) & (DIGIT - 1)) == sub) s.few[atomicAdd(&s.left, 1)] = s.list[i];
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int i = tid; i < of.crowd; i += THREADS) {
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
      const int at = units.place((int)~(u32)own);
      atomicOr(reinterpret_cast<u32*>(flags) + (at >> 5), 1u << (at & 31));
    }
  }
  __syncthreads();
  return of.before + s.less;
}

// From the block's scores in shared memory and what all blocks have told about theirs to the block's part of the row's list.
__device__ __forceinline__ void choose_units(Desk& s, const Mail& mail, const Reading& row, Units& units, unsigned char* flags, int* out, u32* stamp) {
  float add[HEADS];
  normalize(s, mail, add);
  units.scale(s.low, (MAXIMUM ? HEADS : 1) / (float)row.wanted);
  MARK(6)
  if (units.count <= 2 * THREADS) units.pool_all<1>(add, s.own);
  else units.pool_all<4>(add, s.own);
  __syncthreads();
  MARK(7)
  const Lower lower = add_counts<BINS>(s, mail, mail.bins());
  MARK(9)
  const Chosen found = cut_row<BINS>(s, lower, row.wanted, units.eligible(row.last), units.lower_eligible());
  Candidates candidates = {found.cut.bin, row.wanted - found.cut.above, found.cut.count, found.lower_above, found.lower_count, -1, 0, 60};
  MARK(10)
  split(s, mail, units, candidates);
  const int before = choose(s, mail, units, candidates, flags);
  MARK(13)
#ifdef DEALT
  put_dealt(s, mail, units, reinterpret_cast<u32*>(flags), row.units >> 5, out + row.first);
#else
  put_chosen(s, units, flags, out, row.first + before);
#endif
  put_forced(mail, row, out);
  put_stamp(mail, row, out, stamp);
  MARK(14)
}

// The choice of a row's best units in one exchange behind the normalizers: every block offers its best ones, and all blocks find the same cut among them.
//
// A block offers as many as it may, from a bound of its own on. No unit that is not offered can be chosen where the cut lies above all bounds; otherwise, and
// where more are wanted than offered, the row is left to exchange.cuh. Groups are dealt to blocks in turn, so that neighbours, which score alike, are offered
// by several. Built as pooling.cuh says, with -DDEALT.
#pragma once
#include "exchange.cuh"

#define MOST_OFFERING 64 // blocks of a row

// Two units are a word: 32 bits of score each and 16 of the place in the block. Every block tells as many words.
__device__ __forceinline__ int words_of_offers(int wanted, int blocks) { // as there is room for, but no more than about twice its share of units
  return min(quotient(OFFER_WORDS, blocks), quotient(15 * wanted, 16 * blocks) + 8);
}

// The bin with the wanted-th unit of those that are counted, in all lanes; where there are fewer, bin -1, and all of them above it. A warp for itself.
__device__ __noinline__ Cut cut_counts(const int* counts, int wanted) {
  const int lane = threadIdx.x & 31, base = BINS - 8 * (lane + 1);
  const int4 low = *reinterpret_cast<const int4*>(counts + base), high = *reinterpret_cast<const int4*>(counts + base + 4);
  const int v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const int end = warp_scan(((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])));
  const u32 found = __ballot_sync(~0u, end >= wanted);
  int bin = base, count = v[0], above = end - v[0];
#pragma unroll
  for (int i = 1; i < 8; i++) {
    if (above >= wanted) bin = base + i, count = v[i], above -= v[i];
  }
  const int from = found ? __ffs(found) - 1 : 31;
  return {found ? __shfl_sync(~0u, bin, from) : -1, __shfl_sync(~0u, found ? above : end, from), __shfl_sync(~0u, count, from)};
}

// Raw scores: how a block counts its halves, from its highest one down, and from where on it offers them.
struct Raw {
  float high, factor;
  int least; // bin from which on units are offered
  __device__ __forceinline__ Raw(float4 part) : high(part.y - part.x), factor(fmaxf(__fdividef(BINS - 1, fmaxf(part.y - part.z, 1e-30f)), 4.f)), least(0) {}
  __device__ __forceinline__ int bin(float x) const { return BINS - 1 - (int)fminf(fmaxf((high - x) * factor, 0.f), BINS - 1.f); }
  __device__ __forceinline__ float bound() const { return high - __fdividef(0.9999f * (BINS - least), factor); } // at least every score below that bin
};
__device__ __forceinline__ void halves_of(const __half* from, float (&x)[8]) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[k]));
    x[2 * k] = f.x, x[2 * k + 1] = f.y;
  }
}
// Which of eight units of a group may be chosen, a bit each.
__device__ __forceinline__ u32 eligible8(const Units& units, int unit) {
  return ((1u << max(min(units.last - unit, 8), 0)) - 1) & ~((1u << max(min(units.first - unit, 8), 0)) - 1);
}
__device__ __forceinline__ void count_raw(const Units& units, const Raw& raw, int* counts) {
#pragma unroll 1
  for (int at = threadIdx.x * 8; at < units.count; at += THREADS * 8) {
    const u32 live = eligible8(units, units.unit(at));
    float x[8];
    halves_of(units.scores + at, x);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int bin = raw.bin(x[k]);
      if (bin && live >> k & 1) atomicAdd(counts + bin, 1);
    }
  }
}

// List the units from a bound on, in any order: raw ones by their bins, pooled ones by their images.
__device__ __forceinline__ void list_offers(Desk& s, const Units& units, const Raw& raw, u32 bound, u64* list) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int from = 0; from < units.count; from += THREADS * 8) {
    const int at = from + threadIdx.x * 8;
    u32 set = 0;
    if (at >= units.count) {
    } else if (HEADS > 1) {
      const uint4 a = *reinterpret_cast<const uint4*>(units.exact + at), b = *reinterpret_cast<const uint4*>(units.exact + at + 4);
      const u32 image[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 8; k++) set |= (u32)(image[k] >= bound) << k;
    } else {
      float x[8];
      halves_of(units.scores + at, x);
#pragma unroll
      for (int k = 0; k < 8; k++) set |= (u32)(raw.bin(x[k]) >= raw.least) << k;
      set &= eligible8(units, units.unit(at));
    }
    // A place for each: those of the warp lie beside each other.
    const int mine = __popc(set);
    int slot = 0, all = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 with = __ballot_sync(~0u, mine >> k & 1);
      slot += __popc(with & ((1u << lane) - 1)) << k, all += __popc(with) << k;
    }
    int start = 0;
    if (lane == 0 && all) start = atomicAdd(&s.left, all);
    slot += __shfl_sync(~0u, start, 0);
#pragma unroll 1
    for (; set; set &= set - 1) {
      const int place = at + __ffs(set) - 1;
      list[slot++] = (u64)place << 32 | (HEADS > 1 ? units.exact[place] : __float_as_uint(__half2float(units.scores[place])));
    }
  }
}
// Tell them, and nothing in words that are left.
__device__ __forceinline__ void tell_offers(const Mail& mail, int words, const u64* list, int told) {
  constexpr u32 NOTHING = HEADS > 1 ? 0 : 0xff800000u;
#pragma unroll 1
  for (int i = threadIdx.x; i < words; i += THREADS) {
    const uint4 two = *reinterpret_cast<const uint4*>(list + 2 * i);
    const bool one = 2 * i < told, both = 2 * i + 1 < told;
    post(mail.offers() + words * mail.rank + i, one ? two.x : NOTHING, both ? two.z : NOTHING, (one ? two.y : 0) | (both ? two.w << 16 : 0), mail.stamp);
  }
}

// What all blocks offer, as a thread sees it.
struct Offered {
  uint4 v[OFFER_LOOKS]; // raw scores: as they are in the row
  int block[OFFER_LOOKS];
  u32 bound; // the highest of all blocks: an image, or a raw score

  __device__ __forceinline__ u32 score(int i) const { return i & 1 ? v[i >> 1].y : v[i >> 1].x; }
  __device__ __forceinline__ u32 image(int i) const { return HEADS > 1 ? score(i) : ordered(__uint_as_float(score(i))); }
  __device__ __forceinline__ int unit(int i) const { // of the row
    const int place = i & 1 ? v[i >> 1].z >> 16 : v[i >> 1].z & 0xffff;
    return ((place >> 5) * gridDim.x + block[i >> 1]) * 32 + (place & 31);
  }
  // -1 where it lies below the bound. The further above, the wider: 32 bins while the distance doubles, from a 32nd to eight octaves.
  __device__ __forceinline__ int bin(int i) const {
    constexpr int FIRST = (127 - 5) << 5;
    const float above = HEADS > 1 ? (float)(score(i) - bound) * 0x1p-23f : __uint_as_float(score(i)) - __uint_as_float(bound);
    return (HEADS > 1 ? score(i) < bound : !(above > 0.f)) ? -1 : min(max((__float_as_int(above) >> 18) - FIRST, 0), BINS - 1);
  }
  __device__ __forceinline__ void read(const Mail& mail, int words) {
    const int lane = threadIdx.x & 31, used = mail.blocks * words;
    const bool asks[2] = {lane < mail.blocks, lane + 32 < mail.blocks};
    const uint4* from = mail.offers() + threadIdx.x;
    uint4 head[2];
    head[0].w = head[1].w = mail.stamp - 1;
#pragma unroll
    for (int k = 0; k < OFFER_LOOKS; k++) v[k] = make_uint4(0, 0, 0, mail.stamp - 1), block[k] = quotient(threadIdx.x + k * THREADS, words);
    bool ready;
    do { // all that is missing at once: one after the other would take as many round trips
      ready = true;
#pragma unroll
      for (int k = 0; k < OFFER_LOOKS; k++) {
        if ((int)threadIdx.x + k * THREADS < used && v[k].w != mail.stamp) v[k] = look(from + k * THREADS);
      }
#pragma unroll
      for (int k = 0; k < 2; k++) {
        if (asks[k] && head[k].w != mail.stamp) head[k] = look(mail.offer_heads() + lane + 32 * k);
      }
#pragma unroll
      for (int k = 0; k < 2; k++) ready &= !asks[k] || head[k].w == mail.stamp;
#pragma unroll
      for (int k = 0; k < OFFER_LOOKS; k++) ready &= (int)threadIdx.x + k * THREADS >= used || v[k].w == mail.stamp;
    } while (!ready);
    __syncwarp();
    if (HEADS > 1) {
      // All three are the same, but the assembler splits a load of which some words are not used, and who sees the stamp no longer has the rest.
      u32 high = 1;
#pragma unroll
      for (int k = 0; k < 2; k++) high = max(high, asks[k] ? max(max(head[k].x, head[k].y), head[k].z) : 0);
      bound = __reduce_max_sync(~0u, high);
      return;
    }
    float low = -3e38f, add[2] = {0.f, 0.f};
    const float top = highest(fmaxf(asks[0] ? __uint_as_float(head[0].y) : -3e38f, asks[1] ? __uint_as_float(head[1].y) : -3e38f));
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (asks[k]) add[k] = __uint_as_float(head[k].z) - top, low = fmaxf(low, __uint_as_float(head[k].x) + add[k]);
    }
    bound = __float_as_uint(highest(low));
#pragma unroll
    for (int k = 0; k < OFFER_LOOKS; k++) {
      const float a = __shfl_sync(~0u, add[0], block[k] & 31), b = __shfl_sync(~0u, add[1], block[k] & 31);
      const float more = v[k].w != mail.stamp ? -3e38f : block[k] < 32 ? a : b;
      v[k].x = __float_as_uint(__uint_as_float(v[k].x) + more), v[k].y = __float_as_uint(__uint_as_float(v[k].y) + more);
    }
  }
};

// One more; in PTX, because the compiler would gather the lanes first, which takes fifteen instructions for few of them.
__device__ __forceinline__ int next_place(int* count) {
  int before;
  asm volatile("atom.shared.add.u32 %0,[%1],1;" : "=r"(before) : "r"(shared_at(count)) : "memory");
  return before;
}
// Take note of a chosen unit: counted where it lies before the block's range, marked where it lies in it.
__device__ __forceinline__ int take(const Range& range, u32* bits, int unit) {
  const int group = (unit >> 5) - range.first;
  if ((u32)group < (u32)(range.end - range.first)) atomicOr(bits + group, 1u << (unit & 31));
  return group < 0;
}

// As choose_units where that decides; false, in all blocks, where it does not. s.own and s.total have been cleared. HEADS 1: part is what the block has told.
// bits: room / 32 words; list: room for what a block offers.
__device__ __forceinline__ bool choose_offered(
    Desk& s, const Mail& mail, int words, const Reading& row, Units& units, u32* bits, u64* list, float4 part, int* out, u32* stamp) {
  constexpr int OFFERS = 2 * OFFER_LOOKS;
  const int tid = threadIdx.x;
  const Range range(row.units >> 5, mail);
#pragma unroll 1
  for (int i = tid; i < range.end - range.first; i += THREADS) bits[i] = 0;
  Raw raw(part);
  if (HEADS > 1) {
    float add[HEADS];
    normalize<MOST_OFFERING / 32>(s, mail, add);
    units.scale(0.f, __fdividef(MAXIMUM ? HEADS : 1, (float)row.wanted));
    MARK(6)
    units.pool_all<2, 2>(add, s.own);
  } else {
    count_raw(units, raw, s.own);
  }
  __syncthreads();
  MARK(7)
  const Cut own = cut_counts(s.own, 2 * words + 1);
  raw.least = own.bin < 0 ? 1 : own.bin + 1;
  const u32 bound = (units.wide_base() + (raw.least << 20)) | 0x80000000u;
  if (tid == 0) {
    if (HEADS > 1) post(mail.offer_heads() + mail.rank, units.count ? bound : 0, units.count ? bound : 0, units.count ? bound : 0, mail.stamp);
    else post(mail.offer_heads() + mail.rank, __float_as_uint(units.count ? raw.bound() : -3e38f), __float_as_uint(part.y), __float_as_uint(part.x), mail.stamp);
  }
  list_offers(s, units, raw, bound, list);
  __syncthreads();
  tell_offers(mail, words, list, own.above);
  MARK(8)
  Offered all;
  all.read(mail, words);
  MARK(9)
  int bin[OFFERS];
#pragma unroll
  for (int i = 0; i < OFFERS; i++) {
    bin[i] = -1;
    if (i / 2 * THREADS >= words * mail.blocks) continue;
    bin[i] = all.bin(i);
    if (bin[i] >= 0) atomicAdd(s.total + bin[i], 1);
  }
  __syncthreads();
  MARK(10)
  const Cut cut = cut_counts(s.total, row.wanted);
  const int need = row.wanted - cut.above;
  if (cut.bin < 0 || (cut.count > CROWD && cut.count != need)) return false;
  const int from = cut.bin + (cut.count != need); // the bin from which on all are chosen
  int before = 0;
#pragma unroll
  for (int i = 0; i < OFFERS; i++) {
    if (i / 2 * THREADS >= words * mail.blocks) continue;
    const int unit = all.unit(i);
    if (bin[i] >= from) before += take(range, bits, unit);
    else if (bin[i] == cut.bin) s.list[next_place(&s.listed)] = (u64)all.image(i) << 32 | ~(u32)unit;
  }
  MARK(11)
  if (from != cut.bin) {
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < cut.count; i += THREADS) {
      const u64 value = s.list[i];
      int better = 0;
#pragma unroll 4
      for (int k = 0; k < cut.count; k++) better += s.list[k] > value;
      if (better < need) before += take(range, bits, (int)~(u32)value);
    }
  }
  MARK(12)
  before = __reduce_add_sync(~0u, before);
  if ((tid & 31) == 0 && before) atomicAdd(&s.before, before);
  __syncthreads();
  put_groups(s, bits, range.first, range.end - range.first, out + row.first);
  put_forced<32>(mail, row, out); // another warp
  put_stamp(mail, row, out, stamp);
  MARK(14)
  return true;
}

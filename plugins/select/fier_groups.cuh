// FIER's scores of a block's share of groups: one-bit keys of 32 tokens against the G <= 8 query heads of a key-value head, on tensor cores.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G), -DPOOL (0: every head for itself, 1: mean, 2: maximum), -DSTAGES and -DBF16,
// and -DWARPS where a block has not eight.
//
// A pair of groups is the sparse operand of mma.m16n8k32: rows are tokens, and of every four values in a row two are not zero. Those are the ranges of two
// channels, the same in all rows; the metadata that says at which of two places each of them stands are the bits. The query stands at the second
// place, zero at the first. So nothing is unpacked but the metadata, one AND-OR for sixteen tokens and sixteen channels; the order of the bits
// (`fier_layout.py`) is that of the metadata. Lows are added by the same product with every value in its second place.
#pragma once
#include "fier_tile.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef EARLY_GROUPS
#define EARLY_GROUPS (STAGES - 2) // of a warp, fetched before the query is read
#endif
#define WORDS (D / 32)            // 32-bit words of bits that a lane owns in a group
#define BIT_BYTES (4 * D)         // bytes of bits in a group
#define META_BYTES (4 * D)        // lows, then ranges, fp16
#define STAGE_BYTES (8 * D)       // bits, lows and ranges of a group in the ring; STAGES of them a warp, a power of two
#define MERGED (GROUP_HEADS <= 4) // the columns hold the heads twice: lanes with tig < 2 keep the first group of a pair, the others the second
#define PAIRED (MERGED ? 1 : 2)   // groups of a pair that a lane keeps
#define STEP_HEADS (POOL == 0 ? GROUP_HEADS : 1)
#include "fier_query.cuh"

// The groups [begin, end) of a sequence that a block scores; idle: there is nothing to score.
struct Groups {
  const char *bits, *meta; // the pool of one layer: BIT_BYTES and META_BYTES a group, [P, Hk, N / 32] groups
  const int* table;        // page numbers of the sequence
  int head, heads, page_groups, stored, begin, end;
  bool idle, many; // many: more scores are written than the second-level cache holds
  int first;       // where the group of this lane lies, of the first groups of its warp

  // Warps take pairs of neighbours in turn: the scores of a pair fill whole lines of memory. Groups of this one, and the j-th of them.
  __device__ __forceinline__ int mine() const {
    return max(0, (end - begin) / (2 * WARPS) * 2 + min(max((end - begin) % (2 * WARPS) - 2 * (int)(threadIdx.x >> 5), 0), 2));
  }
  __device__ __forceinline__ int group(int j) const { return begin + (j >> 1) * (2 * WARPS) + (int)(threadIdx.x >> 5) * 2 + (j & 1); }
  // Where that lies, if it exists.
  __device__ __forceinline__ int place(int j) const {
    if (j >= mine()) return 0;
    const int g = group(j), page = g / page_groups;
    return (table[page] * heads + head) * page_groups + g - page * page_groups;
  }
};

// Waits for the kernels before this one as late as it can, then calls begun(). Writes fp16 scores times scale and log2(e)
// minus the reference of the share, head h at scores + h * stride, from the share's first unit on. Calls tell(h, part) in thread h, for STEP_HEADS
// heads: reference, then log2 of the sum of exponentials (POOL 0 and G > 1) or the maximum, and the minimum.
template <typename Begun, typename Tell> __device__ __forceinline__ void score_groups(const Groups& row, Query& query, char* smem, __half* scores,
    long long stride, float scale_log2, Begun begun, Tell tell) {
  __shared__ float shared_ref[WARPS][8];
  __shared__ float2 shared_sum[WARPS][8];
  __shared__ Fragments fragments;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int pair = MERGED ? tig & 1 : tig, second = MERGED ? tig >> 1 : 0; // this lane's heads 2 pair and 2 pair + 1; merged: of which group
  const int begin = row.begin, end = row.end;
  const int mine = row.mine();
  const u64 policy = read_policy(!row.many), stays = score_policy();
  int place = row.first; // lane l knows where the l-th group of this warp lies; refreshed every 32 groups
  MARK(0)
  // Groups that are older than the newest token were there before the kernel before this one began: they are fetched before the wait.
  const bool settled = row.group(min(mine, STAGES - 2) - 1) < (row.stored - 1) >> 5;
  // Where the query is published, there is nothing to wait for but what the newest token completes.
  const bool ahead = query.published && row.group(mine - 1) < (row.stored - 1) >> 5;
  bool waits = true; // still
  auto wait = [&] {
    if (waits) dependency_wait(), begun();
    waits = false;
  };
  if (!settled || row.idle) wait();
  if (row.idle) return;
  const u32 ring = shared_at(smem) + warp * STAGES * STAGE_BYTES;
  const u32 bits_at = ring + lane * WORDS * 4;            // this lane's words and ranges in the first stage
  const u32 units_at = ring + BIT_BYTES + (lane >> 3 & 1) * STAGE_BYTES + (lane >> 4) * 16 + 2 * D; // of the ranges
  const u32 bits_to = ring + lane * 16;
  const char *bits_from = row.bits + lane * 16, *meta_from = row.meta + lane * 16;
  // Sixteen bytes of lows change places within every four by the group's stage: those of four stages lie in different banks.
  const u32 moves = lane * 16 < 2 * D ? 0x30 : 0;
  auto copy_group = [&](int j, u32 to, long long at) {
    const u32 moved = j * 16 & moves;
#pragma unroll
    for (int c = 0; c < BIT_BYTES / 16; c += 32) {
      if (BIT_BYTES / 16 - c >= 32 || lane < BIT_BYTES / 16 - c) copy16_once(to + c * 16, bits_from + at * BIT_BYTES + c * 16, policy);
    }
#pragma unroll
    for (int c = 0; c < META_BYTES / 16; c += 32) {
      const u32 there = to + BIT_BYTES ^ (c == 0 ? moved : 0);
      if (META_BYTES / 16 - c >= 32 || lane < META_BYTES / 16 - c) copy16_once(there + c * 16, meta_from + at * META_BYTES + c * 16, policy);
    }
  };
  auto fetch = [&](int j, int at) {
    if (j < mine) copy_group(j, bits_to + (j & (STAGES - 1)) * STAGE_BYTES, at);
  };
  auto fetch_first = [&](int j) {
    fetch(j, __shfl_sync(~0u, place, j)), fetch(j + 1, __shfl_sync(~0u, place, j + 1));
    copies_commit();
  };
  if (ahead) query.poll(); // before groups are asked for, behind which it would wait
  int fetched = 0;
#pragma unroll 1
  for (; fetched < (ahead ? 2 : EARLY_GROUPS); fetched += 2) fetch_first(fetched);
  int ahead0 = __shfl_sync(~0u, place, STAGES - 2), ahead1 = __shfl_sync(~0u, place, STAGES - 1); // where the next two groups lie

  if (!ahead) wait();
  MARK(1)
  if (!query.published || !take_published(fragments, query, ahead ? PATIENCE : 1)) wait(), take_query(fragments, query.q);
  u32 qr[D / 4];
  const int asks = MERGED ? gid & 3 : gid;
#pragma unroll
  for (int p = 0; p < D / 4; p += 4) {
    const uint4 four = asks < GROUP_HEADS ? fragments.four[p / 4][asks * 4 + tig] : make_uint4(0, 0, 0, 0);
    qr[p] = four.x, qr[p + 1] = four.y, qr[p + 2] = four.z, qr[p + 3] = four.w;
  }
  // Factors of this lane's two heads from products to log2 units.
  const float k0 = power_of_two(fragments.exponents[min(2 * pair, GROUP_HEADS - 1)]) * scale_log2;
  const float k1 = power_of_two(fragments.exponents[min(2 * pair + 1, GROUP_HEADS - 1)]) * scale_log2;
  MARK(2)
  // Behind what is read of the query, which would wait for them.
#pragma unroll 1
  for (; fetched < STAGES - 2; fetched += 2) fetch_first(fetched);
  float ref0 = 0.f, ref1 = 0.f, sum0 = 0.f, sum1 = 0.f, low = 3e38f, high = -3e38f;
  __half* to_scores = scores + (POOL == 0 ? 2 * pair * stride : 0) + (2 * warp + second) * 32 + gid * 4;
  __half *to0 = to_scores, *to1 = to_scores + stride;
  // In registers, or the compiler makes them anew for every use: it knows neither what comes out of a shuffle nor that page_groups has no sign.
  const u32 even = 0x55555555u | (u32)__shfl_sync(~0u, row.page_groups >> 31, lane);
  bits_from = kept(bits_from), meta_from = kept(meta_from);

  auto refill = [&](int j, int at0, int at1) { // groups j and j + 1, even, into the places that the pair before has left
    const u32 to = bits_to + (j & (STAGES - 1)) * STAGE_BYTES;
    if (j < mine) copy_group(j, to, at0);
    if (j + 1 < mine) copy_group(j + 1, to + STAGE_BYTES, at1);
    copies_commit();
  };
  // What lows add to a score before it is scaled: row r = gid of a tile is the group whose lows lie at `at` of lanes r; eight rows more take the
  // second half of every 32 channels, so that a word's lows are read at once.
  auto lows = [&](u32 at, float (&base)[2]) {
    float first[4] = {0.f, 0.f, 0.f, 0.f}, other[4] = {0.f, 0.f, 0.f, 0.f};
    u32 unit[4];
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      shared_units(unit, at + w * 64);
      mma<0>(first, first, unit, qr + 8 * w, 0xddddddddu);
      mma<1>(other, other, unit, qr + 8 * w + 4, 0xddddddddu);
    }
    base[0] = first[0] + other[2], base[1] = first[1] + other[3];
  };
  // Scores of a pair of groups without their lows: rows 0 to 7 of tile v are tokens 4 gid + v of the first, rows 8 to 15 of the second.
  auto product = [&](u32 stage, float (&c)[4][4]) {
    u32 word[2][WORDS], unit[4];
#pragma unroll
    for (int g = 0; g < 2; g++) {
      if (WORDS % 4 == 0) {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
          const uint4 v = shared16(bits_at + stage + g * STAGE_BYTES + w * 4);
          word[g][w] = v.x, word[g][(w + 1) % WORDS] = v.y, word[g][(w + 2) % WORDS] = v.z, word[g][(w + 3) % WORDS] = v.w;
        }
      } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) word[g][w] = shared4(bits_at + stage + g * STAGE_BYTES + w * 4);
      }
    }
#pragma unroll
    for (int v = 0; v < 4; v++) c[v][0] = c[v][1] = c[v][2] = c[v][3] = 0.f;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const u32 lower = __byte_perm(word[0][w], word[1][w], 0x5410), upper = __byte_perm(word[0][w], word[1][w], 0x7632);
      const u32 chosen[4] = {(lower & even) | 0x88888888u, (lower >> 1 & even) | 0x88888888u, (upper & even) | 0x88888888u,
          (upper >> 1 & even) | 0x88888888u};
      shared_units(unit, units_at + stage + w * 64);
#pragma unroll
      for (int v = 0; v < 4; v++) mma<0>(c[v], c[v], unit, qr + 8 * w, chosen[v]);
      shared_units(unit, units_at + stage + w * 64 + 32);
#pragma unroll
      for (int v = 0; v < 4; v++) mma<1>(c[v], c[v], unit, qr + 8 * w + 4, chosen[v]);
    }
  };
#if POOL != 0
#if POOL == 1
#define JOIN(a, b) ((a) + (b))
#else
#define JOIN(a, b) fmaxf(a, b)
#endif
  auto pool = [&](const float (&t0)[4], const float (&t1)[4], float (&out)[2]) { // over the heads: token 4 gid + pair, or 2 pair and 2 pair + 1
    float r[4];
#pragma unroll
    for (int v = 0; v < 4; v++) r[v] = POOL == 1 ? t0[v] + t1[v] : fmaxf(2 * pair < GROUP_HEADS ? t0[v] : -3e38f, 2 * pair + 1 < GROUP_HEADS ? t1[v] : -3e38f);
    const float s0 = __shfl_xor_sync(~0u, (pair & 1) ? r[0] : r[MERGED ? 2 : 1], 1), s1 = __shfl_xor_sync(~0u, (pair & 1) ? r[MERGED ? 1 : 2] : r[3], 1);
    float m0 = JOIN((pair & 1) ? r[MERGED ? 2 : 1] : r[0], s0), m1 = JOIN((pair & 1) ? r[3] : r[MERGED ? 1 : 2], s1);
    if (!MERGED) m0 = JOIN((pair & 2) ? m1 : m0, __shfl_xor_sync(~0u, (pair & 2) ? m0 : m1, 2));
    out[0] = POOL == 1 ? m0 * (1.f / GROUP_HEADS) : m0, out[1] = POOL == 1 ? m1 * (1.f / GROUP_HEADS) : m1;
  };
#endif
  auto keep = [&](float (&t0)[4], float (&t1)[4], const float (&pooled)[2], __half* at0, __half* at1) { // scores of a group that exists
#if POOL != 0
    if (MERGED) *reinterpret_cast<u32*>(at0 + 2 * pair) = pack_halves(pooled[0], pooled[1]), low = fminf(low, pooled[1]), high = fmaxf(high, pooled[1]);
    else at0[pair] = __float2half_rn(pooled[0]);
    low = fminf(low, pooled[0]), high = fmaxf(high, pooled[0]);
#else
    if (2 * pair < GROUP_HEADS) put8(at0, pack_halves(t0[0], t0[1]), pack_halves(t0[2], t0[3]), stays);
    if (2 * pair + 1 < GROUP_HEADS) put8(at1, pack_halves(t1[0], t1[1]), pack_halves(t1[2], t1[3]), stays);
    if (GROUP_HEADS == 1) {
      high = fmaxf(high, fmaxf(fmaxf(t0[0], t0[1]), fmaxf(t0[2], t0[3]))), low = fminf(low, fminf(fminf(t0[0], t0[1]), fminf(t0[2], t0[3])));
    } else {
      sum0 += (exp2_fast(t0[0]) + exp2_fast(t0[1])) + (exp2_fast(t0[2]) + exp2_fast(t0[3]));
      sum1 += (exp2_fast(t1[0]) + exp2_fast(t1[1])) + (exp2_fast(t1[2]) + exp2_fast(t1[3]));
    }
#endif
  };


  // What is added to the products of a pair: lows of the rows `from` and `from` + 1 of `base`, scaled, minus the references of POOL 0.
  auto addends = [&](const float (&base)[2], int from, float (&plus)[PAIRED][2]) {
    const float mine0 = base[0] * k0 - (POOL == 0 ? ref0 : 0.f), mine1 = base[1] * k1 - (POOL == 0 ? ref1 : 0.f);
#pragma unroll
    for (int g = 0; g < PAIRED; g++) {
      plus[g][0] = __shfl_sync(~0u, mine0, (from + second + g) * 4 + tig), plus[g][1] = __shfl_sync(~0u, mine1, (from + second + g) * 4 + tig);
    }
  };
  auto scaled = [&](const float (&c)[4][4], const float (&plus)[PAIRED][2], int g, float (&t)[2][4], float (&pooled)[2]) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
      t[0][v] = (MERGED && second ? c[v][2] : c[v][2 * g]) * k0 + plus[g][0];
      t[1][v] = (MERGED && second ? c[v][3] : c[v][2 * g + 1]) * k1 + plus[g][1];
    }
#if POOL != 0
    pool(t[0], t[1], pooled);
    pooled[0] -= ref0, pooled[1] -= ref0;
#endif
  };
  auto finish = [&](const float (&c)[4][4], const float (&plus)[PAIRED][2], int behind, int exist) { // exist: groups of the pair, from this lane's on
#pragma unroll
    for (int g = 0; g < PAIRED; g++) {
      float t[2][4], pooled[2] = {};
      scaled(c, plus, g, t, pooled);
      if (g < exist) keep(t[0], t[1], pooled, to0 + behind * WARPS * 32 + g * 32, to1 + behind * WARPS * 32 + g * 32);
    }
  };
  // The block agrees on a reference: the maximum of every warp's first groups.
  auto refer = [&](const float (&c)[4][4], const float (&plus)[PAIRED][2]) {
    float m0 = -3e38f, m1 = -3e38f;
#pragma unroll
    for (int g = 0; g < PAIRED; g++) {
      float t[2][4], pooled[2] = {};
      scaled(c, plus, g, t, pooled);
      if (second + g < mine) {
#if POOL != 0
        m0 = fmaxf(m0, MERGED ? fmaxf(pooled[0], pooled[1]) : pooled[0]);
#else
#pragma unroll
        for (int v = 0; v < 4; v++) m0 = fmaxf(m0, t[0][v]), m1 = fmaxf(m1, t[1][v]);
#endif
      }
    }
#if POOL != 0
    m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, 1)), m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, 2)), m1 = m0;
#else
    if (MERGED) m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, 2)), m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, 2));
#endif
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, o)), m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, o));
    if (gid == 0 && second == 0) shared_ref[warp][2 * pair] = m0, shared_ref[warp][2 * pair + 1] = m1;
    __syncthreads();
    ref0 = shared_ref[0][2 * pair], ref1 = shared_ref[0][2 * pair + 1];
#pragma unroll
    for (int w = 1; w < WARPS; w++) ref0 = fmaxf(ref0, shared_ref[w][2 * pair]), ref1 = fmaxf(ref1, shared_ref[w][2 * pair + 1]);
  };

  // Products of a pair wait in c until those of the next one are under way: a warp has few others beside it on its scheduler.
  auto lows_of = [&](int j) { // where this lane's row of a tile begins, whose group is the j-th
    const int chunk = (lane >> 3 & 1) * 2 + (lane >> 4) ^ (j & 3);
    return ring + BIT_BYTES + (j & (STAGES - 1)) * STAGE_BYTES + chunk * 16;
  };
  float c[4][4], plus[PAIRED][2], base[2];
  for (int j = 0;;) { // in every warp, because the first round has a barrier
    const int next = j + STAGES - 2;
    refill(next, ahead0, ahead1);
    if (((next + 2) & 31) == 0) place = row.place(next + 2 + lane);
    ahead0 = __shfl_sync(~0u, place, (next + 2) & 31), ahead1 = __shfl_sync(~0u, place, (next + 3) & 31);
    copies_wait<STAGES / 2 - 1>();
    __syncwarp();
    if (j == 0) { MARK(3) }
    lows(lows_of(j + (lane & 1)), base);
    product((j & (STAGES - 1)) * STAGE_BYTES, c);
    addends(base, 0, plus);
    if (j == 0) refer(c, plus), addends(base, 0, plus);
    __syncwarp(); // the next round overwrites these places
    j += 2;
#if STAGES >= 8
    u32 four_at = lows_of(j + (lane & 3));
    const u32 both_at = four_at + lows_of(j + 4 + (lane & 3));
#pragma unroll 1
    for (; j + 4 <= mine; j += 4) { // j is two more than a multiple of four
      const u32 stage0 = (j & (STAGES - 1)) * STAGE_BYTES, stage1 = (j + 2 & (STAGES - 1)) * STAGE_BYTES;
      const int ahead2 = __shfl_sync(~0u, place, (j + STAGES) & 31), ahead3 = __shfl_sync(~0u, place, (j + STAGES + 1) & 31);
      if (((j + STAGES + 2) & 31) == 0) place = row.place(j + STAGES + 2 + lane);
      refill(j + STAGES - 2, ahead0, ahead1);
      copies_wait<STAGES / 2 - 2>();
      __syncwarp();
      float d[4][4], more[PAIRED][2];
      lows(four_at, base);
      finish(c, plus, 0, 2);
      product(stage0, d);
      addends(base, 0, more);
      __syncwarp();
      refill(j + STAGES, ahead2, ahead3);
      finish(d, more, 2, 2);
      product(stage1, c);
      addends(base, 2, plus);
      __syncwarp();
      ahead0 = __shfl_sync(~0u, place, (j + STAGES + 2) & 31), ahead1 = __shfl_sync(~0u, place, (j + STAGES + 3) & 31);
      four_at = both_at - four_at; // half a ring on
      to0 += 4 * WARPS * 32, to1 += 4 * WARPS * 32;
    }
#endif
    finish(c, plus, 0, mine - (j - 2) - second);
    if (j >= mine) break;
    to0 += 2 * WARPS * 32, to1 += 2 * WARPS * 32;
  }
  MARK(4)
  wait();
  copies_wait<0>();
  if (POOL != 0 || GROUP_HEADS == 1) {
    high += ref0, low += ref0;
    if (POOL == 0 && pair != 0) high = -3e38f, low = 3e38f; // only lanes with pair 0 hold head 0
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o)), low = fminf(low, __shfl_xor_sync(~0u, low, o));
    if (lane == 0) shared_sum[warp][0] = make_float2(high, low);
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int w = 1; w < WARPS; w++) high = fmaxf(high, shared_sum[w][0].x), low = fminf(low, shared_sum[w][0].y);
      tell(0, begin < end ? make_float4(ref0, high, low, 0.f) : make_float4(-3e38f, -3e38f, 3e38f, 0.f));
    }
    return;
  }
  // The first groups' maximum is a good reference unless a later score is 2^120 times heavier: then the sums are taken again.
  float shift0 = 0.f, shift1 = 0.f;
  auto again = [&](float& sum, float& shift, const __half* from) {
#pragma unroll 1
    for (int j = 0; j + second < mine; j += 1 + MERGED) {
      for (int v = 0; v < 4; v++) shift = fmaxf(shift, __half2float(from[(j >> 1) * (2 * WARPS * 32) + (j & 1) * 32 + v]));
    }
    sum = 0.f;
#pragma unroll 1
    for (int j = 0; j + second < mine; j += 1 + MERGED) {
      for (int v = 0; v < 4; v++) sum += exp2_fast(__half2float(from[(j >> 1) * (2 * WARPS * 32) + (j & 1) * 32 + v]) - shift);
    }
  };
  if (2 * pair < GROUP_HEADS && !(sum0 < 1e36f)) again(sum0, shift0, to_scores);
  if (2 * pair + 1 < GROUP_HEADS && !(sum1 < 1e36f)) again(sum1, shift1, to_scores + stride);
#pragma unroll
  for (int o = MERGED ? 2 : 4; o < 32; o <<= 1) {
    const float other0 = __shfl_xor_sync(~0u, shift0, o), other1 = __shfl_xor_sync(~0u, shift1, o);
    const float more0 = __shfl_xor_sync(~0u, sum0, o), more1 = __shfl_xor_sync(~0u, sum1, o);
    const float top0 = fmaxf(shift0, other0), top1 = fmaxf(shift1, other1);
    sum0 = sum0 * exp2_fast(shift0 - top0) + more0 * exp2_fast(other0 - top0), shift0 = top0;
    sum1 = sum1 * exp2_fast(shift1 - top1) + more1 * exp2_fast(other1 - top1), shift1 = top1;
  }
  if (gid == 0 && second == 0) shared_sum[warp][2 * pair] = make_float2(shift0, sum0), shared_sum[warp][2 * pair + 1] = make_float2(shift1, sum1);
  __syncthreads();
  if (threadIdx.x < GROUP_HEADS) {
    float top = -3e38f, total = 0.f, ref = -3e38f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, shared_sum[w][threadIdx.x].x), ref = fmaxf(ref, shared_ref[w][threadIdx.x]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += shared_sum[w][threadIdx.x].y * exp2_fast(shared_sum[w][threadIdx.x].x - top);
    tell(threadIdx.x, make_float4(ref, begin < end ? ref + top + log2f(total) : -3e38f, 0.f, 0.f));
    MARK(5)
  }
}

// The scoring warps of fier_stream.cu: they go through all lines of their team's rows without a pause, each for itself.
//
// Built as fier_groups.cuh says, whose products these are. A block has every T-th group of a row, a pair of groups lies beside each other, and a warp
// takes every SCORERS-th pair. Its ring already holds groups of the next line while it scores this one. Every warp has a reference of its own.
#pragma once
#include "fier_groups.cuh"
#include "gates.cuh"

#define MOST_LINES 64

struct Line { // of a team's rows, one that is not read whole
  int sequence, head, count, stored; // count: groups of this block
  int first, last, wanted, row;
};
struct Stream { // shared memory
  __align__(16) Line lines[MOST_LINES];
  __align__(16) uint4 fragments[2][D * 2];
  float refs[BUFFERS][SCORERS][8], sums[BUFFERS][SCORERS][8]; // of a warp and head: reference, and the sum of exponentials
  int exponents[2][8];
  __align__(8) u64 asked[2], full[BUFFERS], empty[BUFFERS];
  int live;
};
struct Index {
  const char *bits, *meta; // the pool of one layer: BIT_BYTES and META_BYTES a group, [P, Hk, N / 32] groups
  const int* table;
  int table_stride, heads, page_groups, rank, blocks;
};

// Exponentials keep eight bits, so that pooling takes nothing but products; that is as much as fp16 scores leave of them.
__device__ __forceinline__ u32 pack_weights(float x, float y) {
  __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<u32*>(&two);
}

// buffers [BUFFERS, GROUP_HEADS, stride] bf16: exponentials of scores minus the warp's reference.
__device__ __forceinline__ void score_lines(Stream& s, const Index& index, char* memory, u16* buffers, int stride, float scale_log2) {
  static_assert(POOL == 0 && GROUP_HEADS > 1, "scores of every head are kept");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int pair = MERGED ? tig & 1 : tig, second = MERGED ? tig >> 1 : 0; // this lane's heads 2 pair and 2 pair + 1; merged: of which group
  const u64 policy = read_once_policy();
  const int live = s.live;
  constexpr u32 ROUND = 2 * STAGE_BYTES, RING_END = STAGES * STAGE_BYTES;

  // Which warp of a line this one is changes with the line, since they do not all have equally many pairs.
  auto own_of = [&](int i) { return (warp + i) & (SCORERS - 1); };
  auto pairs_of = [&](int i) { return max(0, (((s.lines[i].count + 1) >> 1) - own_of(i) + SCORERS - 1) / SCORERS); };
  auto next_of = [&](int i) { // the next line of which this warp has anything
    do i++;
    while (i < live && pairs_of(i) == 0);
    return i;
  };
  // Lane l: where the l-th group of this warp's in a line lies, -1: it has fewer.
  auto locate = [&](int i) {
    if (i >= live) return -1;
    const Line& line = s.lines[i];
    const int k = 2 * (own_of(i) + SCORERS * (lane >> 1)) + (lane & 1);
    if (k >= line.count) return -1;
    const u32 g = index.rank + k * index.blocks, page = g / (u32)index.page_groups;
    return (int)((index.table[(long long)line.sequence * index.table_stride + page] * index.heads + line.head) * index.page_groups + g - page * index.page_groups);
  };
  int line_ahead = next_of(-1), pair_ahead = 0, pairs_ahead = line_ahead < live ? pairs_of(line_ahead) : 0;
  int place = locate(line_ahead), line_then = next_of(line_ahead), place_then = locate(line_then);

  const u32 ring = shared_at(memory) + warp * RING_END;
  const u32 bits_at = ring + lane * WORDS * 4;            // this lane's words and ranges in the first stage
  const u32 units_at = ring + BIT_BYTES + (lane >> 3 & 1) * STAGE_BYTES + (lane >> 4) * 16; // lows; ranges 2 D behind
  const u32 bits_to = ring + lane * 16, meta_to = ring + BIT_BYTES + lane * 16;
  const char *bits_from = index.bits + lane * 16, *meta_from = index.meta + lane * 16;
  auto fetch = [&](u32 stage, long long at) {
    if (at >= 0) {
#pragma unroll
      for (int c = 0; c < BIT_BYTES / 16; c += 32) {
        if (BIT_BYTES / 16 - c >= 32 || lane < BIT_BYTES / 16 - c) copy16_once(bits_to + stage + c * 16, bits_from + at * BIT_BYTES + c * 16, policy);
      }
#pragma unroll
      for (int c = 0; c < META_BYTES / 16; c += 32) {
        if (META_BYTES / 16 - c >= 32 || lane < META_BYTES / 16 - c) copy16_once(meta_to + stage + c * 16, meta_from + at * META_BYTES + c * 16, policy);
      }
    }
  };
  int ahead0 = __shfl_sync(~0u, place, 0), ahead1 = __shfl_sync(~0u, place, 1); // where the next two groups lie
  auto fetch_pair = [&](u32 stage) {
    fetch(stage, ahead0), fetch(stage + STAGE_BYTES, ahead1);
    copies_commit();
    if (++pair_ahead >= pairs_ahead) { // of the next line: its pages were asked for when this one began
      line_ahead = line_then, pair_ahead = 0, place = place_then;
      pairs_ahead = line_ahead < live ? pairs_of(line_ahead) : 0;
      line_then = next_of(line_ahead), place_then = locate(line_then);
    }
    ahead0 = __shfl_sync(~0u, place, 2 * pair_ahead & 31), ahead1 = __shfl_sync(~0u, place, (2 * pair_ahead & 31) + 1);
  };
  // Groups that are older than the newest token were there before the kernel before this one began: they are fetched before the wait.
  const int newest = line_ahead < live ? (s.lines[line_ahead].stored - 1) >> 5 : 0;
  const bool settled = line_ahead >= live || (pairs_ahead >= STAGES / 2 - 1 &&
      index.rank + (2 * (own_of(line_ahead) + SCORERS * (STAGES / 2 - 2)) + 1) * index.blocks < newest);
  if (!settled) dependency_wait();
#pragma unroll 1
  for (u32 stage = 0; stage < RING_END - ROUND; stage += ROUND) fetch_pair(stage);
  if (settled) dependency_wait();

  u32 qr[D / 4], stage = 0, behind = RING_END - ROUND;
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
    float base[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      shared_units(unit, units_at + stage + w * 64);
      mma<0>(base, base, unit, qr + 8 * w, 0xddddddddu);
      shared_units(unit, units_at + stage + w * 64 + 32);
      mma<1>(base, base, unit, qr + 8 * w + 4, 0xddddddddu);
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const u32 lower = __byte_perm(word[0][w], word[1][w], 0x5410), upper = __byte_perm(word[0][w], word[1][w], 0x7632);
      const u32 chosen[4] = {(lower & 0x55555555u) | 0x88888888u, (lower >> 1 & 0x55555555u) | 0x88888888u, (upper & 0x55555555u) | 0x88888888u,
          (upper >> 1 & 0x55555555u) | 0x88888888u};
      shared_units(unit, units_at + stage + 2 * D + w * 64);
#pragma unroll
      for (int v = 0; v < 4; v++) mma<0>(c[v], w == 0 ? base : c[v], unit, qr + 8 * w, chosen[v]);
      shared_units(unit, units_at + stage + 2 * D + w * 64 + 32);
#pragma unroll
      for (int v = 0; v < 4; v++) mma<1>(c[v], c[v], unit, qr + 8 * w + 4, chosen[v]);
    }
  };

#pragma unroll 1
  for (int i = 0; i < live; i++) {
    const int buffer = i % BUFFERS, own = own_of(i), mine = pairs_of(i), count = s.lines[i].count;
    u16* const to_scores = buffers + (buffer * GROUP_HEADS + 2 * pair) * stride + (2 * own + second) * 32 + gid * 4;
    u16 *to0 = to_scores, *to1 = to_scores + stride;
    gate_await(&s.asked[i & 1], i >> 1 & 1);
#pragma unroll
    for (int p = 0; p < D / 4; p += 4) {
      const uint4 four = s.fragments[i & 1][p * 8 + lane];
      qr[p] = four.x, qr[p + 1] = four.y, qr[p + 2] = four.z, qr[p + 3] = four.w;
    }
    // Factors of this lane's two heads from products to log2 units.
    const float k0 = __uint_as_float((u32)(127 + s.exponents[i & 1][2 * pair]) << 23) * scale_log2;
    const float k1 = __uint_as_float((u32)(127 + s.exponents[i & 1][2 * pair + 1]) << 23) * scale_log2;
    if (i >= BUFFERS) gate_await(&s.empty[buffer], i / BUFFERS - 1 & 1);
    float ref0 = 0.f, ref1 = 0.f, sum0 = 0.f, sum1 = 0.f, top0 = -3e38f, top1 = -3e38f;
    auto highest_of = [&](float& m) {
#pragma unroll
      for (int o = MERGED ? 2 : 4; o < 32; o <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    };
    // Turn 0 takes the maximum of the first groups for reference. Should a later score be 2^100 times heavier, turn 1 looks for the highest of all, and
    // turn 2 scores once more.
    int turn = 0, again = -1; // where groups lie that are scored again
#pragma unroll 1
    for (int j = 0; j < mine; j++) {
      const int left = count - 2 * (own + SCORERS * j); // one, or more
      if (turn == 0) {
        fetch_pair(behind); // into the places that the round before has read
        copies_wait<STAGES / 2 - 1>();
      } else {
        fetch(behind, __shfl_sync(~0u, again, 2 * j)), fetch(behind + STAGE_BYTES, __shfl_sync(~0u, again, 2 * j + 1));
        copies_commit();
        copies_wait<0>();
      }
      __syncwarp();
      float c[4][4];
      product(turn == 0 ? stage : behind, c);
      __syncwarp(); // the next round overwrites these places
      if (turn == 0) behind = stage, stage = stage + ROUND == RING_END ? 0 : stage + ROUND;
      float t[MERGED ? 1 : 2][2][4];
#pragma unroll
      for (int g = 0; g < (MERGED ? 1 : 2); g++) {
#pragma unroll
        for (int v = 0; v < 4; v++) {
          t[g][0][v] = (MERGED && second ? c[v][2] : c[v][2 * g]) * k0 - ref0;
          t[g][1][v] = (MERGED && second ? c[v][3] : c[v][2 * g + 1]) * k1 - ref1;
        }
      }
      if ((turn == 0 && j == 0) || turn == 1) {
#pragma unroll
        for (int g = 0; g < (MERGED ? 1 : 2); g++) {
          if (second + g < left) {
#pragma unroll
            for (int v = 0; v < 4; v++) top0 = fmaxf(top0, t[g][0][v]), top1 = fmaxf(top1, t[g][1][v]);
          }
        }
        if (turn == 1) {
          if (j == mine - 1) highest_of(top0), highest_of(top1), ref0 = top0, ref1 = top1, sum0 = sum1 = 0.f, turn = 2, j = -1, to0 = to_scores, to1 = to0 + stride;
          continue;
        }
        highest_of(top0), highest_of(top1);
        ref0 = top0, ref1 = top1;
#pragma unroll
        for (int g = 0; g < (MERGED ? 1 : 2); g++) {
#pragma unroll
          for (int v = 0; v < 4; v++) t[g][0][v] -= ref0, t[g][1][v] -= ref1;
        }
      }
#pragma unroll
      for (int g = 0; g < (MERGED ? 1 : 2); g++) {
        if (second + g >= left) continue;
        float e[2][4];
#pragma unroll
        for (int v = 0; v < 4; v++) e[0][v] = exp2_fast(t[g][0][v]), e[1][v] = exp2_fast(t[g][1][v]);
        if (2 * pair < GROUP_HEADS) *reinterpret_cast<uint2*>(to0 + g * 32) = make_uint2(pack_weights(e[0][0], e[0][1]), pack_weights(e[0][2], e[0][3]));
        if (2 * pair + 1 < GROUP_HEADS) *reinterpret_cast<uint2*>(to1 + g * 32) = make_uint2(pack_weights(e[1][0], e[1][1]), pack_weights(e[1][2], e[1][3]));
        sum0 += (e[0][0] + e[0][1]) + (e[0][2] + e[0][3]), sum1 += (e[1][0] + e[1][1]) + (e[1][2] + e[1][3]);
      }
      to0 += 2 * SCORERS * 32, to1 += 2 * SCORERS * 32;
      if (turn == 0 && j == mine - 1 && __any_sync(~0u, !(sum0 < 1e30f) || !(sum1 < 1e30f))) {
        turn = 1, j = -1, again = locate(i), ref0 = ref1 = 0.f, top0 = top1 = -3e38f;
      }
    }
#pragma unroll
    for (int o = MERGED ? 2 : 4; o < 32; o <<= 1) sum0 += __shfl_xor_sync(~0u, sum0, o), sum1 += __shfl_xor_sync(~0u, sum1, o);
    if (gid == 0 && second == 0) {
      s.refs[buffer][own][2 * pair] = mine ? ref0 : -3e38f, s.refs[buffer][own][2 * pair + 1] = mine ? ref1 : -3e38f;
      s.sums[buffer][own][2 * pair] = sum0, s.sums[buffer][own][2 * pair + 1] = sum1;
    }
    __syncwarp();
    if (lane == 0) gate_arrive(&s.full[buffer]);
  }
  copies_wait<0>();
}

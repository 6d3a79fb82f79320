// Scores of FIER's one-bit keys for fused.cu, on tensor cores.
#pragma once
#include "fused_block.cuh"

// Bits of a group are D words as fier.cu explains: one shift a word and one AND a register make the A operand of the products.
__device__ __forceinline__ void products(const char* slot0, const char* slot1, const u32 (&qr)[PAIRS], float (&c)[4][4]) {
  const int lane = threadIdx.x & 31, tig = lane & 3;
  u32 word0[WORDS], word1[WORDS];
  if (WORDS % 4 == 0) {
#pragma unroll
    for (int w = 0; w < WORDS; w += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(slot0 + (lane * WORDS + w) * 4);
      const uint4 x = *reinterpret_cast<const uint4*>(slot1 + (lane * WORDS + w) * 4);
      word0[w] = v.x, word0[(w + 1) % WORDS] = v.y, word0[(w + 2) % WORDS] = v.z, word0[(w + 3) % WORDS] = v.w;
      word1[w] = x.x, word1[(w + 1) % WORDS] = x.y, word1[(w + 2) % WORDS] = x.z, word1[(w + 3) % WORDS] = x.w;
    }
  } else {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      word0[w] = *reinterpret_cast<const u32*>(slot0 + (lane * WORDS + w) * 4);
      word1[w] = *reinterpret_cast<const u32*>(slot1 + (lane * WORDS + w) * 4);
    }
  }
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    const uint4 r = *reinterpret_cast<const uint4*>(slot0 + BIT_BYTES + w * 64 + tig * 16);
    const uint4 s = *reinterpret_cast<const uint4*>(slot1 + BIT_BYTES + w * 64 + tig * 16);
    const u32 x = word0[w], y = x >> 8, z = word1[w], t = z >> 8;
    const u32 m = 0x00010001u, n = 0x00100010u; // rows 1 and 3 of the four come out sixteen times too large
    u32 b0 = mul2(qr[4 * w], r.x), b1 = mul2(qr[4 * w + 1], r.y), d0 = mul2(qr[4 * w], s.x), d1 = mul2(qr[4 * w + 1], s.y);
    mma(c[0], x & m, x & n, x & (m << 1), x & (n << 1), b0, b1);
    mma(c[1], y & m, y & n, y & (m << 1), y & (n << 1), b0, b1);
    mma(c[2], z & m, z & n, z & (m << 1), z & (n << 1), d0, d1);
    mma(c[3], t & m, t & n, t & (m << 1), t & (n << 1), d0, d1);
    b0 = mul2(qr[4 * w + 2], r.z), b1 = mul2(qr[4 * w + 3], r.w), d0 = mul2(qr[4 * w + 2], s.z), d1 = mul2(qr[4 * w + 3], s.w);
    mma(c[0], x & (m << 2), x & (n << 2), x & (m << 3), x & (n << 3), b0, b1);
    mma(c[1], y & (m << 2), y & (n << 2), y & (m << 3), y & (n << 3), b0, b1);
    mma(c[2], z & (m << 2), z & (n << 2), z & (m << 3), z & (n << 3), d0, d1);
    mma(c[3], t & (m << 2), t & (n << 2), t & (m << 3), t & (n << 3), d0, d1);
  }
}
#if RAW && GROUP_HEADS > 1
// Pool four tokens over the heads: lane tig keeps token 4 gid + tig.
__device__ __forceinline__ float pool_heads(const float (&t0)[4], const float (&t1)[4]) {
  const int tig = threadIdx.x & 3;
  float r[4];
#pragma unroll
  for (int v = 0; v < 4; v++) {
    r[v] = POOL == 1 ? t0[v] + t1[v] : fmaxf(2 * tig < GROUP_HEADS ? t0[v] : -3e38f, 2 * tig + 1 < GROUP_HEADS ? t1[v] : -3e38f);
  }
  const float s0 = __shfl_xor_sync(~0u, (tig & 1) ? r[0] : r[1], 1), s1 = __shfl_xor_sync(~0u, (tig & 1) ? r[2] : r[3], 1);
  const float m0 = JOIN((tig & 1) ? r[1] : r[0], s0), m1 = JOIN((tig & 1) ? r[3] : r[2], s1);
  const float t = JOIN((tig & 2) ? m1 : m0, __shfl_xor_sync(~0u, (tig & 2) ? m0 : m1, 2));
  return POOL == 1 ? t * (1.f / GROUP_HEADS) : t;
}
#endif
// The query, normalized by a power of two and multiplied by 2^(3 - i) for the bits' places; k0 and k1 lead back, for this lane's two heads.
__device__ __forceinline__ void load_query(const qtype* q, float scale_log2, u32 (&qr)[PAIRS], float& k0, float& k1) {
  const int lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  float x[2 * PAIRS], top = 0.f;
  const qtype* from = q + gid * D + tig * 8;
#pragma unroll
  for (int c = 0; c < WORDS; c++) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (gid < GROUP_HEADS) v = *reinterpret_cast<const uint4*>(from + c * 32);
    const qtype* e = reinterpret_cast<const qtype*>(&v);
#pragma unroll
    for (int k = 0; k < 8; k++) x[c * 8 + k] = to_float(e[k]);
  }
#pragma unroll
  for (int k = 0; k < 2 * PAIRS; k++) top = fmaxf(top, fabsf(x[k]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const int exponent = min(max((int)(__float_as_uint(top) >> 23) - 127 + 2, -100), 100); // top / 2^exponent lies in [1/4, 1/2)
  const float down = __uint_as_float((u32)(127 - exponent) << 23);
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const float f = down * (float)(8 >> (p & 3));
    qr[p] = pack_half(x[2 * p] * f, x[2 * p + 1] * f);
  }
  const float up = __uint_as_float((u32)(127 + exponent) << 23) * scale_log2;
  k0 = __shfl_sync(~0u, up, (2 * tig) * 4);
  k1 = __shfl_sync(~0u, up, (2 * tig + 1) * 4);
}
// Lows of sixteen groups of the warp, one a row of a product; place is what the lanes know of its groups.
struct Lows {
  uint4 v[WORDS], w[WORDS];
  __device__ __forceinline__ void load(const char* meta, int place, int j, int from, int to, bool fresh) {
    const int lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
    const long long at0 = __shfl_sync(~0u, place, (j + gid) & 31), at1 = __shfl_sync(~0u, place, (j + 8 + gid) & 31);
#pragma unroll
    for (int c = 0; c < WORDS; c++) {
      if (fresh) v[c] = w[c] = make_uint4(0, 0, 0, 0);
      if (j + gid >= from && j + gid < to) v[c] = load16(meta + at0 * META_BYTES + tig * 16 + c * 64);
      if (j + 8 + gid >= from && j + 8 + gid < to) w[c] = load16(meta + at1 * META_BYTES + tig * 16 + c * 64);
    }
  }
  __device__ __forceinline__ void multiply(const u32 (&qr)[PAIRS], float (&base)[4]) const {
    float c[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
    const u32 f0 = 0x30003000u, f1 = 0x34003400u, f2 = 0x38003800u; // 1/8, 1/4, 1/2
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      mma(c[0], mul2(v[i].x, f0), mul2(w[i].x, f0), mul2(v[i].y, f1), mul2(w[i].y, f1), qr[4 * i], qr[4 * i + 1]);
      mma(c[1], mul2(v[i].z, f2), mul2(w[i].z, f2), v[i].w, w[i].w, qr[4 * i + 2], qr[4 * i + 3]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) base[k] = c[0][k] + c[1][k];
  }
};
// Score the block's groups: warp w takes groups begin + w, + WARPS, ... Writes exponentials [G, stride] bf16, or keys of pooled scores; false where
// the length was another one behind the wait.
__device__ __forceinline__ bool score(const Row& row, const qtype* q, const char* bits, const char* meta, char* ring, char* values, int stride,
                                      float scale_log2) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int begin = (row.begin >> 5) + warp, end = min(row.begin + row.units, row.usable) >> 5;
  const int mine = begin < end ? (end - begin + WARPS - 1) / WARPS : 0; // groups begin, begin + WARPS, ...
  const int settled = (row.stored - 1) >> 5;                            // groups that the step before had closed already
  const int early = min(mine, settled > begin ? (settled - begin + WARPS - 1) / WARPS : 0);
  int place = 0; // lane l knows where the l-th group lies; refreshed every 32 groups
  auto locate = [&](int from) {
    const int j = from + lane;
    if (j < mine) {
      const int g = begin + j * WARPS, page = g / row.per_page;
      place = (load_fresh(row.table + page) * row.heads + row.head) * row.per_page + g - page * row.per_page;
      row.places[j * WARPS + warp] = place;
    }
  };
  char* slots = ring + warp * SLOTS * SLOT_BYTES;
  const u32 slots_at = (u32)__cvta_generic_to_shared(slots);
  auto fetch = [&](int j, int from, int to) { // groups j and j + 1 as far as they lie in [from, to)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const long long at = __shfl_sync(~0u, place, (j + k) & 31);
      if (j + k >= from && j + k < to) {
        const u32 slot = slots_at + ((j + k) & (SLOTS - 1)) * SLOT_BYTES;
#pragma unroll
        for (int c = 0; c < SLOT_BYTES / 16; c += 32) { // bits, then ranges
          const int piece = (c + lane) * 16;
          const char* source = piece < BIT_BYTES ? bits + at * BIT_BYTES + piece : meta + at * META_BYTES + 2 * D - BIT_BYTES + piece;
          if (piece < SLOT_BYTES) copy16(slot + piece, source);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  locate(0);
  for (int j = 0; j < SLOTS; j += 2) fetch(j, 0, early);
  Lows lows;
  lows.load(meta, place, 0, 0, early, true);
  MARK(1)
  dependency_wait();
  MARK(2)
  const int length = load_fresh(row.length);
  const bool late = early < min(SLOTS, mine);
  if (late) fetch(early & ~1, early, mine); // at most one group closes in a step
  if (early < min(16, mine)) lows.load(meta, place, 0, early, mine, false);
  u32 qr[PAIRS];
  float k0, k1; // from unscaled products to log2 units
  load_query(q, scale_log2, qr, k0, k1);
  MARK(3)
  if (!unchanged(row, length)) return false;
  const float bit0 = k0 * 2097152.f, bit1 = k1 * 2097152.f; // 2^21 undoes 2^(i - 24) 2^(3 - i)
  const float odd0 = bit0 * 0.0625f, odd1 = bit1 * 0.0625f;
  float ref0 = 0.f, ref1 = 0.f, sum0 = 0.f, sum1 = 0.f;
  [[maybe_unused]] float low = 3e38f, high = -3e38f;
  float base[4] = {0.f, 0.f, 0.f, 0.f};
  bool measured = false; // a pass that only looks for the largest scores: where exponentials left the range
  for (bool repeat = false;; repeat = true) {
    if (repeat) {
      locate(0);
      for (int j = 0; j < SLOTS; j += 2) fetch(j, 0, mine);
      lows.load(meta, place, 0, 0, mine, true);
    }
    float top0 = -3e38f, top1 = -3e38f;
    sum0 = sum1 = 0.f;
    for (int j = 0; j < mine; j += 2) { // groups j and j + 1 of this warp
      if ((j & 15) == 0) {
        if (j > 0) lows.load(meta, place, j, 0, mine, true);
        lows.multiply(qr, base);
      }
      const int from = ((j & 7) << 2) | tig; // rows j and j + 1 of the product are in the same half
      const float e0 = (j & 8) ? base[2] : base[0], e1 = (j & 8) ? base[3] : base[1];
      const float a0 = __shfl_sync(~0u, e0, from) * k0 - ref0, a1 = __shfl_sync(~0u, e1, from) * k1 - ref1;
      const float b0 = __shfl_sync(~0u, e0, from + 4) * k0 - ref0, b1 = __shfl_sync(~0u, e1, from + 4) * k1 - ref1;
      const bool two = j + 1 < mine;
      float c[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
      if (late && !repeat && j == 0) asm volatile("cp.async.wait_all;" ::: "memory");
      asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS / 2 - 1) : "memory");
      __syncwarp();
      products(slots + (j & (SLOTS - 1)) * SLOT_BYTES, slots + ((j + 1) & (SLOTS - 1)) * SLOT_BYTES, qr, c);
      __syncwarp(); // the slots are free
      const int next = j + SLOTS;
      if ((next & 31) == 0) locate(next);
      fetch(next, 0, mine);
      float t0[4] = {c[0][0] * bit0 + a0, c[0][2] * odd0 + a0, c[1][0] * bit0 + a0, c[1][2] * odd0 + a0};
      float t1[4] = {c[0][1] * bit1 + a1, c[0][3] * odd1 + a1, c[1][1] * bit1 + a1, c[1][3] * odd1 + a1};
      float u0[4] = {c[2][0] * bit0 + b0, c[2][2] * odd0 + b0, c[3][0] * bit0 + b0, c[3][2] * odd0 + b0};
      float u1[4] = {c[2][1] * bit1 + b1, c[2][3] * odd1 + b1, c[3][1] * bit1 + b1, c[3][3] * odd1 + b1};
      const int token = (j * WARPS + warp) * 32 + gid * 4; // in the share; that of the second group lies WARPS groups behind
#if RAW
      u32* keys = reinterpret_cast<u32*>(values);
#if GROUP_HEADS > 1
      const float p = pool_heads(t0, t1), r = pool_heads(u0, u1);
      keys[token + tig] = ordered(p), low = fminf(low, p), high = fmaxf(high, p);
      if (two) keys[token + WARPS * 32 + tig] = ordered(r), low = fminf(low, r), high = fmaxf(high, r);
#else
      if (tig == 0) {
        *reinterpret_cast<uint4*>(keys + token) = make_uint4(ordered(t0[0]), ordered(t0[1]), ordered(t0[2]), ordered(t0[3]));
        low = fminf(low, fminf(fminf(t0[0], t0[1]), fminf(t0[2], t0[3]))), high = fmaxf(high, fmaxf(fmaxf(t0[0], t0[1]), fmaxf(t0[2], t0[3])));
      }
      if (tig == 0 && two) {
        *reinterpret_cast<uint4*>(keys + token + WARPS * 32) = make_uint4(ordered(u0[0]), ordered(u0[1]), ordered(u0[2]), ordered(u0[3]));
        low = fminf(low, fminf(fminf(u0[0], u0[1]), fminf(u0[2], u0[3]))), high = fmaxf(high, fmaxf(fmaxf(u0[0], u0[1]), fmaxf(u0[2], u0[3])));
      }
#endif
#else
      if (measured || (j == 0 && !repeat)) {
        float m0 = fmaxf(fmaxf(t0[0], t0[1]), fmaxf(t0[2], t0[3])), m1 = fmaxf(fmaxf(t1[0], t1[1]), fmaxf(t1[2], t1[3]));
        if (two) m0 = fmaxf(m0, fmaxf(fmaxf(u0[0], u0[1]), fmaxf(u0[2], u0[3]))), m1 = fmaxf(m1, fmaxf(fmaxf(u1[0], u1[1]), fmaxf(u1[2], u1[3])));
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, o)), m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, o));
        if (measured) {
          top0 = fmaxf(top0, m0 + ref0), top1 = fmaxf(top1, m1 + ref1);
          continue;
        }
        ref0 = m0, ref1 = m1; // the largest scores of the first two groups
#pragma unroll
        for (int v = 0; v < 4; v++) t0[v] -= ref0, t1[v] -= ref1, u0[v] -= ref0, u1[v] -= ref1;
      }
      char* to = values + 2 * (2 * tig * stride + token);
      auto keep = [&](float (&x)[4], float (&y)[4], char* to) {
#pragma unroll
        for (int v = 0; v < 4; v++) x[v] = exp2_fast(x[v]), y[v] = exp2_fast(y[v]);
        sum0 += (x[0] + x[1]) + (x[2] + x[3]), sum1 += (y[0] + y[1]) + (y[2] + y[3]);
        if (2 * tig < GROUP_HEADS) *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
        if (2 * tig + 1 < GROUP_HEADS) *reinterpret_cast<uint2*>(to + 2 * stride) = make_uint2(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]));
      };
      keep(t0, t1, to);
      if (two) keep(u0, u1, to + 64 * WARPS);
#endif
    }
#if RAW
    keep_limits(high, low);
    return true;
#else
    if (measured) {
      ref0 = top0, ref1 = top1, measured = false;
    } else {
      if (keep_sums(ref0, ref1, sum0, sum1)) return true;
      measured = true;
    }
#endif
  }
}

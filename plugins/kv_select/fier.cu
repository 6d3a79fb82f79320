// FIER scorer: one-bit keys of 32-token groups against the G <= 8 query heads of a key-value head, on tensor cores.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G), -DPOOL (0: every head for itself, 1: mean, 2: maximum) and -DQ_BF16.
//
// Bits of a group are D words, D / 32 for each lane: lane (gid, tig) = (lane / 4, lane % 4) owns tokens 4 gid .. 4 gid + 3, and its word w eight
// channels from 8 (4 w + tig): bit 4 v + i + 16 h is token 4 gid + v, channel 8 (4 w + tig) + 2 i + h. So one shift a word and one
// AND a register make the A operand of mma.m16n8k16 in fp16: a set bit is the subnormal 2^(i - 24), 2^(i - 20) for odd v. The 2^-i is put right in
// the query, the rest in the sums.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef TRACE
extern "C" __device__ long long trace[64 * 32];
#define MARK(i) if (threadIdx.x == 0 && blockIdx.x < 64) trace[blockIdx.x * 32 + i] = clock64();
#else
#define MARK(i)
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef WARPS
#define WARPS 8
#endif
#ifndef STAGES
#define STAGES 4             // a power of two
#endif
#ifndef RESIDENT
#define RESIDENT (D > 128 ? 1 : 2) // blocks on a multiprocessor
#endif
#define WORDS (D / 32)        // 32-bit words of bits that a lane owns in a group
#define PAIRS (D / 8)         // channel pairs that a lane owns
#define BIT_BYTES (4 * D)     // bytes of bits in a group
#define META_BYTES (4 * D)    // lows, then ranges, fp16
#define STAGE_BYTES (6 * D)   // bits and ranges: what the ring holds of a group
#define STEP_HEADS (POOL == 0 ? GROUP_HEADS : 1)

#ifdef Q_BF16
typedef __nv_bfloat16 qtype;
__device__ __forceinline__ float to_float(qtype x) { return __bfloat162float(x); }
#else
typedef __half qtype;
__device__ __forceinline__ float to_float(qtype x) { return __half2float(x); }
#endif

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void copy16(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2;" ::"r"(to), "l"(from), "l"(policy));
}
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Wait for the kernels before this one, then let the one behind start its preamble: it may read what was written before the kernel before it.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ uint4 shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 shared4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store8(__half* p, u32 x, u32 y) { asm volatile("st.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(x), "r"(y) : "memory"); }
__device__ __forceinline__ u32 pack2(float x, float y) {
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
// q [B, q_stride] the rotated queries; bits, meta the pool of one layer: BIT_BYTES and META_BYTES a group, [P, Hk, N / 32] groups;
// table [B, table_stride] page numbers; lens [B] stored tokens. Writes scores [R, STEP_HEADS, score_stride] fp16, times scale and log2(e) and
// minus the reference of the part, and parts [R, gridDim.x, STEP_HEADS]: reference, then log2 of the sum of exponentials (POOL 0 and G > 1)
// or the maximum, and the minimum.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) fier_score(const qtype* q, const char* bits, const char* meta,
    const int* table, const int* lens, __half* scores, float4* parts, int q_stride,
    int table_stride, int page_groups, long long score_stride, int budget, float scale_log2) {
  extern __shared__ __align__(128) char smem[];
  __shared__ float shared_ref[WARPS][8];
  __shared__ float2 shared_sum[WARPS][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  const int stored = lens[b], groups = stored <= budget ? 0 : stored >> 5;
  const int per = (groups + gridDim.x - 1) / gridDim.x;
  const int begin = min(groups, (int)blockIdx.x * per), end = min(groups, begin + per);
  const int mine = max(0, (end - begin - warp + WARPS - 1) / WARPS); // groups begin + warp, + WARPS, ...
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  // Lane l knows where the l-th group of this warp lies; refreshed every 32 groups.
  int place = 0;
  auto locate = [&](int from) {
    int j = from + lane;
    if (j < mine) {
      int g = begin + warp + j * WARPS, page = g / page_groups;
      place = (table[(long long)b * table_stride + page] * heads + head) * page_groups + g - page * page_groups;
    }
  };
  locate(0);
  MARK(0)
  dependency_wait();
  MARK(1)
  if (stored <= budget) return;
  const u32 ring = (u32)__cvta_generic_to_shared(smem) + warp * STAGES * STAGE_BYTES;
  const u32 bits_at = ring + lane * WORDS * 4;            // this lane's words and ranges in the first stage
  const u32 span_at = ring + BIT_BYTES + tig * 16;
  const u32 bits_to = ring + lane * 16, span_to = ring + BIT_BYTES + lane * 16;
  const char *bits_from = bits + lane * 16, *span_from = meta + 2 * D + lane * 16;
  auto fetch = [&](int j, long long at) {
    if (j < mine) {
      const u32 stage = (j & (STAGES - 1)) * STAGE_BYTES;
#pragma unroll
      for (int c = 0; c < BIT_BYTES / 16; c += 32) {
        if (BIT_BYTES / 16 - c >= 32 || lane < BIT_BYTES / 16 - c) copy16(bits_to + stage + c * 16, bits_from + at * BIT_BYTES + c * 16, policy);
      }
      if (2 * D / 16 >= 32 || lane < 2 * D / 16) copy16(span_to + stage, span_from + at * META_BYTES, policy);
    }
  };
#pragma unroll
  for (int j = 0; j < STAGES - 2; j += 2) {
    fetch(j, __shfl_sync(~0u, place, j)), fetch(j + 1, __shfl_sync(~0u, place, j + 1));
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  int ahead0 = __shfl_sync(~0u, place, STAGES - 2), ahead1 = __shfl_sync(~0u, place, STAGES - 1); // where the next two groups lie

  // The query, normalized by a power of two and multiplied by 2^(3 - i) for the bits' places.
  u32 qr[PAIRS];
  float k0, k1; // factors of this lane's two heads, 2 tig and 2 tig + 1, from unscaled products to log2 units
  {
    float x[2 * PAIRS], top = 0.f;
    const qtype* from = q + (long long)b * q_stride + (long long)(head * GROUP_HEADS + gid) * D + tig * 8;
#pragma unroll
    for (int c = 0; c < PAIRS / 4; c++) {
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
      qr[p] = pack2(x[2 * p] * f, x[2 * p + 1] * f);
    }
    const float up = __uint_as_float((u32)(127 + exponent) << 23) * scale_log2;
    k0 = __shfl_sync(~0u, up, (2 * tig) * 4);
    k1 = __shfl_sync(~0u, up, (2 * tig + 1) * 4);
  }
  const float bit0 = k0 * 2097152.f, bit1 = k1 * 2097152.f; // 2^21 undoes 2^(i - 24) 2^(3 - i)
  const float odd0 = bit0 * 0.0625f, odd1 = bit1 * 0.0625f;
  float ref0 = 0.f, ref1 = 0.f, sum0 = 0.f, sum1 = 0.f, low = 3e38f, high = -3e38f;
  float base[4];
  __half* to_scores = scores + row * STEP_HEADS * score_stride + (POOL == 0 ? 2 * tig * score_stride : 0) + (begin + warp) * 32ll + gid * 4;
  __half *to0 = to_scores, *to1 = to_scores + score_stride;

  auto product = [&](int j, float (&c0)[4], float (&c1)[4]) { // bits of one group times the query and the ranges
    const u32 stage = (j & (STAGES - 1)) * STAGE_BYTES;
    u32 word[WORDS];
    if (WORDS % 4 == 0) {
#pragma unroll
      for (int w = 0; w < WORDS; w += 4) {
        const uint4 v = shared16(bits_at + stage + w * 4);
        word[w] = v.x, word[(w + 1) % WORDS] = v.y, word[(w + 2) % WORDS] = v.z, word[(w + 3) % WORDS] = v.w;
      }
    } else {
#pragma unroll
      for (int w = 0; w < WORDS; w++) word[w] = shared4(bits_at + stage + w * 4);
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const uint4 r = shared16(span_at + stage + w * 64);
      const u32 b0 = mul2(qr[4 * w], r.x), b1 = mul2(qr[4 * w + 1], r.y), b2 = mul2(qr[4 * w + 2], r.z), b3 = mul2(qr[4 * w + 3], r.w);
      const u32 x = word[w], y = x >> 8;
      const u32 m = 0x00010001u, n = 0x00100010u; // rows 1 and 3 of the four come out sixteen times too large
      mma(c0, x & m, x & n, x & (m << 1), x & (n << 1), b0, b1);
      mma(c1, y & m, y & n, y & (m << 1), y & (n << 1), b0, b1);
      mma(c0, x & (m << 2), x & (n << 2), x & (m << 3), x & (n << 3), b2, b3);
      mma(c1, y & (m << 2), y & (n << 2), y & (m << 3), y & (n << 3), b2, b3);
    }
  };
#if POOL != 0
#if POOL == 1
#define JOIN(a, b) ((a) + (b))
#else
#define JOIN(a, b) fmaxf(a, b)
#endif
  auto pool = [&](const float (&t0)[4], const float (&t1)[4]) { // over the heads: lane tig keeps token 4 gid + tig
    float r[4];
#pragma unroll
    for (int v = 0; v < 4; v++) r[v] = POOL == 1 ? t0[v] + t1[v] : fmaxf(2 * tig < GROUP_HEADS ? t0[v] : -3e38f, 2 * tig + 1 < GROUP_HEADS ? t1[v] : -3e38f);
    const float s0 = __shfl_xor_sync(~0u, (tig & 1) ? r[0] : r[1], 1), s1 = __shfl_xor_sync(~0u, (tig & 1) ? r[2] : r[3], 1);
    const float m0 = JOIN((tig & 1) ? r[1] : r[0], s0), m1 = JOIN((tig & 1) ? r[3] : r[2], s1);
    const float t = JOIN((tig & 2) ? m1 : m0, __shfl_xor_sync(~0u, (tig & 2) ? m0 : m1, 2));
    return POOL == 1 ? t * (1.f / GROUP_HEADS) : t;
  };
#endif
  auto keep = [&](float (&t0)[4], float (&t1)[4], float pooled) { // scores of a group that exists
#if POOL != 0
    to0[tig] = __float2half_rn(pooled);
    low = fminf(low, pooled), high = fmaxf(high, pooled);
#else
    if (2 * tig < GROUP_HEADS) store8(to0, pack2(t0[0], t0[1]), pack2(t0[2], t0[3]));
    if (2 * tig + 1 < GROUP_HEADS) store8(to1, pack2(t1[0], t1[1]), pack2(t1[2], t1[3]));
    if (GROUP_HEADS == 1) {
      high = fmaxf(high, fmaxf(fmaxf(t0[0], t0[1]), fmaxf(t0[2], t0[3]))), low = fminf(low, fminf(fminf(t0[0], t0[1]), fminf(t0[2], t0[3])));
    } else {
      sum0 += (exp2_fast(t0[0]) + exp2_fast(t0[1])) + (exp2_fast(t0[2]) + exp2_fast(t0[3]));
      sum1 += (exp2_fast(t1[0]) + exp2_fast(t1[1])) + (exp2_fast(t1[2]) + exp2_fast(t1[3]));
    }
#endif
    to0 += WARPS * 32, to1 += WARPS * 32;
  };

  auto round = [&](int j, bool first) { // groups j and j + 1 of this warp
    if ((j & 15) == 0) { // lows of sixteen groups at once: rows of one product
      u32 z0[PAIRS], z1[PAIRS];
      const int at0 = __shfl_sync(~0u, place, (j + gid) & 31), at1 = __shfl_sync(~0u, place, (j + 8 + gid) & 31);
      const char* from0 = meta + (long long)at0 * META_BYTES + tig * 16;
      const char* from1 = meta + (long long)at1 * META_BYTES + tig * 16;
#pragma unroll
      for (int c = 0; c < PAIRS / 4; c++) {
        uint4 v = make_uint4(0, 0, 0, 0), w = v;
        if (j + gid < mine) v = load16(from0 + c * 64);
        if (j + 8 + gid < mine) w = load16(from1 + c * 64);
        const u32 f0 = 0x30003000u, f1 = 0x34003400u, f2 = 0x38003800u; // 1/8, 1/4, 1/2
        z0[4 * c] = mul2(v.x, f0), z0[4 * c + 1] = mul2(v.y, f1), z0[4 * c + 2] = mul2(v.z, f2), z0[4 * c + 3] = v.w;
        z1[4 * c] = mul2(w.x, f0), z1[4 * c + 1] = mul2(w.y, f1), z1[4 * c + 2] = mul2(w.z, f2), z1[4 * c + 3] = w.w;
      }
      base[0] = base[1] = base[2] = base[3] = 0.f;
#pragma unroll
      for (int s = 0; s < D / 16; s++) mma(base, z0[2 * s], z1[2 * s], z0[2 * s + 1], z1[2 * s + 1], qr[2 * s], qr[2 * s + 1]);
    }
    const int next = j + STAGES - 2, from = ((j & 7) << 2) | tig; // rows j and j + 1 of the product are in the same half
    const float e0 = (j & 8) ? base[2] : base[0], e1 = (j & 8) ? base[3] : base[1];
    const float z00 = __shfl_sync(~0u, e0, from), z01 = __shfl_sync(~0u, e1, from), z10 = __shfl_sync(~0u, e0, from + 4), z11 = __shfl_sync(~0u, e1, from + 4);
    fetch(next, ahead0), fetch(next + 1, ahead1); // into the places that the round before has read
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (((next + 2) & 31) == 0) locate(next + 2); // groups before are fetched, lows up to there loaded
    ahead0 = __shfl_sync(~0u, place, (next + 2) & 31), ahead1 = __shfl_sync(~0u, place, (next + 3) & 31);
    float c[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES / 2 - 1) : "memory");
    __syncwarp();
    product(j, c[0], c[1]);
    product(j + 1, c[2], c[3]);
    __syncwarp(); // the next round overwrites these places
    const float r0 = POOL == 0 ? ref0 : 0.f, r1 = POOL == 0 ? ref1 : 0.f;
    const float a0 = z00 * k0 - r0, a1 = z01 * k1 - r1, b0 = z10 * k0 - r0, b1 = z11 * k1 - r1;
    float t0[4] = {c[0][0] * bit0 + a0, c[0][2] * odd0 + a0, c[1][0] * bit0 + a0, c[1][2] * odd0 + a0};
    float t1[4] = {c[0][1] * bit1 + a1, c[0][3] * odd1 + a1, c[1][1] * bit1 + a1, c[1][3] * odd1 + a1};
    float u0[4] = {c[2][0] * bit0 + b0, c[2][2] * odd0 + b0, c[3][0] * bit0 + b0, c[3][2] * odd0 + b0};
    float u1[4] = {c[2][1] * bit1 + b1, c[2][3] * odd1 + b1, c[3][1] * bit1 + b1, c[3][3] * odd1 + b1};
    float pooled_t = 0.f, pooled_u = 0.f;
#if POOL != 0
    pooled_t = pool(t0, t1) - ref0, pooled_u = pool(u0, u1) - ref0;
#endif
    if (first) { // the block agrees on a reference: the maximum of every warp's first groups
      float m0 = -3e38f, m1 = -3e38f;
#if POOL != 0
      if (j < mine) m0 = pooled_t;
      if (j + 1 < mine) m0 = fmaxf(m0, pooled_u);
      m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, 1)), m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, 2));
      m1 = m0;
#else
      if (j < mine) m0 = fmaxf(fmaxf(t0[0], t0[1]), fmaxf(t0[2], t0[3])), m1 = fmaxf(fmaxf(t1[0], t1[1]), fmaxf(t1[2], t1[3]));
      if (j + 1 < mine) m0 = fmaxf(m0, fmaxf(fmaxf(u0[0], u0[1]), fmaxf(u0[2], u0[3]))), m1 = fmaxf(m1, fmaxf(fmaxf(u1[0], u1[1]), fmaxf(u1[2], u1[3])));
#endif
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, o)), m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, o));
      if (gid == 0) shared_ref[warp][2 * tig] = m0, shared_ref[warp][2 * tig + 1] = m1;
      __syncthreads();
      ref0 = shared_ref[0][2 * tig], ref1 = shared_ref[0][2 * tig + 1];
#pragma unroll
      for (int w = 1; w < WARPS; w++) ref0 = fmaxf(ref0, shared_ref[w][2 * tig]), ref1 = fmaxf(ref1, shared_ref[w][2 * tig + 1]);
#pragma unroll
      for (int v = 0; v < 4; v++) t0[v] -= ref0, t1[v] -= ref1, u0[v] -= ref0, u1[v] -= ref1;
      pooled_t -= ref0, pooled_u -= ref0;
    }
    if (!first || j < mine) keep(t0, t1, pooled_t);
    if (j + 1 < mine) keep(u0, u1, pooled_u);
  };
  round(0, true); // every warp, because it has a barrier
  MARK(3)
  for (int j = 2; j < mine; j += 2) round(j, false);
  MARK(4)
  asm volatile("cp.async.wait_all;" ::: "memory");
  float4* to_parts = parts + (row * gridDim.x + blockIdx.x) * STEP_HEADS;
  if (POOL != 0 || GROUP_HEADS == 1) {
    high += ref0, low += ref0;
    if (POOL == 0 && tig != 0) high = -3e38f, low = 3e38f; // only lanes with tig 0 hold head 0
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o)), low = fminf(low, __shfl_xor_sync(~0u, low, o));
    if (lane == 0) shared_sum[warp][0] = make_float2(high, low);
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int w = 1; w < WARPS; w++) high = fmaxf(high, shared_sum[w][0].x), low = fminf(low, shared_sum[w][0].y);
      to_parts[0] = begin < end ? make_float4(ref0, high, low, 0.f) : make_float4(-3e38f, -3e38f, 3e38f, 0.f);
    }
    return;
  }
  // The first groups' maximum is a good reference unless a later score is 2^120 times heavier: then the sums are taken again.
  float shift0 = 0.f, shift1 = 0.f;
  auto again = [&](float& sum, float& shift, const __half* from) {
    for (int j = 0; j < mine; j++) {
      for (int v = 0; v < 4; v++) shift = fmaxf(shift, __half2float(from[j * (WARPS * 32) + v]));
    }
    sum = 0.f;
    for (int j = 0; j < mine; j++) {
      for (int v = 0; v < 4; v++) sum += exp2_fast(__half2float(from[j * (WARPS * 32) + v]) - shift);
    }
  };
  if (2 * tig < GROUP_HEADS && !(sum0 < 1e36f)) again(sum0, shift0, to_scores);
  if (2 * tig + 1 < GROUP_HEADS && !(sum1 < 1e36f)) again(sum1, shift1, to_scores + score_stride);
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) {
    const float other0 = __shfl_xor_sync(~0u, shift0, o), other1 = __shfl_xor_sync(~0u, shift1, o);
    const float more0 = __shfl_xor_sync(~0u, sum0, o), more1 = __shfl_xor_sync(~0u, sum1, o);
    const float top0 = fmaxf(shift0, other0), top1 = fmaxf(shift1, other1);
    sum0 = sum0 * exp2_fast(shift0 - top0) + more0 * exp2_fast(other0 - top0), shift0 = top0;
    sum1 = sum1 * exp2_fast(shift1 - top1) + more1 * exp2_fast(other1 - top1), shift1 = top1;
  }
  if (gid == 0) shared_sum[warp][2 * tig] = make_float2(shift0, sum0), shared_sum[warp][2 * tig + 1] = make_float2(shift1, sum1);
  __syncthreads();
  if (threadIdx.x < GROUP_HEADS) {
    float top = -3e38f, total = 0.f, ref = -3e38f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, shared_sum[w][threadIdx.x].x), ref = fmaxf(ref, shared_ref[w][threadIdx.x]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += shared_sum[w][threadIdx.x].y * exp2_fast(shared_sum[w][threadIdx.x].x - top);
    to_parts[threadIdx.x] = make_float4(ref, begin < end ? ref + top + log2f(total) : -3e38f, 0.f, 0.f);
    MARK(5)
  }
}

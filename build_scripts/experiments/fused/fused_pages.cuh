// Scores of pages by their bounds for fused.cu, on tensor cores.
#pragma once
#include "fused_block.cuh"

__device__ __forceinline__ u32 clip(u32 x, bool positive) {
#ifdef BF16
  const __nv_bfloat162 v = *reinterpret_cast<__nv_bfloat162*>(&x), zero = __float2bfloat162_rn(0.f);
  __nv_bfloat162 r = positive ? __hmax2(v, zero) : __hmin2(v, zero);
#else
  const __half2 v = *reinterpret_cast<__half2*>(&x), zero = __float2half2_rn(0.f);
  __half2 r = positive ? __hmax2(v, zero) : __hmin2(v, zero);
#endif
  return *reinterpret_cast<u32*>(&r);
}
// Score the block's pages: max(q, 0) times the maximum plus min(q, 0) times the minimum, sixteen pages a warp and round; false where the length was
// another one behind the wait.
__device__ __forceinline__ bool score(const Row& row, const qtype* q, const char* bounds, const char*, char*, char* values, int stride,
                                      float scale_log2) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int end = min(row.units, row.usable - row.begin);   // in the share
  const int rounds = (end - warp * 16 + WARPS * 16 - 1) / (WARPS * 16); // <= 0: nothing
  const int settled = (row.stored - 1) / PAGE - row.begin; // pages that the step before had closed already
  u32 up[PAIRS], down[PAIRS];                              // channels (4 c + tig) 8 .. + 8 of piece c
  uint4 v[2][WORDS], w[2][WORDS];                          // rows gid and gid + 8 of the products are pages 2 gid and 2 gid + 1 of the sixteen
  auto load = [&](int j, int from, int to, bool fresh) {
    const int at = (j * WARPS + warp) * 16, u = row.begin + at + (lane & 15), page = u / row.per_page;
    int place = 0;
    if (at + (lane & 15) < to) {
      place = (load_fresh(row.table + page) * row.heads + row.head) * row.per_page + u - page * row.per_page;
      row.places[at + (lane & 15)] = place;
    }
    const long long p0 = __shfl_sync(~0u, place, 2 * gid), p1 = __shfl_sync(~0u, place, 2 * gid + 1);
    const bool live0 = at + 2 * gid >= from && at + 2 * gid < to, live1 = at + 2 * gid + 1 >= from && at + 2 * gid + 1 < to;
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        if (fresh) v[k][i] = w[k][i] = make_uint4(0, 0, 0, 0);
        if (live0) v[k][i] = load16(bounds + p0 * (4 * D) + tig * 16 + k * 2 * D + i * 64);
        if (live1) w[k][i] = load16(bounds + p1 * (4 * D) + tig * 16 + k * 2 * D + i * 64);
      }
    }
  };
  load(0, 0, min(end, settled), true);
  MARK(1)
  dependency_wait();
  MARK(2)
  const int length = load_fresh(row.length);
  if (settled < end) load(0, settled, end, false);
#pragma unroll
  for (int c = 0; c < WORDS; c++) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (gid < GROUP_HEADS) x = load16(reinterpret_cast<const char*>(q + gid * D) + (4 * c + tig) * 16);
    const u32 e[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; k++) up[4 * c + k] = clip(e[k], true), down[4 * c + k] = clip(e[k], false);
  }
  MARK(3)
  if (!unchanged(row, length)) return false;
  float ref0 = 0.f, ref1 = 0.f, sum0 = 0.f, sum1 = 0.f;
  [[maybe_unused]] float low = 3e38f, high = -3e38f;
  bool measured = false;
  for (bool repeat = false;; repeat = true) {
    float top0 = -3e38f, top1 = -3e38f;
    sum0 = sum1 = 0.f;
    for (int j = 0; j < rounds; j++) {
      if (j > 0 || repeat) load(j, 0, end, true);
      float c[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
      for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
          const u32* f = k ? up + 4 * i : down + 4 * i;
          mma(c[k], v[k][i].x, w[k][i].x, v[k][i].y, w[k][i].y, f[0], f[1]);
          mma(c[k], v[k][i].z, w[k][i].z, v[k][i].w, w[k][i].w, f[2], f[3]);
        }
      }
      const int at = (j * WARPS + warp) * 16 + 2 * gid;
      const bool live0 = at < end, live1 = at + 1 < end;
      float x0 = (c[0][0] + c[1][0]) * scale_log2, y0 = (c[0][1] + c[1][1]) * scale_log2;
      float x1 = (c[0][2] + c[1][2]) * scale_log2, y1 = (c[0][3] + c[1][3]) * scale_log2;
#if RAW
#if GROUP_HEADS == 1
      const float p0 = x0, p1 = x1;
#elif POOL == 1
      float p0 = x0 + y0, p1 = x1 + y1;
      p0 += __shfl_xor_sync(~0u, p0, 1), p1 += __shfl_xor_sync(~0u, p1, 1);
      p0 = (p0 + __shfl_xor_sync(~0u, p0, 2)) * (1.f / GROUP_HEADS), p1 = (p1 + __shfl_xor_sync(~0u, p1, 2)) * (1.f / GROUP_HEADS);
#else
      float p0 = fmaxf(2 * tig < GROUP_HEADS ? x0 : -3e38f, 2 * tig + 1 < GROUP_HEADS ? y0 : -3e38f);
      float p1 = fmaxf(2 * tig < GROUP_HEADS ? x1 : -3e38f, 2 * tig + 1 < GROUP_HEADS ? y1 : -3e38f);
      p0 = fmaxf(p0, __shfl_xor_sync(~0u, p0, 1)), p1 = fmaxf(p1, __shfl_xor_sync(~0u, p1, 1));
      p0 = fmaxf(p0, __shfl_xor_sync(~0u, p0, 2)), p1 = fmaxf(p1, __shfl_xor_sync(~0u, p1, 2));
#endif
      if (tig == 0 && live0) {
        *reinterpret_cast<uint2*>(reinterpret_cast<u32*>(values) + at) = make_uint2(ordered(p0), ordered(p1)); // a dead second page is never read
        low = fminf(low, p0), high = fmaxf(high, p0);
        if (live1) low = fminf(low, p1), high = fmaxf(high, p1);
      }
#else
      if (measured || (j == 0 && !repeat)) {
        float m0 = fmaxf(live0 ? x0 : -3e38f, live1 ? x1 : -3e38f), m1 = fmaxf(live0 ? y0 : -3e38f, live1 ? y1 : -3e38f);
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, o)), m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, o));
        if (measured) {
          top0 = fmaxf(top0, m0), top1 = fmaxf(top1, m1);
          continue;
        }
        ref0 = m0, ref1 = m1;
      }
      x0 = exp2_fast(x0 - ref0), x1 = live1 ? exp2_fast(x1 - ref0) : 0.f, y0 = exp2_fast(y0 - ref1), y1 = live1 ? exp2_fast(y1 - ref1) : 0.f;
      if (live0) {
        sum0 += x0 + x1, sum1 += y0 + y1;
        char* to = values + 2 * (2 * tig * stride + at);
        if (2 * tig < GROUP_HEADS) *reinterpret_cast<u32*>(to) = pack_bf16(x0, x1);
        if (2 * tig + 1 < GROUP_HEADS) *reinterpret_cast<u32*>(to + 2 * stride) = pack_bf16(y0, y1);
      }
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

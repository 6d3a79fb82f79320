// Page scorer: the G <= 8 query heads of a key-value head against the minimum and maximum of every page (Quest), on tensor cores.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G), -DPOOL (0: every head for itself, 1: mean, 2: maximum) and -DBF16.
//
// The best score that a key of the page can have is max(q, 0) times the maximum plus min(q, 0) times the minimum: two products.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;

#define WARPS 8
#define PIECES (D / 32) // 16-byte pieces that a lane reads of a bound
#define PAIRS (D / 8)
#define STEP_HEADS (POOL == 0 ? GROUP_HEADS : 1)

#ifdef BF16
typedef __nv_bfloat16 real;
#define MMA_TYPE "bf16"
__device__ __forceinline__ u32 clip(u32 x, bool positive) {
  const __nv_bfloat162 v = *reinterpret_cast<__nv_bfloat162*>(&x), zero = __float2bfloat162_rn(0.f);
  __nv_bfloat162 r = positive ? __hmax2(v, zero) : __hmin2(v, zero);
  return *reinterpret_cast<u32*>(&r);
}
#else
typedef __half real;
#define MMA_TYPE "f16"
__device__ __forceinline__ u32 clip(u32 x, bool positive) {
  const __half2 v = *reinterpret_cast<__half2*>(&x), zero = __float2half2_rn(0.f);
  __half2 r = positive ? __hmax2(v, zero) : __hmin2(v, zero);
  return *reinterpret_cast<u32*>(&r);
}
#endif
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// q [B, q_stride]; bounds [P, Hk, 2, D] minima, then maxima, of whole pages; table [B, table_stride]; lens [B] stored tokens. Writes scores
// and parts as fier_score does, with one unit a page.
extern "C" __global__ void __launch_bounds__(WARPS * 32) page_score(const real* q, const char* bounds, const int* table, const int* lens, __half* scores, float4* parts,
    int q_stride, int table_stride, int page_size, long long score_stride, int budget, float scale_log2) {
  __shared__ float shared_ref[WARPS][8];
  __shared__ float2 shared_sum[WARPS][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  const int stored = lens[b], pages = stored <= budget ? 0 : stored / page_size;
  const int per = ((pages + 31) / 32 + gridDim.x - 1) / gridDim.x * 32; // a multiple of 32 pages a block: the selector's unit of parts
  const int begin = min(pages, (int)blockIdx.x * per), end = min(pages, begin + per);
  const int* own = table + (long long)b * table_stride;
  const int rounds = max(1, (per + WARPS * 16 - 1) / (WARPS * 16));
  auto locate = [&](int j) { // lane l < 16 knows page 16 (j WARPS + warp) + l
    const int i = begin + (j * WARPS + warp) * 16 + (lane & 15);
    return i < end ? own[i] : -1;
  };
  int place = locate(0);
  dependency_wait();
  if (stored <= budget) return;
  u32 up[PAIRS], down[PAIRS]; // channels (4 c + tig) 8 .. + 8 of piece c
  {
    const char* from = reinterpret_cast<const char*>(q + (long long)b * q_stride + (long long)(head * GROUP_HEADS + gid) * D);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (gid < GROUP_HEADS) v = load16(from + (4 * c + tig) * 16);
      const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; k++) up[4 * c + k] = clip(w[k], true), down[4 * c + k] = clip(w[k], false);
    }
  }
  float ref0 = 0.f, ref1 = 0.f, sum0 = 0.f, sum1 = 0.f, shift0 = 0.f, shift1 = 0.f, low = 3e38f, high = -3e38f;
  __half* to_scores = scores + row * STEP_HEADS * score_stride;
  for (int j = 0; j < rounds; j++) {
    // Rows gid and gid + 8 of the products are pages 2 gid and 2 gid + 1 of the sixteen.
    const int p0 = __shfl_sync(~0u, place, 2 * gid), p1 = __shfl_sync(~0u, place, 2 * gid + 1);
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    const char* from0 = bounds + ((long long)max(p0, 0) * heads + head) * (4 * D) + tig * 16;
    const char* from1 = bounds + ((long long)max(p1, 0) * heads + head) * (4 * D) + tig * 16;
    uint4 v[2][PIECES], w[2][PIECES];
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        v[k][i] = w[k][i] = make_uint4(0, 0, 0, 0);
        if (p0 >= 0) v[k][i] = load16(from0 + k * 2 * D + i * 64);
        if (p1 >= 0) w[k][i] = load16(from1 + k * 2 * D + i * 64);
      }
    }
    if (j + 1 < rounds) place = locate(j + 1);
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const u32* f = k ? up + 4 * i : down + 4 * i;
        mma(c, v[k][i].x, w[k][i].x, v[k][i].y, w[k][i].y, f[0], f[1]);
        mma(c, v[k][i].z, w[k][i].z, v[k][i].w, w[k][i].w, f[2], f[3]);
      }
    }
    const int at = begin + (j * WARPS + warp) * 16 + 2 * gid;
    const bool live0 = at < end, live1 = at + 1 < end;
    float x0 = c[0] * scale_log2, y0 = c[1] * scale_log2, x1 = c[2] * scale_log2, y1 = c[3] * scale_log2;
#if POOL != 0
#if POOL == 1
    x0 += y0, x1 += y1;
    x0 += __shfl_xor_sync(~0u, x0, 1), x1 += __shfl_xor_sync(~0u, x1, 1);
    x0 = (x0 + __shfl_xor_sync(~0u, x0, 2)) * (1.f / GROUP_HEADS), x1 = (x1 + __shfl_xor_sync(~0u, x1, 2)) * (1.f / GROUP_HEADS);
#else
    x0 = fmaxf(2 * tig < GROUP_HEADS ? x0 : -3e38f, 2 * tig + 1 < GROUP_HEADS ? y0 : -3e38f);
    x1 = fmaxf(2 * tig < GROUP_HEADS ? x1 : -3e38f, 2 * tig + 1 < GROUP_HEADS ? y1 : -3e38f);
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
#endif
    y0 = y1 = 0.f;
#endif
    if (j == 0) {
      float m0 = fmaxf(live0 ? x0 : -3e38f, live1 ? x1 : -3e38f), m1 = fmaxf(live0 ? y0 : -3e38f, live1 ? y1 : -3e38f);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, o)), m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, o));
      if (gid == 0) shared_ref[warp][2 * tig] = m0, shared_ref[warp][2 * tig + 1] = m1;
      __syncthreads();
      ref0 = shared_ref[0][2 * tig], ref1 = shared_ref[0][2 * tig + 1];
#pragma unroll
      for (int k = 1; k < WARPS; k++) ref0 = fmaxf(ref0, shared_ref[k][2 * tig]), ref1 = fmaxf(ref1, shared_ref[k][2 * tig + 1]);
    }
    x0 -= ref0, x1 -= ref0, y0 -= ref1, y1 -= ref1;
    __half* to = to_scores + (long long)(2 * tig) * score_stride + at;
    const bool store0 = POOL == 0 ? 2 * tig < GROUP_HEADS : tig == 0, store1 = POOL == 0 && 2 * tig + 1 < GROUP_HEADS;
    if (live0 && store0) *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x0, x1); // a dead second page is never read as a unit
    if (live0 && store1) *reinterpret_cast<__half2*>(to + score_stride) = __floats2half2_rn(y0, y1);
    if (POOL != 0 || GROUP_HEADS == 1) {
      if (live0 && tig == 0) high = fmaxf(high, x0 + ref0), low = fminf(low, x0 + ref0);
      if (live1 && tig == 0) high = fmaxf(high, x1 + ref0), low = fminf(low, x1 + ref0);
    } else {
      const float m0 = fmaxf(live0 ? x0 : -3e38f, live1 ? x1 : -3e38f), m1 = fmaxf(live0 ? y0 : -3e38f, live1 ? y1 : -3e38f);
      if (m0 > shift0 + 60.f) sum0 *= exp2_fast(shift0 - m0), shift0 = m0;
      if (m1 > shift1 + 60.f) sum1 *= exp2_fast(shift1 - m1), shift1 = m1;
      if (live0) sum0 += exp2_fast(x0 - shift0), sum1 += exp2_fast(y0 - shift1);
      if (live1) sum0 += exp2_fast(x1 - shift0), sum1 += exp2_fast(y1 - shift1);
    }
  }
  float4* to_parts = parts + (row * gridDim.x + blockIdx.x) * STEP_HEADS;
  if (POOL != 0 || GROUP_HEADS == 1) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o)), low = fminf(low, __shfl_xor_sync(~0u, low, o));
    if (lane == 0) shared_sum[warp][0] = make_float2(high, low);
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int k = 1; k < WARPS; k++) high = fmaxf(high, shared_sum[k][0].x), low = fminf(low, shared_sum[k][0].y);
      to_parts[0] = begin < end ? make_float4(ref0, high, low, 0.f) : make_float4(-3e38f, -3e38f, 3e38f, 0.f);
    }
    return;
  }
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
    for (int k = 0; k < WARPS; k++) top = fmaxf(top, shared_sum[k][threadIdx.x].x), ref = fmaxf(ref, shared_ref[k][threadIdx.x]);
#pragma unroll
    for (int k = 0; k < WARPS; k++) total += shared_sum[k][threadIdx.x].y * exp2_fast(shared_sum[k][threadIdx.x].x - top);
    to_parts[threadIdx.x] = make_float4(ref, begin < end ? ref + top + log2f(total) : -3e38f, 0.f, 0.f);
  }
}

// Scores of a block's share of pages: the query heads of a key-value head against what is kept of every full page, on tensor cores.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G <= 32), -DPOOL (0: every head for itself, 1: mean, 2: maximum, 3: every head
// for itself in a row of its own), -DKIND, -DPER_PAGE (summaries in a page of the cache), -DFORCED, -DSHARED, -DONCE (no warp has two rounds) and -DBF16.
//
// KIND 0: minimum and maximum of every channel (Quest); the best score of a key inside is max(q, 0) times the maximum plus min(q, 0) times the
// minimum: two products. KIND 1: centre and radius (ArkVale's balls), one product plus |q| times the radius. KIND 2: mean (ShadowKV), one product.
// FORCED raises the pages that every query reads to infinity, SHARED scores by the mean over all query heads of the layer.
#pragma once
#include "ordered.cuh"

#ifndef WARPS
#define WARPS 8 // of a block
#endif
#define PIECES (D / 32)                // 16-byte pieces that a lane reads of a vector
#define PAIRS (D / 8)
#define TILES ((GROUP_HEADS + 7) / 8)  // eight heads are the narrow side of a product
#define VECTORS (KIND == 0 ? 2 : 1)    // of a summary
#define SIXTEENS (PIECES <= 2 ? 4 / VECTORS : PIECES <= 4 ? 2 / VECTORS : 1) // 256 bytes and more of a lane are under way at once
#define ROUND (SIXTEENS * 16) // pages of a warp in a round
#define POOLED (POOL == 1 || POOL == 2)
#define RAW (POOL != 0 || GROUP_HEADS == 1) // scores themselves are ranked, not their softmax
#define COLUMNS (POOLED ? 1 : 2 * TILES)    // heads whose scores a lane holds
#define HEADS_OUT (POOLED ? 1 : GROUP_HEADS)
#ifdef SHARED
static_assert(POOL == 1 && KIND != 2, "one selection for all heads ranks the mean of their scores");
#endif

#ifdef BF16
#define MMA_TYPE "bf16"
__device__ __forceinline__ u32 clip(u32 x, bool positive) {
  const __nv_bfloat162 v = *reinterpret_cast<__nv_bfloat162*>(&x), zero = __float2bfloat162_rn(0.f);
  __nv_bfloat162 r = positive ? __hmax2(v, zero) : __hmin2(v, zero);
  return *reinterpret_cast<u32*>(&r);
}
__device__ __forceinline__ float2 wide(u32 x) { return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x)); }
__device__ __forceinline__ float wide1(real x) { return __bfloat162float(x); }
#else
#define MMA_TYPE "f16"
__device__ __forceinline__ u32 clip(u32 x, bool positive) {
  const __half2 v = *reinterpret_cast<__half2*>(&x), zero = __float2half2_rn(0.f);
  __half2 r = positive ? __hmax2(v, zero) : __hmin2(v, zero);
  return *reinterpret_cast<u32*>(&r);
}
__device__ __forceinline__ float2 wide(u32 x) { return __half22float2(*reinterpret_cast<__half2*>(&x)); }
__device__ __forceinline__ float wide1(real x) { return __half2float(x); }
#endif
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

// The heads of a group as the narrow operand: column gid of tile t is head 8 t + gid, channels (4 c + tig) 8 .. + 8 of piece c.
struct Query {
  u32 part[VECTORS][TILES][PAIRS];
  float norm[2 * TILES]; // of heads 8 t + 2 tig and + 1

  __device__ __forceinline__ void load(const real* q, int gid, int tig) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const char* from = reinterpret_cast<const char*>(q + (8 * t + gid) * D);
      float square = 0.f;
#pragma unroll
      for (int c = 0; c < PIECES; c++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (8 * t + gid < GROUP_HEADS) v = load16(from + (4 * c + tig) * 16);
        const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if (KIND == 0) {
            part[0][t][4 * c + k] = clip(w[k], false), part[VECTORS - 1][t][4 * c + k] = clip(w[k], true);
          } else {
            part[0][t][4 * c + k] = w[k];
          }
          if (KIND == 1) {
            const float2 f = wide(w[k]);
            square += f.x * f.x + f.y * f.y;
          }
        }
      }
      if (KIND == 1) {
        square += __shfl_xor_sync(~0u, square, 1);
        square = sqrtf(square + __shfl_xor_sync(~0u, square, 2));
        norm[2 * t] = __shfl_sync(~0u, square, 8 * tig), norm[2 * t + 1] = __shfl_sync(~0u, square, 8 * tig + 4);
      }
    }
  }
};

// What a lane reads of the sixteens' pages.
struct Fetched {
  uint4 v[SIXTEENS][VECTORS][2][PIECES];
  float reach[SIXTEENS][2];

  __device__ __forceinline__ void read(const char* vectors, const real* radii, const int (&rows)[SIXTEENS][2], int tig) {
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (KIND == 1) reach[s][r] = wide1(radii[rows[s][r]]);
        const char* from = vectors + (long long)rows[s][r] * (VECTORS * 2 * D) + tig * 16;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
#pragma unroll
          for (int i = 0; i < PIECES; i++) v[s][k][r][i] = load16(from + k * 2 * D + i * 64);
        }
      }
    }
  }
};

// Products of the sixteens' pages with the heads: c[s][t] holds pages 2 gid (0, 1) and 2 gid + 1 (2, 3) by heads 8 t + 2 tig and + 1.
// zero is 0, which the compiler does not know: every product waits for all loads, or it would take them in turns to save registers.
__device__ __forceinline__ void products(float (&c)[SIXTEENS][TILES][4], const Query& query, const Fetched& pages, u32 zero) {
  u32 arrived = 0;
#pragma unroll
  for (int i = 0; i < SIXTEENS * VECTORS * 2 * PIECES; i++) arrived |= (&pages.v[0][0][0][0])[i].x;
#pragma unroll
  for (int s = 0; s < SIXTEENS; s++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) c[s][t][0] = c[s][t][1] = c[s][t][2] = c[s][t][3] = __uint_as_float(arrived & zero);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const uint4 a = pages.v[s][k][0][i], b = pages.v[s][k][1][i];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const u32* f = query.part[k][t] + 4 * i;
          mma(c[s][t], a.x, b.x, a.y, b.y, f[0], f[1]);
          mma(c[s][t], a.z, b.z, a.w, b.w, f[2], f[3]);
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < SIXTEENS; s++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (KIND == 1) c[s][t][i] += query.norm[2 * t + (i & 1)] * pages.reach[s][i >> 1];
      }
    }
  }
}

// One page's scores: of the lane's heads, or what the group's heads agree on, the same in all four lanes of a page.
__device__ __forceinline__ void agree(float (&x)[COLUMNS], const float (&c)[TILES][4], int row, float scale, int tig) {
  if (!POOLED) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) x[i] = c[i >> 1][2 * row + (i & 1)] * scale;
    return;
  }
  float all = POOL == 1 ? 0.f : -3e38f;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float one = c[t][2 * row + k] * scale; // heads that do not exist have zero queries
      if (POOL == 1) all += one;
      else all = fmaxf(all, 8 * t + 2 * tig + k < GROUP_HEADS ? one : -3e38f);
    }
  }
#pragma unroll
  for (int o = 1; o < 4; o <<= 1) {
    const float other = __shfl_xor_sync(~0u, all, o);
    all = POOL == 1 ? all + other : fmaxf(all, other);
  }
  x[0] = POOL == 1 ? all * (1.f / GROUP_HEADS) : all;
}

// What a block knows of its pages' scores by head: the reference that scores are stored against, and extremes or the sum of the softmax.
struct Statistics {
  float ref[COLUMNS], high[COLUMNS], low[COLUMNS]; // not RAW: high is the shift of the sum, low the sum

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) ref[i] = 0.f, high[i] = RAW ? -3e38f : 0.f, low[i] = RAW ? 3e38f : 0.f;
  }
  // y: scores minus the reference of two pages
  __device__ __forceinline__ void add(int i, float y0, float y1, bool live0, bool live1) {
    if (RAW) {
      if (live0) high[i] = fmaxf(high[i], y0 + ref[i]), low[i] = fminf(low[i], y0 + ref[i]);
      if (live1) high[i] = fmaxf(high[i], y1 + ref[i]), low[i] = fminf(low[i], y1 + ref[i]);
      return;
    }
    const float top = fmaxf(live0 ? y0 : -3e38f, live1 ? y1 : -3e38f);
    if (top > high[i] + 60.f) low[i] *= exp2_fast(high[i] - top), high[i] = top;
    if (live0) low[i] += exp2_fast(y0 - high[i]);
    if (live1) low[i] += exp2_fast(y1 - high[i]);
  }
  __device__ __forceinline__ void merge(int i, float other_high, float other_low) {
    if (RAW) {
      high[i] = fmaxf(high[i], other_high), low[i] = fminf(low[i], other_low);
      return;
    }
    const float top = fmaxf(high[i], other_high);
    low[i] = low[i] * exp2_fast(high[i] - top) + other_low * exp2_fast(other_high - top), high[i] = top;
  }
};

// The pages [begin, end) of a sequence that a block scores.
struct Pages {
  const char* vectors;  // [P, Hk, PER_PAGE, VECTORS, D] of `real`
  const void* beside;   // [P, Hk, PER_PAGE]: radii, or fp32 likeness where pages are FORCED
  const uint2* limit;   // of the row, where pages are FORCED: as outlier_cut leaves it
  const int* table;     // page numbers of the sequence
  int head, heads, stored, begin, end, per; // per: of every block
  bool idle;            // there is nothing to score
  bool settled;         // the first ones are asked for at once: no kernel that may still run writes them
};

// Waits for the kernels before this one, then calls begun(). q: the query heads, [G, D], or all of the layer where SHARED. Calls put(head, page, scores
// of it and the next) in one thread each and sixteen(page) in the warp that has put those of sixteen pages; RAW: range(reference, highest, lowest) of
// head 0 in every lane at the end; then tell(head, part) in thread `head`: scores and parts are as score_groups tells them.
template <typename Begun, typename Put, typename Sixteen, typename Range, typename Tell> __device__ __forceinline__ void score_share(const Pages& row,
    const real* q, float scale_log2, Begun begun, Put put, Sixteen sixteen, Range range, Tell tell) {
  __shared__ float shared_ref[WARPS][8 * TILES];
  __shared__ float2 shared_sum[WARPS][8 * TILES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int begin = row.begin, end = row.end, per = row.per, head = row.head, heads = row.heads;
#ifdef ONCE
  constexpr int rounds = 1;
#else
  const int rounds = max(1, (per + WARPS * ROUND - 1) / (WARPS * ROUND));
#endif
  int place[(SIXTEENS + 1) / 2]; // lane l knows pages l and 32 + l of the warp's round: head 0's row of the summaries, behind the end the last one's
  auto locate = [&](int j) {
#pragma unroll
    for (int k = 0; k < (SIXTEENS + 1) / 2; k++) {
      const int at = (j * WARPS + warp) * ROUND + 32 * k + (SIXTEENS == 1 ? lane & 15 : lane);
      const u32 i = max(min(begin + at, end - 1), 0);
      place[k] = row.table[i / PER_PAGE] * heads * PER_PAGE + i % PER_PAGE;
    }
  };
  locate(0);
#ifdef EARLY
  if (!row.idle) { // into the cache that sees what the kernel before this one still writes
#pragma unroll
    for (int k = 0; k < (SIXTEENS + 1) / 2; k++) {
#pragma unroll
      for (int c = 0; c < VECTORS * 2 * D; c += 128) prefetch(row.vectors + (place[k] + head * PER_PAGE) * (VECTORS * 2ll * D) + c);
    }
  }
#endif
  MARK(0)
  if (row.idle) {
    dependency_wait();
    return;
  }
  const u32 zero = row.stored >> 31;
  Query query;
#ifdef FORCED
  uint2 limit;
#endif
  Statistics known;
  known.start();
  auto slot = [&](int i) { return POOLED ? 0 : (i >> 1) * 8 + 2 * tig + (i & 1); }; // head of a column
  for (int j = 0; j < rounds; j++) {
    int rows[SIXTEENS][2];
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        rows[s][r] = __shfl_sync(~0u, place[s >> 1], (s & 1) * 16 + 2 * gid + r) + head * PER_PAGE;
      }
    }
    if (j + 1 < rounds) locate(j + 1);
    const bool busy = begin + (j * WARPS + warp) * ROUND < end;
    auto start = [&] {
      dependency_wait();
      MARK(1)
      begun();
#ifndef SHARED
      query.load(q, gid, tig);
#endif
#ifdef FORCED
      limit = *row.limit;
#endif
      MARK(2)
    };
    Fetched pages;
    if (j == 0 && !row.settled) start();
#ifndef SHARED
    if (busy) pages.read(row.vectors, reinterpret_cast<const real*>(row.beside), rows, tig);
#endif
    if (j == 0 && row.settled) start();
    float x[SIXTEENS][2][COLUMNS];
#ifdef SHARED
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++) x[s][0][0] = x[s][1][0] = 0.f;
#pragma unroll 1
    for (int h = 0; h < heads; h++) {
      query.load(q + (long long)h * GROUP_HEADS * D, gid, tig);
      float c[SIXTEENS][TILES][4] = {};
      if (busy) pages.read(row.vectors, reinterpret_cast<const real*>(row.beside), rows, tig), products(c, query, pages, zero);
#pragma unroll
      for (int s = 0; s < SIXTEENS; s++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float one[COLUMNS];
          agree(one, c[s], r, scale_log2 / heads, tig);
          x[s][r][0] += one[0];
          rows[s][r] += PER_PAGE;
        }
      }
    }
#else
    {
      float c[SIXTEENS][TILES][4] = {};
      if (busy) products(c, query, pages, zero);
#pragma unroll
      for (int s = 0; s < SIXTEENS; s++) agree(x[s][0], c[s], 0, scale_log2, tig), agree(x[s][1], c[s], 1, scale_log2, tig);
    }
#endif
    const int first = begin + (j * WARPS + warp) * ROUND + 2 * gid;
    if (j == 0) {
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) {
        float m = -3e38f;
#pragma unroll
        for (int s = 0; s < SIXTEENS; s++) {
#pragma unroll
          for (int r = 0; r < 2; r++) m = fmaxf(m, first + 16 * s + r < end ? x[s][r][i] : -3e38f);
        }
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
        if (gid == 0 && (!POOLED || tig == 0)) shared_ref[warp][slot(i)] = m;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) {
        float m = shared_ref[0][slot(i)];
#pragma unroll
        for (int k = 1; k < WARPS; k++) m = fmaxf(m, shared_ref[k][slot(i)]);
        known.ref[i] = m;
      }
    }
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++) {
      const int at = first + 16 * s;
      const bool live0 = at < end, live1 = at + 1 < end;
      bool forced0 = false, forced1 = false;
#ifdef FORCED
      const float* likeness = reinterpret_cast<const float*>(row.beside);
      const u32 key0 = ordered(likeness[rows[s][0]]), key1 = ordered(likeness[rows[s][1]]);
      forced0 = key0 < limit.x || (key0 == limit.x && at <= (int)limit.y);
      forced1 = key1 < limit.x || (key1 == limit.x && at + 1 <= (int)limit.y);
#endif
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) {
        const float y0 = x[s][0][i] - known.ref[i], y1 = x[s][1][i] - known.ref[i];
        known.add(i, y0, y1, live0, live1);
        const int h = slot(i);
        // A dead second page is never read as a unit.
        const __half2 both = __floats2half2_rn(forced0 ? __int_as_float(0x7f800000) : y0, forced1 ? __int_as_float(0x7f800000) : y1);
        if (!live0 || h >= HEADS_OUT || (POOLED && tig != 0)) continue;
        put(h, at, both);
      }
      sixteen(at - 2 * gid);
    }
  }
  MARK(4)
  if (RAW) range(known.ref[0], POOLED || tig == 0 ? known.high[0] : -3e38f, POOLED || tig == 0 ? known.low[0] : 3e38f);
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      const float other_high = __shfl_xor_sync(~0u, known.high[i], o), other_low = __shfl_xor_sync(~0u, known.low[i], o);
      known.merge(i, other_high, other_low);
    }
    if (gid == 0 && (!POOLED || tig == 0)) shared_sum[warp][slot(i)] = make_float2(known.high[i], known.low[i]);
  }
  __syncthreads();
  if (threadIdx.x >= HEADS_OUT) return;
  float ref = -3e38f, high = -3e38f, low = RAW ? 3e38f : 0.f;
#pragma unroll
  for (int k = 0; k < WARPS; k++) {
    const float2 one = shared_sum[k][threadIdx.x];
    ref = fmaxf(ref, shared_ref[k][threadIdx.x]), high = fmaxf(high, one.x);
    if (RAW) low = fminf(low, one.y);
  }
  if (!RAW) {
#pragma unroll
    for (int k = 0; k < WARPS; k++) low += shared_sum[k][threadIdx.x].y * exp2_fast(shared_sum[k][threadIdx.x].x - high);
  }
  float4 part = RAW ? make_float4(ref, high, low, 0.f) : make_float4(ref, ref + high + log2f(low), 0.f, 0.f);
  if (begin >= end) part = RAW ? make_float4(-3e38f, -3e38f, 3e38f, 0.f) : make_float4(ref, -3e38f, 0.f, 0.f);
  tell((int)threadIdx.x, part);
}

// Products of some tokens with a matrix, y = x W^T + b, by matrix instructions: rows of the matrix go from memory to registers as they lie there.
//
// Built with -DTILES (of eight tokens), -DWARPS (of a block), -DROWS (tiles of sixteen matrix rows of a pass), -DPIECES (of 32 entries that a warp takes of a
// row at once), -DAHEAD and -DOWN_AHEAD (such steps of the matrix and of the tokens on their way, the one a multiple of the other), -DGATED (row n and row
// n + N are gate and up: silu(gate) * up), -DNORM (x is a sum that is normalized first), -DKEPT (tokens stay in shared memory for later passes), -DRING (the matrix
// goes through shared memory, where every lane reads what it fetched itself, so that registers are left for a kernel beside this one), -DBF16 or
// -DFP16, -DRESIDENT (blocks of a multiprocessor) and -DCLUSTER (blocks that share the inner size; not with NORM).
//
// Blocks stay: each has an equal share of the results, and takes it in passes. Warps of a block share the inner size; what they found is added in their
// order. In a product of sixteen rows and eight tokens a lane holds entries 2q, 2q + 1, 2q + 8, 2q + 9 of rows and of tokens; any order of entries is right
// that both follow. So lane q of a quad takes entries 8q to 8q + 7, sixteen bytes, for two products.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#include "product.cuh"

#define THREADS (WARPS * 32)
#define STEP (32 * PIECES)                // entries of a row that a warp takes at once
#define RESULTS (ROWS * (GATED ? 8 : 16)) // of a token, that a pass computes
#define FOUND (ROWS * TILES * 4)          // sums of a lane
#define PAIRS (ROWS * TILES * (GATED ? 64 : 128))
#define ITEMS ((PAIRS + CLUSTER * THREADS - 1) / (CLUSTER * THREADS)) // results of a thread, of a pass

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef FP16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Sixteen bytes, or zeros, from global to shared memory beside the computation; the rest of a row's line is asked for by other lanes.
__device__ __forceinline__ void fetch16(u32 to, const void* from, u32 size) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ uint4 read_if(bool there, const real* p) { return there ? *reinterpret_cast<const uint4*>(p) : make_uint4(0, 0, 0, 0); }

struct Entries { // of a lane's tokens for a step, as they lie in memory
  uint4 x[TILES][PIECES];
#if NORM
  uint4 more[TILES][PIECES], scale[PIECES];
#endif
};

// Sixteen bytes of a token as the products take them. NORM: of x + more, rounded, which goes to total where that is given; their squares go to `square`, and
// what is made is scaled by the norm's weight: the factor that all entries share is applied to the product.
__device__ __forceinline__ uint4 operand(const Entries& e, int t, int p, real* total, float& square) {
#if NORM
  float2 a[4], b[4];
  u32 sums[4];
  unpack(e.x[t][p], a), unpack(e.more[t][p], b);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[i] = pack(make_float2(a[i].x + b[i].x, a[i].y + b[i].y)), a[i] = both(sums[i]);
    square = fmaf(a[i].x, a[i].x, fmaf(a[i].y, a[i].y, square));
  }
  if (total) *reinterpret_cast<uint4*>(total) = make_uint4(sums[0], sums[1], sums[2], sums[3]);
  unpack(e.scale[p], b);
#pragma unroll
  for (int i = 0; i < 4; i++) sums[i] = pack(make_float2(a[i].x * b[i].x, a[i].y * b[i].y));
  return make_uint4(sums[0], sums[1], sums[2], sums[3]);
#else
  return e.x[t][p];
#endif
}

// x [tokens, k], matrix [n, k] (GATED: [2 n, k]), bias [n] or null, out [tokens, n]; NORM: more and total [tokens, k] (both or none), scale [k].
// 1 <= tokens <= 8 TILES; k is a multiple of 8, everything aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_few(const real* x, const real* matrix, const real* bias, real* out, const real* more,
    const real* scale, real* total, int tokens, int n, int k, float eps) {
  extern __shared__ __align__(128) char dynamic[]; // RING: the matrix; sums [2][WARPS][FOUND][32]; KEPT: tokens [steps of a pass][WARPS][PIECES][TILES][32], 16 bytes each
  __shared__ float squares[WARPS][8 * TILES];
  float* partial = reinterpret_cast<float*>(dynamic + RING * AHEAD * ROWS * 2 * PIECES * THREADS * 16);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int begin = (int)((long long)cluster * n / clusters), end = (int)((long long)(cluster + 1) * n / clusters);
  const int units = (k + 31) / 32, from = units * rank / CLUSTER * 32, span = min(k, units * (rank + 1) / CLUSTER * 32) - from; // of the inner size
  const int passes = (end - begin + RESULTS - 1) / RESULTS, share = passes ? (end - begin + passes - 1) / passes : 0;
  const int per_pass = ((units + CLUSTER - 1) / CLUSTER * 32 + STEP * WARPS - 1) / (STEP * WARPS), steps = passes * per_pass;
  start_next();
  x += from, matrix += from;
  uint4* kept = reinterpret_cast<uint4*>(partial + 2 * WARPS * FOUND * 32) + warp * PIECES * TILES * 32 + lane;

  int load_pass = 0, load_step = 0; // of the next step to load
  auto each = [&](auto take) { // every sixteen bytes of a step: their place, where they come from, and whether they are there
    const int at = (load_step * WARPS + warp) * STEP + q * 8, first = begin + load_pass * share, last = min(first + share, end);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first + (GATED ? 8 * r : 16 * r + 8 * half) + g;
        const real* here = matrix + (long long)(row + (GATED && half ? n : 0)) * k + at;
#pragma unroll
        for (int p = 0; p < PIECES; p++) take(r, half, p, here + 32 * p, row < last && at + 32 * p < span);
      }
    if (++load_step == per_pass) load_step = 0, load_pass++;
  };
#if RING
  const u32 ring = shared_at(dynamic) + threadIdx.x * 16;
  auto load = [&](int u) {
    each([&](int r, int half, int p, const real* there, bool is) {
      fetch16(ring + (((u * ROWS + r) * 2 + half) * PIECES + p) * THREADS * 16, is ? there : matrix, is ? 16 : 0);
    });
  };
#else
  uint4 w[AHEAD][ROWS][2][PIECES];
  auto load = [&](int u) {
    each([&](int r, int half, int p, const real* there, bool is) { w[u][r][half][p] = is ? load_once(there) : make_uint4(0, 0, 0, 0); });
  };
#endif
#pragma unroll
  for (int u = 0; u < AHEAD; u++) {
    load(u);
    if (RING) copies_commit();
  }

  Entries own[OWN_AHEAD];
  auto read_scale = [&](Entries& e, int step) { // the norm's weight is nobody's result
#if NORM
    const int at = (step * WARPS + warp) * STEP + q * 8;
#pragma unroll
    for (int p = 0; p < PIECES; p++) e.scale[p] = read_if(at + 32 * p < span, scale + at + 32 * p);
#endif
  };
  auto read = [&](Entries& e, int step) {
    const int at = (step * WARPS + warp) * STEP + q * 8;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const long long token = (long long)min(8 * t + g, tokens - 1) * k;
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
        e.x[t][p] = read_if(at + 32 * p < span, x + token + at + 32 * p);
#if NORM
        e.more[t][p] = read_if(more && at + 32 * p < span, more + token + at + 32 * p);
#endif
      }
    }
  };
#pragma unroll
  for (int u = 0; u < OWN_AHEAD; u++) read_scale(own[u], u);
  wait_for_input();
#pragma unroll
  for (int u = 0; u < OWN_AHEAD; u++) read(own[u], u);

  float sum[ROWS][TILES][4] = {}, square[TILES] = {};
  for (int base = 0, step = 0, pass = 0; base < steps; base += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (base + u >= steps) break;
      const int at = (step * WARPS + warp) * STEP + q * 8;
      uint4 now[TILES][PIECES];
      if (!KEPT || pass == 0) {
        Entries& e = own[u % OWN_AHEAD];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int p = 0; p < PIECES; p++) {
            const bool writes = NORM && blockIdx.x == 0 && pass == 0 && more && 8 * t + g < tokens && at + 32 * p < span;
            now[t][p] = operand(e, t, p, writes ? total + (long long)(8 * t + g) * k + at + 32 * p : nullptr, square[t]);
            if (KEPT && passes > 1) kept[((step * WARPS * PIECES + p) * TILES + t) * 32] = now[t][p];
          }
        const int next = step + OWN_AHEAD < per_pass ? step + OWN_AHEAD : (KEPT ? per_pass : (step + OWN_AHEAD) % per_pass);
        if (next < per_pass) read_scale(e, next), read(e, next);
      } else {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int p = 0; p < PIECES; p++) now[t][p] = kept[((step * WARPS * PIECES + p) * TILES + t) * 32];
      }
#if RING
      copies_wait<AHEAD - 1>();
#endif
#pragma unroll
      for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#if RING
          const uint4 upper = shared16(ring + (((u * ROWS + r) * 2 + 0) * PIECES + p) * THREADS * 16);
          const uint4 lower = shared16(ring + (((u * ROWS + r) * 2 + 1) * PIECES + p) * THREADS * 16);
#else
          const uint4 upper = w[u][r][0][p], lower = w[u][r][1][p];
#endif
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            const uint4 b = now[t][p];
            mma(sum[r][t], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
            mma(sum[r][t], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
          }
        }
      if (load_pass < passes) load(u);
      if (RING) copies_commit();
      if (step + 1 < per_pass) {
        step++;
        continue;
      }
      // A pass ends: the warps' sums are added, and every thread finishes some results.
      const int first = begin + pass * share, last = min(first + share, end);
      auto place = [&](int index, int& token, int& row, int& where) {
        const int of = index & 31, kind = index >> 5, e = kind % (GATED ? 2 : 4), tile = kind / (GATED ? 2 : 4);
        token = tile % TILES * 8 + (of & 3) * 2 + (e & 1), row = first + tile / TILES * (GATED ? 8 : 16) + (e >> 1) * 8 + (of >> 2);
        where = (tile * 4 + e) * 32 + of;
        return index < PAIRS && token < tokens && row < last;
      };
      float offset[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        int token, row, where;
        const bool there = place((i * CLUSTER + rank) * THREADS + threadIdx.x, token, row, where);
        offset[i] = bias && there ? wide(bias[row]) : 0.f;
      }
      float* here = partial + (pass & 1) * WARPS * FOUND * 32; // who is late still reads the pass before
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) here[(warp * FOUND + (r * TILES + t) * 4 + i) * 32 + lane] = sum[r][t][i], sum[r][t][i] = 0.f;
      if (NORM && pass == 0)
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          square[t] += __shfl_xor_sync(~0u, square[t], 1);
          square[t] += __shfl_xor_sync(~0u, square[t], 2);
          if (q == 0) squares[warp][8 * t + g] = square[t];
        }
      cluster_sync();
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        int token, row, where;
        if (!place((i * CLUSTER + rank) * THREADS + threadIdx.x, token, row, where)) continue;
        float found[2] = {0.f, 0.f}, factor = 0.f;
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) {
          const float* there = peer(here, other) + where;
#pragma unroll
          for (int w = 0; w < WARPS; w++) {
            found[0] += there[w * FOUND * 32];
            if (GATED) found[1] += there[w * FOUND * 32 + 64];
            if (NORM) factor += squares[w][token];
          }
        }
        if (NORM) {
          factor = rsqrtf(factor / k + eps);
          found[0] *= factor, found[1] *= factor;
        }
        finish(found, offset[i], out, token, row, n);
      }
      step = 0, pass++;
    }
  }
#if CLUSTER > 1
  cluster_sync(); // nobody leaves while others read what it found
#endif
}

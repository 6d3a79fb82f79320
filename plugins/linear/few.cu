// Products of some tokens with a matrix, y = x W^T + b, by matrix instructions: rows of the matrix go from memory to registers as they lie there.
//
// Built with -DTILES (of eight tokens), -DWARPS (of a block), -DROWS (tiles of sixteen matrix rows of a pass), -DPIECES (of 32 entries that a warp takes of a
// row at once), -DAHEAD (such steps on their way), -DGATED (row n and row n + N are gate and up: silu(gate) * up), -DNORM (x is a sum that is normalized
// first), -DSTAGED (the tokens' entries lie in shared memory; NORM needs it), -DBF16 or -DFP16, -DRESIDENT (blocks of a multiprocessor), and -DCLUSTER (blocks that share the inner size; not with NORM).
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

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef FP16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where sixteen bytes of a token lie in shared memory: what a warp reads at once lies together, in the order of its lanes.
__device__ __forceinline__ int place(int token, int at) { return ((at >> 5) * TILES * 8 + token) * 32 + (at & 31); }

// Bring the tokens to shared memory; NORM: their sum with more, which the first block leaves in total, normalized and scaled. Eight tokens are asked for at once.
__device__ __forceinline__ void stage(real* staged, const real* x, const real* more, const real* scale, const uint4 (&early)[2], real* total, int tokens,
    int stride, int k, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if NORM
  __shared__ float squares[WARPS][8 * TILES];
  float square[TILES][8] = {};
#endif
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    for (int at = threadIdx.x * 8; at < k; at += THREADS * 8) {
      uint4 own[8], other[8];
#pragma unroll
      for (int t = 0; t < 8; t++)
        if (tile * 8 + t < tokens) {
          own[t] = *reinterpret_cast<const uint4*>(x + (long long)(tile * 8 + t) * stride + at);
#if NORM
          other[t] = more ? *reinterpret_cast<const uint4*>(more + (long long)(tile * 8 + t) * stride + at) : make_uint4(0, 0, 0, 0);
#endif
        }
#pragma unroll
      for (int t = 0; t < 8; t++)
        if (tile * 8 + t < tokens) {
#if NORM
          float2 a[4], b[4];
          u32 sums[4];
          unpack(own[t], a), unpack(other[t], b);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            sums[i] = pack(make_float2(a[i].x + b[i].x, a[i].y + b[i].y)), a[i] = both(sums[i]);
            square[tile][t] = fmaf(a[i].x, a[i].x, fmaf(a[i].y, a[i].y, square[tile][t]));
          }
          own[t] = make_uint4(sums[0], sums[1], sums[2], sums[3]);
          if (more && blockIdx.x == 0) *reinterpret_cast<uint4*>(total + (long long)(tile * 8 + t) * stride + at) = own[t];
#endif
          *reinterpret_cast<uint4*>(staged + place(tile * 8 + t, at)) = own[t];
        }
    }
#if NORM
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int t = 0; t < 8; t++) {
#pragma unroll
      for (int o = 16; o; o >>= 1) square[tile][t] += __shfl_xor_sync(~0u, square[tile][t], o);
      if (lane == 0) squares[warp][tile * 8 + t] = square[tile][t];
    }
  __syncthreads();
  float factor = 0.f; // of the lane's token
  if (lane < 8 * TILES) {
#pragma unroll
    for (int w = 0; w < WARPS; w++) factor += squares[w][lane];
    factor = rsqrtf(factor / k + eps);
  }
#pragma unroll 2
  for (int c = 0; c < (k + THREADS * 8 - 1) / (THREADS * 8); c++) {
    const int at = (c * THREADS + threadIdx.x) * 8;
    float2 b[4];
    unpack(c == 0 ? early[0] : c == 1 ? early[1] : at < k ? *reinterpret_cast<const uint4*>(scale + at) : make_uint4(0, 0, 0, 0), b);
#pragma unroll
    for (int token = 0; token < 8 * TILES; token++) {
      const float by = __shfl_sync(~0u, factor, token);
      if (token < tokens && at < k) {
        float2 a[4];
        uint4* own = reinterpret_cast<uint4*>(staged + place(token, at));
        unpack(*own, a);
        u32 made[4];
#pragma unroll
        for (int i = 0; i < 4; i++) made[i] = pack(make_float2(rounded(a[i].x * by) * b[i].x, rounded(a[i].y * by) * b[i].y));
        *own = make_uint4(made[0], made[1], made[2], made[3]);
      }
    }
  }
#endif
}

// x [tokens, k], matrix [n, k] (GATED: [2 n, k]), bias [n] or null, out [tokens, n]; NORM: more and total [tokens, k] (both or none), scale [k].
// 1 <= tokens <= 8 TILES; k is a multiple of 8, everything aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few(const real* x, const real* matrix, const real* bias, real* out, const real* more,
    const real* scale, real* total, int tokens, int n, int k, float eps) {
  extern __shared__ __align__(128) char dynamic[]; // sums [2][WARPS][FOUND][32]; STAGED: tokens [ceil(k / 32)][8 TILES][32]
  float* partial = reinterpret_cast<float*>(dynamic);
  real* staged = reinterpret_cast<real*>(partial + 2 * WARPS * FOUND * 32);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int begin = (int)((long long)cluster * n / clusters), end = (int)((long long)(cluster + 1) * n / clusters);
  const int units = (k + 31) / 32, from = units * rank / CLUSTER * 32, span = min(k, units * (rank + 1) / CLUSTER * 32) - from; // of the inner size
  const int passes = (end - begin + RESULTS - 1) / RESULTS, share = passes ? (end - begin + passes - 1) / passes : 0;
  const int per_pass = ((units + CLUSTER - 1) / CLUSTER * 32 + STEP * WARPS - 1) / (STEP * WARPS), steps = passes * per_pass;
  start_next();
  x += from, matrix += from;
  uint4 w[AHEAD][ROWS][2][PIECES];
  int load_pass = 0, load_step = 0; // of the next step to load
  auto load = [&](uint4 (&w)[ROWS][2][PIECES]) {
    const int at = (load_step * WARPS + warp) * STEP + q * 8, first = begin + load_pass * share, last = min(first + share, end);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first + (GATED ? 8 * r : 16 * r + 8 * half) + g;
        const real* at_row = matrix + (long long)(row + (GATED && half ? n : 0)) * k + at;
#pragma unroll
        for (int p = 0; p < PIECES; p++) w[r][half][p] = row < last && at + 32 * p < span ? load_once(at_row + 32 * p) : make_uint4(0, 0, 0, 0);
      }
    if (++load_step == per_pass) load_step = 0, load_pass++;
  };
#pragma unroll
  for (int u = 0; u < AHEAD; u++) load(w[u]);
#if STAGED
  uint4 early[2] = {}; // of the norm's weight, nobody's result either
#if NORM
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int at = (c * THREADS + threadIdx.x) * 8;
    if (at < k) early[c] = *reinterpret_cast<const uint4*>(scale + at);
  }
#endif
#endif
  wait_for_input();
#if STAGED
  stage(staged, x, more, scale, early, total, tokens, k, span, eps);
  __syncthreads();
#else
  uint4 next[TILES][PIECES];
  auto read = [&](int step) {
    const int at = (step * WARPS + warp) * STEP + q * 8;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int p = 0; p < PIECES; p++)
        next[t][p] = at + 32 * p < span ? *reinterpret_cast<const uint4*>(x + (long long)min(8 * t + g, tokens - 1) * k + at + 32 * p) : make_uint4(0, 0, 0, 0);
  };
  read(0);
#endif
  float sum[ROWS][TILES][4] = {};
  for (int base = 0, step = 0, pass = 0; base < steps; base += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (base + u >= steps) break;
      const bool over = step + 1 == per_pass;
      uint4 now[TILES][PIECES];
#if STAGED
      const int at = (step * WARPS + warp) * STEP + q * 8;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int p = 0; p < PIECES; p++)
          now[t][p] = at + 32 * p < span ? *reinterpret_cast<const uint4*>(staged + place(8 * t + g, at + 32 * p)) : make_uint4(0, 0, 0, 0);
#else
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int p = 0; p < PIECES; p++) now[t][p] = next[t][p];
      read(over ? 0 : step + 1);
#endif
#pragma unroll
      for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const uint4 own = now[t][p];
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            const uint4 upper = w[u][r][0][p], lower = w[u][r][1][p];
            mma(sum[r][t], upper.x, lower.x, upper.y, lower.y, own.x, own.y);
            mma(sum[r][t], upper.z, lower.z, upper.w, lower.w, own.z, own.w);
          }
        }
      if (load_pass < passes) load(w[u]);
      if (!over) {
        step++;
        continue;
      }
      float* here = partial + (pass & 1) * WARPS * FOUND * 32;
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) here[(warp * FOUND + (r * TILES + t) * 4 + i) * 32 + lane] = sum[r][t][i], sum[r][t][i] = 0.f;
      cluster_sync();
      const int first = begin + pass * share, last = min(first + share, end);
      for (int index = rank * THREADS + threadIdx.x; index < ROWS * TILES * (GATED ? 64 : 128); index += CLUSTER * THREADS) {
        const int of = index & 31, kind = index >> 5, e = kind % (GATED ? 2 : 4), tile = kind / (GATED ? 2 : 4);
        const int token = tile % TILES * 8 + (of & 3) * 2 + (e & 1), row = first + tile / TILES * (GATED ? 8 : 16) + (e >> 1) * 8 + (of >> 2);
        if (token >= tokens || row >= last) continue;
        float found[2] = {0.f, 0.f};
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) {
          const float* there = peer(here, other);
#pragma unroll
          for (int w = 0; w < WARPS; w++) {
            found[0] += there[(w * FOUND + tile * 4 + e) * 32 + of];
            if (GATED) found[1] += there[(w * FOUND + tile * 4 + e + 2) * 32 + of];
          }
        }
        finish(found, bias ? wide(bias[row]) : 0.f, out, token, row, n);
      }
      step = 0, pass++;
    }
  }
#if CLUSTER > 1
  cluster_sync(); // nobody leaves while others read what it found
#endif
}

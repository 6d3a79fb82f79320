// Products of some tokens with a matrix, y = x W^T + b, by matrix instructions: rows of the matrix go from memory to registers as they lie there.
//
// Built with -DTILES (of eight tokens), -DWARPS (of a block), -DROWS (tiles of sixteen matrix rows of a pass), -DPIECES (of 32 entries that a warp takes of a
// row at once), -DAHEAD (such steps on their way), -DGATED (row n and row n + N are gate and up: silu(gate) * up), -DKEPT (tokens stay in shared memory for
// later passes), -DBF16 or -DFP16, and -DRESIDENT (blocks of a multiprocessor).
//
// Blocks stay, and take equal shares of the results in passes. Warps of a block share the inner size; what they found is added in their
// order. In a product of sixteen rows and eight tokens a lane holds entries 2q, 2q + 1, 2q + 8, 2q + 9 of rows and of tokens; any order of entries is right
// that both follow. So lane q of a quad takes entries 8q to 8q + 7, sixteen bytes, for two products.
#include "product.cuh"

#define THREADS (WARPS * 32)
#define STEP (32 * PIECES)                // entries of a row that a warp takes at once
#define RESULTS (ROWS * (GATED ? 8 : 16)) // of a token, that a pass computes
#define FOUND (ROWS * TILES * 4)          // sums of a lane
#define PAIRS (ROWS * TILES * (GATED ? 64 : 128))
#define ITEMS ((PAIRS + THREADS - 1) / THREADS) // results of a thread, of a pass

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef FP16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 read_if(bool there, const real* p) { return there ? *reinterpret_cast<const uint4*>(p) : make_uint4(0, 0, 0, 0); }

// x [tokens, k], matrix [n, k] (GATED: [2 n, k]), bias [n] or null, out [tokens, n]; 1 <= tokens <= 8 TILES; k is a multiple of 8, everything aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_few(const real* x, const real* matrix, const real* bias, real* out, int tokens,
    int n, int k) {
  extern __shared__ __align__(128) char dynamic[]; // sums [2][WARPS][FOUND][32]; KEPT: tokens [steps of a pass][WARPS][PIECES][TILES][32], 16 bytes each
  float* partial = reinterpret_cast<float*>(dynamic);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int passes = (n + gridDim.x * RESULTS - 1) / (gridDim.x * RESULTS), shares = passes * gridDim.x;
  // Of a pass: what blocks take at the same time lies together, so that few pages of memory are in use.
  auto row_of = [&](int pass, int behind) { return (int)((long long)(pass * gridDim.x + blockIdx.x + behind) * n / shares); };
  const int per_pass = (k + STEP * WARPS - 1) / (STEP * WARPS), steps = passes * per_pass;
  start_next();
  uint4* kept = reinterpret_cast<uint4*>(partial + 2 * WARPS * FOUND * 32) + warp * PIECES * TILES * 32 + lane;

  int load_pass = 0, load_step = 0; // of the next step to load
  auto load = [&](uint4 (&w)[ROWS][2][PIECES]) {
    const int at = (load_step * WARPS + warp) * STEP + q * 8, first = row_of(load_pass, 0), last = load_pass < passes ? row_of(load_pass, 1) : first;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first + (GATED ? 8 * r : 16 * r + 8 * half) + g;
        const real* here = matrix + (long long)(row + (GATED && half ? n : 0)) * k + at;
#pragma unroll
        for (int p = 0; p < PIECES; p++) w[r][half][p] = row < last && at + 32 * p < k ? load_once(here + 32 * p) : make_uint4(0, 0, 0, 0);
      }
    if (++load_step == per_pass) load_step = 0, load_pass++;
  };
  uint4 w[AHEAD][ROWS][2][PIECES];
#pragma unroll
  for (int u = 0; u < AHEAD; u++) load(w[u]);
  wait_for_input();

  uint4 next[TILES][PIECES]; // of a lane's tokens, for the step behind the one at work
  auto read = [&](int step) {
    const int at = (step * WARPS + warp) * STEP + q * 8;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int p = 0; p < PIECES; p++) next[t][p] = read_if(at + 32 * p < k, x + (long long)min(8 * t + g, tokens - 1) * k + at + 32 * p);
  };
  read(0);

  float sum[ROWS][TILES][4] = {};
  for (int base = 0, step = 0, pass = 0; base < steps; base += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (base + u >= steps) break;
      uint4 now[TILES][PIECES];
      if (!KEPT || pass == 0) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int p = 0; p < PIECES; p++) {
            now[t][p] = next[t][p];
            if (KEPT && passes > 1) kept[((step * WARPS * PIECES + p) * TILES + t) * 32] = next[t][p]; // for this lane alone
          }
        const int behind = step + 1 < per_pass ? step + 1 : 0;
        if (behind || !KEPT) read(behind);
      } else {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int p = 0; p < PIECES; p++) now[t][p] = kept[((step * WARPS * PIECES + p) * TILES + t) * 32];
      }
#pragma unroll
      for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const uint4 upper = w[u][r][0][p], lower = w[u][r][1][p];
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            const uint4 b = now[t][p];
            mma(sum[r][t], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
            mma(sum[r][t], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
          }
        }
      if (load_pass < passes) load(w[u]);
      if (step + 1 < per_pass) {
        step++;
        continue;
      }
      // A pass ends: the warps' sums are added, and every thread finishes some results.
      const int first = row_of(pass, 0), last = row_of(pass, 1);
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
        const bool there = place(i * THREADS + threadIdx.x, token, row, where);
        offset[i] = bias && there ? wide(bias[row]) : 0.f;
      }
      float* here = partial + (pass & 1) * WARPS * FOUND * 32; // who is late still reads the pass before
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) here[(warp * FOUND + (r * TILES + t) * 4 + i) * 32 + lane] = sum[r][t][i], sum[r][t][i] = 0.f;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        int token, row, where;
        if (!place(i * THREADS + threadIdx.x, token, row, where)) continue;
        float found[2] = {0.f, 0.f};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          found[0] += here[w * FOUND * 32 + where];
          if (GATED) found[1] += here[w * FOUND * 32 + where + 64];
        }
        finish(found, offset[i], out, token, row, n);
      }
      step = 0, pass++;
    }
  }
}

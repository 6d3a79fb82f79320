// Products of up to sixteen tokens with a matrix of codes, y = x W^T + b: codes are read once, as they are stored, and become operands in registers.
//
// Built with -DCOLUMNS (tokens in eights), -DTILES (tiles of sixteen matrix rows of a warp), -DWARPS (of a block: they share the inputs of its rows),
// -DSTAGES (chunks on their way and one that is read), -DBITS (4, or 8 for e4m3), -DGROUP (weights that share a scale, 0: a row), -DZEROS (groups have
// zero points; without, that of four bits is 8), -DSCALE (0: fp32, 1: fp16, 2: bf16), -DGATED (row n and row n + N are gate and up: silu(gate) * up)
// and, for bfloat16, -DBF16.
//
// A lane reads 16 bytes of a row at once and multiplies them by the inputs of the same weights: which of a chunk's inputs a product's columns are does
// not matter. It reads only what it copied itself, so that the copies need no barrier, and they start before what precedes the kernel has ended.
#include "mma.cuh"
#include "scales.cuh"

#define THREADS (WARPS * 32)
#define WEIGHTS (128 / BITS)                 // of a lane and row, in 16 bytes
#define CHUNK (4 * WEIGHTS)                  // inputs of a warp at once
#define PARTS (TILES * (GATED ? 2 : 1))      // tiles, with those that are gated
#define ROWS (16 * TILES)                    // results of a block for a token
#define TOKENS (8 * COLUMNS)
#define LANE_SCALES (GROUP && GROUP < CHUNK) // else a chunk has one scale a row
#define CHUNK_SCALES (GROUP && !LANE_SCALES)
#define FLOATING (BITS == 8)
#define CENTRED (!FLOATING && !LANE_SCALES) // zeros are subtracted from sums, not from codes
#ifdef BF16
#define MAGIC 0x43004300u // 128, with the bits of a code behind it
#define MAGIC_VALUE 128.f
#define ONE 0x3f803f80u
#else
#define MAGIC 0x64006400u
#define MAGIC_VALUE 1024.f
#define ONE 0x3c003c00u
#endif

__device__ __forceinline__ u32 fma_pair(u32 x, u32 y, u32 z) {
#ifdef BF16
  asm("fma.rn.bf16x2 %0,%0,%1,%2;" : "+r"(x) : "r"(y), "r"(z));
#else
  asm("fma.rn.f16x2 %0,%0,%1,%2;" : "+r"(x) : "r"(y), "r"(z));
#endif
  return x;
}
__device__ __forceinline__ float rounded(float x) { return to_float(to_real(x)); }

// Codes of four bits at the ends of both halves, on top of magic.
__device__ __forceinline__ u32 on_top(u32 x, u32 magic) {
  asm("lop3.b32 %0,%0,0x000f000f,%1,0xea;" : "+r"(x) : "r"(magic));
  return x;
}
// Pair i of a word's codes as numbers: of four bits codes i and i + 4 on top of 128 (fp16: 1024), of e4m3 i and i + 2 (fp16: 256 times too small).
// magic is MAGIC, but not known to be: an instruction takes one constant, the mask.
__device__ __forceinline__ u32 numbers(u32 word, int i, u32 magic) {
#if FLOATING
  const u32 x = i ? word : word << 8;
#ifdef BF16
  return fma_pair((x & 0x80008000u) | ((x & 0x7f007f00u) >> 4), 0x7b807b80u, 0x80008000u); // times 2^120
#else
  return (x & 0x80008000u) | ((x & 0x7f007f00u) >> 1);
#endif
#else
  return on_top(word >> 4 * i, magic);
#endif
}

// What the groups share that a lane's two rows of a tile are in; zero is that of a code on top of MAGIC_VALUE.
struct Shared {
  float scale[2], zero[2];
};

// x [tokens, k], codes [n, k] (GATED: [2 n, k]), scales and zeros [rows, groups], bias [n] or null, out [tokens, n]. k is a multiple of WEIGHTS, all but
// zeros is aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) packed(const real* x, const unsigned char* codes, const scale_type* scales,
    const unsigned char* zeros, const real* bias, real* out, int tokens, int n, int k) {
  extern __shared__ __align__(16) char memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3;
  const int first = blockIdx.x * ROWS, chunks = (k + CHUNK - 1) / CHUNK, groups = GROUP ? (k + GROUP - 1) / GROUP : 1;
  const u32 ring = shared_at(memory) + threadIdx.x * 16;
  const u32 magic = MAGIC | (u32)tokens >> 31;
  start_next();
  const unsigned char* codes_of[PARTS][2];
  int group_of[PARTS][2]; // the first group of the row
  const real* inputs_of[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) inputs_of[c] = x + (long long)(c * 8 + gid) * k + tig * WEIGHTS;
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = min(first + p % TILES * 16 + gid + 8 * h, n - 1) + p / TILES * n;
      codes_of[p][h] = codes + (long long)row * (k / (8 / BITS)) + tig * 16;
      group_of[p][h] = row * groups;
    }
  auto place = [&](int stage, int p, int h) { return ring + ((stage * PARTS + p) * 2 + h) * (THREADS * 16); };
  auto fetch = [&](int stage, int chunk) {
    const bool there = chunk * CHUNK + tig * WEIGHTS < k;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) copy16_sized(place(stage, p, h), codes_of[p][h] + chunk * 64, there ? 16 : 0);
    copies_commit();
  };
  auto read_shared = [&](Shared (&found)[PARTS], int chunk) {
    const int input = LANE_SCALES ? chunk * CHUNK + tig * WEIGHTS : chunk * CHUNK;
    const int group = GROUP ? min(input / max(GROUP, 1), groups - 1) : 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = group_of[p][h] + group;
        found[p].scale[h] = GROUP ? scale_of(scales[at]) : 1.f;
        found[p].zero[h] = FLOATING ? 0.f : MAGIC_VALUE + (ZEROS ? (float)zeros[at] : 8.f);
      }
  };
  auto read_inputs = [&](uint4 (&found)[COLUMNS][WEIGHTS / 8], int chunk) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const bool there = c * 8 + gid < tokens && chunk * CHUNK + tig * WEIGHTS < k;
      const uint4* from = reinterpret_cast<const uint4*>(inputs_of[c] + chunk * CHUNK);
#pragma unroll
      for (int i = 0; i < WEIGHTS / 8; i++) found[c][i] = there ? from[i] : make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s, warp + s * WARPS);
  Shared next[PARTS];
  read_shared(next, warp);
  wait_for_input();
  uint4 coming[COLUMNS][WEIGHTS / 8];
  read_inputs(coming, warp);
  float sum[PARTS][COLUMNS][4] = {};
  int stage = 0;
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    fetch(stage == 0 ? STAGES - 1 : stage - 1, chunk + (STAGES - 1) * WARPS);
    uint4 given[COLUMNS][WEIGHTS / 8];
    Shared now[PARTS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < WEIGHTS / 8; i++) given[c][i] = coming[c][i];
#pragma unroll
    for (int p = 0; p < PARTS; p++) now[p] = next[p];
    read_inputs(coming, chunk + WARPS);
    if (GROUP) read_shared(next, chunk + WARPS);
    copies_wait<STAGES - 1>();
    float own[PARTS][COLUMNS][4] = {}, inputs[COLUMNS][4] = {}; // products of this chunk, and its inputs' sums
    auto& into = CHUNK_SCALES || CENTRED ? own : sum;
    uint4 read[PARTS][2];
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) read[p][h] = shared16(place(stage, p, h));
#pragma unroll
    for (int w = 0; w < 4; w++) { // a word of every row
#pragma unroll
      for (int j = 0; j < (FLOATING ? 1 : 2); j++) { // a product
        u32 b[COLUMNS][2];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const uint4 eight = given[c][FLOATING ? w / 2 : w];
          const u32 low = FLOATING ? (w % 2 ? eight.z : eight.x) : j ? eight.y : eight.x;
          const u32 high = FLOATING ? (w % 2 ? eight.w : eight.y) : j ? eight.w : eight.z;
          b[c][0] = __byte_perm(low, high, 0x5410), b[c][1] = __byte_perm(low, high, 0x7632);
          if (CENTRED) mma(inputs[c], ONE, ONE, ONE, ONE, b[c][0], b[c][1]);
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          u32 a[2][2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint4 v = read[p][h];
            const u32 word = w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
#pragma unroll
            for (int i = 0; i < 2; i++) {
              a[h][i] = numbers(word, 2 * j + i, magic);
              if (!LANE_SCALES) continue;
              if (!FLOATING) a[h][i] = fma_pair(a[h][i], ONE, pack_real(-now[p].zero[h], -now[p].zero[h]));
              a[h][i] = fma_pair(a[h][i], pack_real(now[p].scale[h], now[p].scale[h]), 0x80008000u);
            }
          }
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) mma(into[p][c], a[0][0], a[1][0], a[0][1], a[1][1], b[c][0], b[c][1]);
        }
      }
    }
#pragma unroll
    for (int p = 0; (CHUNK_SCALES || CENTRED) && p < PARTS; p++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float made = CENTRED ? fmaf(-now[p].zero[i / 2], inputs[c][i], own[p][c][i]) : own[p][c][i];
          sum[p][c][i] = fmaf(made, now[p].scale[i / 2], sum[p][c][i]);
        }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  copies_wait<0>();
  __syncthreads(); // the ring becomes the warps' sums
  float(*partial)[TOKENS][16 * PARTS + 1] = reinterpret_cast<float(*)[TOKENS][16 * PARTS + 1]>(memory);
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) partial[warp][c * 8 + tig * 2 + i % 2][p * 16 + gid + i / 2 * 8] = sum[p][c][i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * tokens; i += THREADS) {
    const int token = i / ROWS, own = i % ROWS, row = first + own;
    if (row >= n) continue;
    float found[2] = {0.f, 0.f};
#pragma unroll
    for (int kind = 0; kind < (GATED ? 2 : 1); kind++) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) found[kind] += partial[w][token][kind * ROWS + own];
      if (!GROUP) found[kind] *= scale_of(scales[row + kind * n]);
#if FLOATING && !defined(BF16)
      found[kind] *= 256.f;
#endif
    }
    float result = found[0] + (bias ? to_float(bias[row]) : 0.f);
    if (GATED) {
      const float gate = rounded(result);
      result = rounded(gate / (1.f + expf(-gate))) * rounded(found[1]);
    }
    out[(long long)token * n + row] = to_real(result);
  }
}

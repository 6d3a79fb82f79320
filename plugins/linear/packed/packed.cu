// Products of up to sixteen tokens with a matrix of codes, y = x W^T + b: codes are read once, as they are stored, and become operands in registers.
//
// Built with -DCOLUMNS (tokens in eights), -DWARPS (of a block: they share the inputs of its sixteen matrix rows), -DDEPTH (chunks of a warp on their
// way), -DBLOCKS (of a multiprocessor, at least: fewer registers would spill, more leave the memory idle), -DGATED (row n and row n + N are gate and up:
// silu(gate) * up), -DTAIL (k ends within a chunk), for bfloat16 -DBF16, and with what `codes.cuh` says.
//
// A lane reads 16 bytes of a row at once and multiplies them by the inputs of the same weights: which of a chunk's inputs are whose in an instruction
// does not matter. What it reads first, nobody writes: it is on its way before the kernel before has ended. Columns without a token repeat the last one.
#include "codes.cuh"
#include "mma.cuh"

#define THREADS (WARPS * 32)
#define CHUNK (4 * WEIGHTS)         // inputs of a warp at once
#define PARTS (GATED ? 2 : 1)       // tiles of sixteen rows
#define ROWS 16                     // results of a block for a token
#define SUMS (PARTS * ROWS)         // of a block for a token
#define TOKENS (8 * COLUMNS)
#define LANE_SCALES (GROUP && GROUP < CHUNK) // else a chunk has one scale a row
#define CHUNK_SCALES (GROUP && !LANE_SCALES)
#define FLOATING (BITS == 8 && !SIGNED)
#define CENTRED (BITS == 4 && !LANE_SCALES) // zeros are subtracted from sums, not from codes
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
// Pair i of a word's codes as numbers: of four bits codes i and i + 4 on top of 128 (fp16: 1024), of eight i and i + 2 (e4m3 in fp16: 256 times too
// small). magic is MAGIC, but not known to be: an instruction takes one constant, the mask.
__device__ __forceinline__ u32 numbers(u32 word, int i, u32 magic) {
#if SIGNED
  const u32 x = i ? word >> 8 : word; // seven bits on top of magic, less magic and once more 128 for those below zero
  return fma_pair((x & 0x007f007fu) | magic, ONE, (x & 0x00800080u) | MAGIC | 0x80008000u);
#elif BITS == 8
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
  float scale[2], zero[2], minimum[2];
};

// x [tokens, k], matrix of n rows (GATED: 2 n), bias [n] or null, out [tokens, n]. n is 16 at least, k a multiple of WEIGHTS, all but what groups share
// is aligned to 16 bytes. A block takes every gridDim.x-th tile, and reads ahead of what it adds up.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) packed(const real* x, const unsigned char* codes, const scale_type* scales,
    const unsigned char* zeros, const scale_type* minima, const __half* scale_blocks, const __half* minimum_blocks, const real* bias, real* out,
    int tokens, int n, int k) {
  __shared__ float partial[WARPS][TOKENS][SUMS + 1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3;
  const int tiles = (n + ROWS - 1) / ROWS, chunks = (k + CHUNK - 1) / CHUNK, groups = groups_of(k);
  const u32 magic = MAGIC | (u32)tokens >> 31;
  start_next();
  const unsigned char* codes_of[PARTS][2]; // of the chunks that the loop is at
  Row rows[PARTS][2];
  uint4 coded[DEPTH][PARTS][2];
  auto there = [&](int chunk) { return TAIL ? chunk * CHUNK + tig * WEIGHTS < k : chunk < chunks; };
  auto fetch = [&](int d, int base, int step) { // of chunk base + step
    const bool has = there(base + step);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (has) coded[d][p][h] = load_once(codes_of[p][h] + step * 64);
        else if (TAIL) coded[d][p][h] = make_uint4(0, 0, 0, 0);
      }
  };
  auto read_shared = [&](Shared (&found)[PARTS], int chunk) {
    if (chunk >= chunks) return;
    const int group = LANE_SCALES ? min((chunk * CHUNK + tig * WEIGHTS) / max(GROUP, 1), groups - 1) : GROUP ? chunk / max(GROUP / CHUNK, 1) : 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        found[p].scale[h] = GROUP ? shared_of(scales, scale_blocks, rows[p][h], group) : 1.f;
        found[p].minimum[h] = MINIMA ? shared_of(minima, minimum_blocks, rows[p][h], group) : -0.f;
        found[p].zero[h] = BITS == 8 ? 0.f : MAGIC_VALUE + zero_of(zeros, rows[p][h], group);
      }
  };
  Shared next[PARTS] = {};
  auto first_of = [&](int tile) { return min(tile * ROWS, n - ROWS); }; // the last tile overlaps the one before it
  auto begin = [&](int tile) {
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = first_of(tile) + gid + 8 * h + p * n;
        rows[p][h] = row_of(row, k);
        codes_of[p][h] = codes + (long long)row * (k / (8 / BITS)) + warp * 64 + tig * 16;
      }
#pragma unroll
    for (int d = 0; d < DEPTH; d++) fetch(d, warp, d * WARPS);
    read_shared(next, warp);
  };
  begin(blockIdx.x);
  wait_for_input();
  const real* inputs_of[COLUMNS];
  auto read_inputs = [&](uint4 (&found)[COLUMNS][WEIGHTS / 8], int base, int step) {
    const bool has = there(base + step);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < WEIGHTS / 8; i++) {
        if (has) found[c][i] = reinterpret_cast<const uint4*>(inputs_of[c] + step * CHUNK)[i];
        else if (TAIL) found[c][i] = make_uint4(0, 0, 0, 0);
      }
  };
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) inputs_of[c] = x + (long long)min(c * 8 + gid, tokens - 1) * k + warp * CHUNK + tig * WEIGHTS;
    uint4 coming[COLUMNS][WEIGHTS / 8]; // of the next chunk, where registers allow it
    if (BITS == 8) read_inputs(coming, warp, 0);
    float sum[PARTS][COLUMNS][4] = {};
    for (int base = warp; base < chunks; base += DEPTH * WARPS) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        const int chunk = base + d * WARPS;
        if (chunk >= chunks) break;
        uint4 given[COLUMNS][WEIGHTS / 8];
        Shared now[PARTS];
        if (BITS == 4) read_inputs(given, base, d * WARPS);
#pragma unroll
        for (int c = 0; BITS == 8 && c < COLUMNS; c++)
#pragma unroll
          for (int i = 0; i < WEIGHTS / 8; i++) given[c][i] = coming[c][i];
#pragma unroll
        for (int p = 0; p < PARTS; p++) now[p] = next[p];
        if (BITS == 8) read_inputs(coming, base, (d + 1) * WARPS);
        if (GROUP) read_shared(next, chunk + WARPS);
        float own[PARTS][COLUMNS][4] = {}, inputs[COLUMNS][4] = {}; // products of this chunk, and its inputs' sums
        auto& into = CHUNK_SCALES || CENTRED ? own : sum;
#pragma unroll
        for (int w = 0; w < 4; w++) { // a word of every row
#pragma unroll
          for (int j = 0; j < 8 / BITS; j++) { // a product
            u32 b[COLUMNS][2];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
              const uint4 eight = given[c][BITS == 8 ? w / 2 : w];
              const u32 low = BITS == 8 ? (w % 2 ? eight.z : eight.x) : j ? eight.y : eight.x;
              const u32 high = BITS == 8 ? (w % 2 ? eight.w : eight.y) : j ? eight.w : eight.z;
              b[c][0] = __byte_perm(low, high, 0x5410), b[c][1] = __byte_perm(low, high, 0x7632);
              if (CENTRED) mma(inputs[c], ONE, ONE, ONE, ONE, b[c][0], b[c][1]);
            }
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
              u32 a[2][2];
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const uint4 v = coded[d][p][h];
                const u32 word = w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                  a[h][i] = numbers(word, 2 * j + i, magic);
                  if (!LANE_SCALES) continue;
                  if (BITS == 4) a[h][i] = fma_pair(a[h][i], ONE, pack_real(-now[p].zero[h], -now[p].zero[h]));
                  a[h][i] = fma_pair(a[h][i], pack_real(now[p].scale[h], now[p].scale[h]), pack_real(now[p].minimum[h], now[p].minimum[h]));
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
        fetch(d, base, (d + DEPTH) * WARPS);
      }
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) inputs_of[c] += DEPTH * WARPS * CHUNK;
#pragma unroll
      for (int p = 0; p < PARTS; p++) codes_of[p][0] += DEPTH * WARPS * 64, codes_of[p][1] += DEPTH * WARPS * 64;
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) partial[warp][c * 8 + tig * 2 + i % 2][p * ROWS + gid + i / 2 * 8] = sum[p][c][i];
    if (tile + gridDim.x < tiles) begin(tile + gridDim.x);
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * tokens; i += THREADS) {
      const int token = i / ROWS, own = i % ROWS, row = first_of(tile) + own;
      float found[2] = {0.f, 0.f};
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) found[p] += partial[w][token][p * ROWS + own];
        if (!GROUP) found[p] *= to_number(scales[row + p * n]);
#if FLOATING && !defined(BF16)
        found[p] *= 256.f;
#endif
      }
      float result = found[0] + (bias ? to_float(bias[row]) : 0.f);
      if (GATED) {
        const float gate = rounded(result);
        result = rounded(gate / (1.f + expf(-gate))) * rounded(found[1]);
      }
      out[(long long)token * n + row] = to_real(result);
    }
    if (tile + gridDim.x < tiles) __syncthreads(); // the next tile writes over the sums
  }
}

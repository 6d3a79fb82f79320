// Decode attention over encoded pages and a residual in full precision: split over blocks of a row, merged by whichever of them ends last.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G <= 8), -DBITS (2 or 4: codes with scale and minimum; 8: e4m3 with a scale a token),
// -DKEY_GROUP (tokens, multiple of 16), -DVALUE_GROUP (channels, multiple of 16), -DWARPS, -DSTAGES, -DPHASED (runs are counted from the slot's origin)
// and -DBF16. How codes lie: `layout.py`.
//
// A step of a warp is 32 tokens. Codes become numbers of a few significant bits by one mask into the mantissa of a constant and one multiplication, and
// go to the matrix instruction as they are: the keys' scale is folded into the query, the number that CENTRE stands for is a product of its own; the
// values' scale is folded into the weights, the number of CENTRE is one product a tile.
#include "codes.cuh"
#include "tile.cuh"

#define MOST_SPLITS 64
#define RING_BYTES (STAGES * STEP_BYTES > TILE_ROWS_BYTES ? STAGES * STEP_BYTES : TILE_ROWS_BYTES)
// e4m3 moved into the fields of a wider number is too small by a power of two. What the query and the values' scale are multiplied by keeps products
// within range, the rest follows in fp32.
#if FLOATING && defined(BF16)
#define QUERY_UNIT 0x1p100f
#define KEY_UNIT 0x1p20f
#define VALUE_UNIT 0x1p110f
#define OUTPUT_UNIT 0x1p10f
#elif FLOATING
#define QUERY_UNIT 1.f
#define KEY_UNIT 256.f
#define VALUE_UNIT 256.f
#define OUTPUT_UNIT 1.f
#endif

struct SeenCodes : Seen {
  __device__ __forceinline__ void scores(float (&s)[2][4], const u32 (&query)[D / 8], const char* stage, u32 magic) const {
    const int lane = threadIdx.x & 31, tig = lane & 3;
    float base[4] = {0.f, 0.f, 0.f, 0.f};
    u32 words[2][WORDS];
#pragma unroll
    for (int u = 0; u < 2; u++) {
      s[u][0] = s[u][1] = s[u][2] = s[u][3] = 0.f;
      read_words(words[u], stage + KEYS_AT + u * TILE_BYTES);
    }
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; g++) {
#pragma unroll
      for (int pair = 0; pair < D / 32; pair++) {
#if !FLOATING
        const uint4 x = *reinterpret_cast<const uint4*>(stage + KEY_META_AT + g * 2 * D + (pair * 4 + tig) * 16);
        const u32 scale[4] = {x.x, x.y, x.z, x.w};
#endif
#pragma unroll
        for (int k = 2 * pair; k < 2 * pair + 2; k++) {
          const u32 q0 = query[2 * k], q1 = query[2 * k + 1];
#if FLOATING
          const u32 b0 = q0, b1 = q1;
#else
          const int at = (k & 1) * 2;
          const u32 b0 = times(q0, scale[at]), b1 = times(q1, scale[at + 1]);
          u32 low[4]; // every token's row is the group's minimum
          read4(low, shared_at(stage) + KEY_META_AT + KEY_META + g * 2 * D + k * 32 + (lane >> 4) * 16);
          const u32 mid0 = centred(low[0], scale[at]), mid1 = centred(low[2], scale[at + 1]);
          mma(KEY_GROUPS == 1 ? base : s[g], mid0, mid0, mid1, mid1, q0, q1);
#endif
#pragma unroll
          for (int u = KEY_GROUPS == 1 ? 0 : g; u < (KEY_GROUPS == 1 ? 2 : g + 1); u++) {
            const u32 word0 = words[u][k * 4 / HALF_CODES], word1 = words[u][(k * 4 + 2) / HALF_CODES];
            const int i = k * 4 % HALF_CODES, j = (k * 4 + 2) % HALF_CODES;
            mma(s[u], numbers(word0, i, magic), numbers(word0, i + 1, magic), numbers(word1, j, magic), numbers(word1, j + 1, magic), b0, b1);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < 2; u++) {
#pragma unroll
      for (int i = 0; i < 4; i++) s[u][i] += base[i];
    }
#if FLOATING
    const real* scales = reinterpret_cast<const real*>(stage + KEY_META_AT) + (lane >> 2);
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const float x = to_float(scales[16 * u]) * KEY_UNIT, y = to_float(scales[16 * u + 8]) * KEY_UNIT;
      s[u][0] *= x, s[u][1] *= x, s[u][2] *= y, s[u][3] *= y;
    }
#endif
  }

  // Attend to 32 tokens, all of which exist.
  __device__ __forceinline__ void take_codes(const u32 (&query)[D / 8], const char* stage, const uint4* zeros, u32 magic, float scale_log2) {
    const int lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
    float s[2][4];
    scores(s, query, stage, magic);
    float mx = fmaxf(fmaxf(s[0][0], s[0][2]), fmaxf(s[1][0], s[1][2])), my = fmaxf(fmaxf(s[0][1], s[0][3]), fmaxf(s[1][1], s[1][3]));
    raise(mx * scale_log2, my * scale_log2);
    mx = top[0], my = top[1];
#if FLOATING
    const real* scales = reinterpret_cast<const real*>(stage + VALUE_META_AT) + gid;
#endif
#pragma unroll
    for (int u = 0; u < 2; u++) {
      float x0 = exp2_fast(s[u][0] * scale_log2 - mx), y0 = exp2_fast(s[u][1] * scale_log2 - my);
      float x1 = exp2_fast(s[u][2] * scale_log2 - mx), y1 = exp2_fast(s[u][3] * scale_log2 - my);
      sum[0] += x0 + x1, sum[1] += y0 + y1;
#if FLOATING
      const float vx = to_float(scales[16 * u]) * VALUE_UNIT, vy = to_float(scales[16 * u + 8]) * VALUE_UNIT;
      x0 *= vx, y0 *= vx, x1 *= vy, y1 *= vy;
#endif
      const u32 p0 = transpose8(pack_real(x0, y0)), p1 = transpose8(pack_real(x1, y1));
      u32 words[WORDS];
      read_words(words, stage + VALUES_AT + u * TILE_BYTES);
#pragma unroll
      for (int g = 0; g < SHARE; g++) {
        u32 b0 = p0, b1 = p1;
#if !FLOATING
        const uint2 scale = *reinterpret_cast<const uint2*>(stage + VALUE_META_AT + u * 32 * SHARE + (g * 4 + tig) * 8);
        b0 = times(p0, scale.x), b1 = times(p1, scale.y);
#endif
#pragma unroll
        for (int m = g * (VALUE_GROUP / 16); m < (g + 1) * (VALUE_GROUP / 16); m++) {
          const int i = 2 * m, j = 2 * (D / 16 + m);
          const u32 word0 = words[i / HALF_CODES], word1 = words[j / HALF_CODES];
          mma(acc[m], numbers(word0, i % HALF_CODES, magic), numbers(word0, i % HALF_CODES + 1, magic), numbers(word1, j % HALF_CODES, magic),
              numbers(word1, j % HALF_CODES + 1, magic), b0, b1);
        }
      }
#if !FLOATING
      const int row = (lane & 7) + (lane >> 3 & 1) * 8; // of a group of channels; there are none behind SHARE
      const char* minima = stage + VALUE_META_AT + VALUE_META + u * 32 * SHARE + row * 32 + (lane >> 4) * 16;
      u32 a[4];
      read4(a, shared_at(SHARE < 16 && row >= SHARE ? reinterpret_cast<const char*>(zeros) : minima));
#pragma unroll
      for (int half = 0; half < (SHARE > 8 ? 2 : 1); half++) {
        if (gid + 8 * half >= SHARE) continue;
        const uint2 scale = *reinterpret_cast<const uint2*>(stage + VALUE_META_AT + u * 32 * SHARE + ((gid + 8 * half) * 4 + tig) * 8);
        a[half] = centred(a[half], scale.x), a[2 + half] = centred(a[2 + half], scale.y);
      }
      mma(low, a[0], a[1], a[2], a[3], p0, p1);
#endif
    }
  }

  // Add the minima's outputs to those of every channel of their group.
  __device__ __forceinline__ void add_minima() {
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
      const int g = m * 16 / VALUE_GROUP, from = g % 8 * 4 + (threadIdx.x & 3);
      const float x = __shfl_sync(~0u, low[g / 8 * 2], from), y = __shfl_sync(~0u, low[g / 8 * 2 + 1], from);
      acc[m][0] += x, acc[m][1] += y, acc[m][2] += x, acc[m][3] += y;
    }
  }
};

// q [B, q_stride]; codes and metadata in pages of page_size tokens; keys, values [Z, Hk, ring, D] the residual, token t at place t % ring; table
// [B, table_stride], lens [B], slots [B], origins [Z]. Behind `lag` tokens, runs of `residual` keys are encoded, and values older than the residual
// (together: with the keys). Scratch: parts [B, Hk, splits, G, D] and tops [B, Hk, splits, 8, 2] fp32, counters [B, Hk] int32, zero before and after. Writes out
// [B, out_stride].
extern "C" __global__ void __launch_bounds__(THREADS, (D > 128 ? 256 : 512) / THREADS) attend_encoded(const real* q, const char* key_codes, const char* key_scale,
    const char* key_minimum, const char* value_codes, const char* value_scale, const char* value_minimum, const char* keys, const char* values,
    const int* table, const int* lens, const int* slots, const int* origins, real* out, float* parts, float* tops, int* counters, int q_stride,
    int out_stride, int table_stride, int page_size, int ring_tokens, int residual, int lag, int together, float scale_log2) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Block block;
  __shared__ int ticket;
  __shared__ uint4 zeros;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int splits = gridDim.x, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  dependency_wait();
  const int stored = lens[b], slot = slots[b];
  const int* pages = table + (long long)b * table_stride;
#ifdef PHASED
  const int origin = origins[slot];
#else
  const int origin = 0;
#endif
  const int keys_end = origin + (stored - lag - origin) / residual * residual;
  const int values_end = together ? keys_end : max(0, stored - lag - residual);
  const int coded = min(keys_end, values_end) / STEP * STEP, steps = coded / STEP;
  const int workers = splits * WARPS, worker = blockIdx.x * WARPS + warp;
  const int begin = worker * (steps / workers) + min(worker, steps % workers), mine = steps / workers + (worker < steps % workers); // contiguous
  const Codes codes = {key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum};
  auto row_of = [&](int token) { const int page = token / page_size; return (pages[page] * heads + head) * page_size + token - page * page_size; };
  auto look = [&](int j) { return j + lane < mine ? row_of((begin + j + lane) * STEP) : 0; }; // of 32 steps, one a lane

  u32 query[D / 8];
  load_query(query, q + (long long)b * q_stride + head * GROUP_HEADS * D);
#if FLOATING
#pragma unroll
  for (int k = 0; k < D / 8; k++) query[k] = times(query[k], bits_of(both(QUERY_UNIT)));
#endif
  const u32 magic = MAGIC | (u32)(page_size >> 30); // pages are smaller
  if (threadIdx.x == 0) zeros = make_uint4(0, 0, 0, 0);
  __syncthreads();
  char* own = ring + warp * RING_BYTES;
  const u32 own_at = shared_at(own);
  int rows = look(0), rows_ahead = mine > 32 ? look(32) : 0;
  auto fetch = [&](int j) {
    if (j < mine) {
      if (j > 0 && (j & 31) == 0) {
        rows = rows_ahead;
        if (j + 32 < mine) rows_ahead = look(j + 32);
      }
      codes.fetch(own_at + j % STAGES * STEP_BYTES, __shfl_sync(~0u, rows, j & 31));
    }
    copies_commit();
  };
#pragma unroll
  for (int j = 0; j < STAGES - 1; j++) fetch(j);
  SeenCodes seen;
  seen.clear();
  for (int j = 0; j < mine; j++) {
    fetch(j + STAGES - 1);
    copies_wait<STAGES - 1>();
    __syncwarp();
    seen.take_codes(query, own + j % STAGES * STEP_BYTES, &zeros, magic, scale_log2);
    __syncwarp();
  }
#if FLOATING
#pragma unroll
  for (int k = 0; k < D / 8; k++) query[k] = times(query[k], bits_of(both(1.f / QUERY_UNIT)));
#pragma unroll
  for (int k = 0; k < D / 16; k++) seen.acc[k][0] *= OUTPUT_UNIT, seen.acc[k][1] *= OUTPUT_UNIT, seen.acc[k][2] *= OUTPUT_UNIT, seen.acc[k][3] *= OUTPUT_UNIT;
#else
  seen.add_minima();
#endif
  copies_wait<0>();

  // What is left: tokens whose key or value is no code, and codes of an unfinished step. Blocks share the tiles evenly.
  const long long ring_row = (long long)(slot * heads + head) * ring_tokens;
  for (int tile = warp * splits + blockIdx.x; tile * TILE < stored - coded; tile += workers) {
    __syncwarp();
    const int begin_at = coded + tile * TILE, there = min(TILE, stored - begin_at);
    const int rows16 = row_of(begin_at + min(lane & 15, there - 1));
    const bool some_keys = begin_at < keys_end, some_values = begin_at < values_end;
#pragma unroll 1
    for (int base = lane; base < TILE * CHUNKS; base += 64) {
      uint4 key[2], value[2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int i = base + 32 * n, r = min(i / CHUNKS, there - 1), c = i % CHUNKS, token = begin_at + r;
        const long long row = __shfl_sync(~0u, rows16, r), at = (ring_row + token % ring_tokens) * ROW + c * 16;
        key[n] = __ldcg(reinterpret_cast<const uint4*>(keys + at)), value[n] = __ldcg(reinterpret_cast<const uint4*>(values + at));
        if (some_keys) { // also of tokens that have none: any bytes of the page will do
          const uint4 x = codes.key(row, c);
          if (token < keys_end) key[n] = x;
        }
        if (some_values) {
          const uint4 x = codes.value(row, c);
          if (token < values_end) value[n] = x;
        }
        if (i / CHUNKS >= there) key[n] = value[n] = make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int i = base + 32 * n;
        *reinterpret_cast<uint4*>(own + place(i / CHUNKS, i % CHUNKS)) = key[n];
        *reinterpret_cast<uint4*>(own + TILE * ROW + place(i / CHUNKS, i % CHUNKS)) = value[n];
      }
    }
    __syncwarp();
    seen.take(query, own_at, (1u << there) - 1, scale_log2);
  }

  float* laid = reinterpret_cast<float*>(ring);
  block.gather(seen, laid);
  real* to = out + (long long)b * out_stride + head * GROUP_HEADS * D;
  if (splits == 1) {
    for (int i = threadIdx.x * 4; i < GROUP_HEADS * D; i += THREADS * 4) store_output(to + i, Block::output(laid, i / D, i % D), 1.f / block.sum[i / D]);
    return;
  }
  const long long row = (long long)b * heads + head;
  float *part = parts + row * splits * (GROUP_HEADS * D), *top = tops + row * splits * (2 * HEADS8);
  for (int i = threadIdx.x * 4; i < GROUP_HEADS * D; i += THREADS * 4)
    __stcg(reinterpret_cast<float4*>(part + blockIdx.x * (GROUP_HEADS * D) + i), Block::output(laid, i / D, i % D));
  if (threadIdx.x < HEADS8)
    __stcg(reinterpret_cast<float2*>(top + (blockIdx.x * HEADS8 + threadIdx.x) * 2), make_float2(block.top[threadIdx.x], block.sum[threadIdx.x]));
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(counters + row, 1);
  __syncthreads();
  if (ticket != splits - 1) return;
  __threadfence();
  if (threadIdx.x == 0) counters[row] = 0;
  for (int h = warp; h < HEADS8; h += WARPS) { // each block's share of the softmax, a block a lane
    float m = -1e30f, l = 0.f;
    for (int i = lane; i < splits; i += 32) m = fmaxf(m, __ldcg(top + (i * HEADS8 + h) * 2));
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    for (int i = lane; i < splits; i += 32) {
      const float2 own = __ldcg(reinterpret_cast<const float2*>(top + (i * HEADS8 + h) * 2));
      const float f = exp2_fast(own.x - m);
      laid[i * HEADS8 + h] = f, l += f * own.y;
    }
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) l += __shfl_xor_sync(~0u, l, o);
    if (lane == 0) block.sum[h] = l;
  }
  __syncthreads();
  // Teams of threads share the parts; their sums meet in shared memory.
  const int cells = GROUP_HEADS * D / 4, teams = THREADS >= 2 * cells ? THREADS / cells : 1;
  float4* sums = reinterpret_cast<float4*>(laid + MOST_SPLITS * HEADS8);
  for (int i = threadIdx.x; i < cells * teams; i += THREADS) {
    const int cell = i % cells, h = cell * 4 / D;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int k = i / cells; k < splits; k += teams) {
      const float f = laid[k * HEADS8 + h];
      const float4 y = __ldcg(reinterpret_cast<const float4*>(part + k * (GROUP_HEADS * D)) + cell);
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
    if (teams == 1) store_output(to + cell * 4, x, 1.f / block.sum[h]);
    else sums[i] = x;
  }
  if (teams == 1) return;
  __syncthreads();
  for (int i = threadIdx.x; i < cells; i += THREADS) {
    float4 x = sums[i];
#pragma unroll
    for (int t = 1; t < teams; t++) {
      const float4 y = sums[t * cells + i];
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    store_output(to + i * 4, x, 1.f / block.sum[i * 4 / D]);
  }
}

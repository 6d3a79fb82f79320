// Decode attention over everything stored: the tokens of all sequences and key-value heads, laid end to end, are shared out evenly among the blocks.
//
// Built as tile.cuh says, with -DRAGGED where every head has its own length and pages, with -DMIXED where some tokens are encoded. A sequence's
// heads are rows; a row is read in units of a block of sixteen tokens for every warp. A block's share may begin within one row and end within another.
// Where several blocks have parts of a row, the last of them to finish merges all.
#include "mixed.cuh"

#define UNIT_TOKENS (WARPS * TILE)
#define QUADS (GROUP_HEADS * D / 4)
#ifndef MERGED_AT_ONCE // shares that a thread asks for before it waits: with more registers a block would leave none to the append kernel beside it
#define MERGED_AT_ONCE (D > 128 ? 16 : 17)
#endif
#define SHARE ((GROUP_HEADS * (D + 2) + 3) / 4 * 4) // floats that a block leaves of a row: outputs [G, D], largest scores [G], sums [G]

// Units of a sequence by its length.
__device__ __forceinline__ int units_of(int stored) { return (stored + UNIT_TOKENS - 1) / UNIT_TOKENS; }
#ifdef NIBBLES // of which the newest token is not one
#define PLAIN_OF(b) 1
#define CODED_OF(b) (lens[b] - 1)
#else
#define PLAIN_OF(b) lens[b]
#define CODED_OF(b) coded_lens[b]
#endif
#ifdef MIXED // encoded tokens come behind the others
#define UNITS(b) (units_of(PLAIN_OF(b)) + units_of(CODED_OF(b)))
#else
#define UNITS(b) units_of(lens[b])
#endif

struct Row {
  int b, head, units;
  long long first; // its first unit among those of all rows
};
// The row of a unit; every lane of a warp calls it. Units are ordered by sequence, then head.
__device__ __forceinline__ Row find_row(const int* lens, const int* coded_lens, int batch, int heads, long long unit) {
  const int lane = threadIdx.x & 31;
  int before = 0;
  for (int c = 0;; c += 32) {
    const int own = c + lane < batch ? UNITS(c + lane) : 0, end = before + warp_scan(own);
    const u32 hit = __ballot_sync(~0u, (long long)end * heads > unit);
    if (hit || c + 32 >= batch) {
      const int l = __ffs(hit) - 1, units = __shfl_sync(~0u, own, l), start = __shfl_sync(~0u, end, l) - units;
      const int head = (int)((unit - (long long)start * heads) / units);
      return {c + l, head, units, (long long)start * heads + (long long)head * units};
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

// Merge what blocks from `low` to `high` have left of a row; with -DNIBBLES also lse [G]. Scratch holds THREADS float4, then a weight a block and head.
__device__ __forceinline__ void merge(const float* shares, long long low, long long high, real* to, float* scratch, float* lse) {
  const int blocks = (int)(high - low + 1), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float* weights = scratch + 4 * THREADS; // [blocks, G]
  // The first block has the row as its last part, the others as their first.
  auto share = [&](int p) { return shares + (2 * (low + p) + (p == 0)) * SHARE; };
  // Where the output has fewer pieces than there are threads, several threads share a piece. A thread asks for AT_ONCE shares before it waits for one.
  constexpr int TEAMS = QUADS < THREADS ? THREADS / QUADS : 1, AT_ONCE = MERGED_AT_ONCE;
  const int team = TEAMS > 1 ? threadIdx.x / QUADS : 0, first = TEAMS > 1 ? threadIdx.x % QUADS : threadIdx.x;
  float4 ahead[AT_ONCE];
  auto ask = [&](int i, int from) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int p = from + k * TEAMS;
      if (p < blocks) ahead[k] = __ldcg(reinterpret_cast<const float4*>(share(p)) + i);
    }
  };
  if (first < QUADS && team < TEAMS) ask(first, team);
  for (int h = warp; h < GROUP_HEADS; h += WARPS) {
    float m = -1e30f, l = 0.f;
    for (int p = lane; p < blocks; p += 32) m = fmaxf(m, __ldcg(share(p) + GROUP_HEADS * D + h));
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    for (int p = lane; p < blocks; p += 32) {
      const float w = exp2_fast(__ldcg(share(p) + GROUP_HEADS * D + h) - m);
      weights[p * GROUP_HEADS + h] = w, l += w * __ldcg(share(p) + GROUP_HEADS * (D + 1) + h);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
#ifdef NIBBLES
    if (lane == 0) lse[h] = m + log2f(l);
#endif
    __syncwarp();
    for (int p = lane; p < blocks; p += 32) weights[p * GROUP_HEADS + h] /= l;
  }
  __syncthreads();
  float4* sums = reinterpret_cast<float4*>(scratch);
  for (int i = first; i < QUADS && team < TEAMS; i += THREADS) {
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i != first) ask(i, team);
    for (int from = team; from < blocks; from += AT_ONCE * TEAMS) {
      if (from != team) ask(i, from);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int p = from + k * TEAMS;
        if (p < blocks) {
          const float w = weights[p * GROUP_HEADS + i * 4 / D];
          x.x += ahead[k].x * w, x.y += ahead[k].y * w, x.z += ahead[k].z * w, x.w += ahead[k].w * w;
        }
      }
    }
    if (TEAMS == 1) store_output(to + i * 4, x, 1.f);
    else sums[threadIdx.x] = x;
  }
  if (TEAMS > 1) {
    __syncthreads();
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
      float4 x = sums[i];
      for (int t = 1; t < TEAMS; t++) {
        const float4 y = sums[i + t * QUADS];
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      store_output(to + i * 4, x, 1.f);
    }
  }
}

// q [B, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride]; lens [B], at least 1; page_size a multiple of 16. Writes out
// [B, out_stride]. Where ragged: keys, values [P, page_size, D], table [Hk, B, table_stride], lens [Hk, B], so that heads are sequences of one head.
// Where mixed: coded_table [B, table_stride], coded_lens [B], codes in the bytes of keys and values as [P, Hk, FOLD page_size, D], scales [P, Hk,
// FOLD page_size]; else null. With -DNIBBLES: keys, values [slots, Hk, 1, D] are the newest tokens, coded_table [B] the slots; the other tokens of lens
// are codes of the pages in table: key_codes, value_codes [P, Hk, page_size, D / 2], scales and zero points [P, Hk, page_size]; lse [B, Hq] takes the
// logarithms to base 2 of the sums of the weights. shares [2 blocks, SHARE];
// arrived [B Hk] zeros, and zeros again behind it. Tokens before the newest and page numbers were there before the kernel before this one began.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_dense(const real* q, const char* keys, const char* values, const int* table,
    const int* lens, real* out, float* shares, int* arrived, int batch, int heads, int q_stride, int out_stride, int table_stride, int page_size,
    float scale_log2, const int* coded_table, const int* coded_lens, const real* key_scale, const real* value_scale,
    const char* key_codes, const char* value_codes, const real* key_zero, const real* value_zero, float* lse) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Block block;
  __shared__ int is_last;
  MARK(0)
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#ifdef RAGGED
  const int sequences = batch;
  batch *= heads, heads = 1;
#endif
  int in_all = 0;
  for (int c = 0; c < batch; c += 32) in_all += __shfl_sync(~0u, warp_scan(c + lane < batch ? UNITS(c + lane) : 0), 31);
  const long long units = (long long)in_all * heads, blocks = min((long long)gridDim.x, units);
  long long unit = blockIdx.x < blocks ? blockIdx.x * units / blocks : 0;
  const long long end = blockIdx.x < blocks ? (blockIdx.x + 1) * units / blocks : 0;
  const u32 ring_at = shared_at(ring) + warp * STAGES * STAGE_BYTES;
  float* laid = reinterpret_cast<float*>(ring);
  bool waited = false;

  while (unit < end) {
    const Row row = find_row(lens, coded_lens, batch, heads, unit);
    const int stored = PLAIN_OF(row.b), from = (int)(unit - row.first), to = (int)min((long long)row.units, from + (end - unit));
    const int* pages = table + (long long)row.b * table_stride;
#ifdef RAGGED
    const int own = row.b % sequences, head = row.b / sequences;
#else
    const int own = row.b, head = row.head;
#endif
#ifdef MIXED
    const int plain = units_of(stored), coded = CODED_OF(row.b);
#ifdef NIBBLES
    const int *coded_pages = pages, *newest = coded_table + row.b;
#else
    const int *coded_pages = coded_table + (long long)row.b * table_stride, *newest = nullptr;
#endif
    auto in_codes = [&](int j) { return from + j >= plain; };
    auto token_of = [&](int j) { return (from + j - (in_codes(j) ? plain : 0)) * UNIT_TOKENS + warp * TILE; };
    auto left_of = [&](int j) { return (in_codes(j) ? coded : stored) - token_of(j); };
    auto page_at = [&](int j) { return in_codes(j) ? coded_pages + token_of(j) / (FOLD * page_size) : newest ? newest : pages + token_of(j) / page_size; };
#else
    auto token_of = [&](int j) { return (from + j) * UNIT_TOKENS + warp * TILE; };
    auto left_of = [&](int j) { return stored - token_of(j); };
    auto page_at = [&](int j) { return pages + token_of(j) / page_size; };
#endif
    const int mine = to - from - (left_of(to - from - 1) <= 0); // blocks of tokens of this warp, of which one before the codes may be empty
    // Lane l knows the page of block l of the 32 at hand, and of the 32 behind them.
    auto page_of = [&](int j) { return j < mine && left_of(j) > 0 ? __ldcg(page_at(j)) : 0; };
    int here = page_of(lane), ahead = page_of(lane + 32);
    auto fetch = [&](int j, int slot) {
      if (j < mine) {
        if (j > 0 && (j & 31) == 0) here = ahead, ahead = page_of(j + lane + 32);
        const int token = token_of(j), there = left_of(j);
        const long long page = __shfl_sync(~0u, here, j & 31) * heads + row.head, rows = page * page_size;
        const u32 into = ring_at + slot * STAGE_BYTES;
#ifdef MIXED
        if (in_codes(j)) {
          const long long first = rows * FOLD + token % (FOLD * page_size), at = first * CODES;
#ifdef NIBBLES
          const char *k = key_codes + at, *v = value_codes + at;
#else
          const char *k = keys + at, *v = values + at;
#endif
#pragma unroll
          for (int i = lane; i < TILE * CODES / 16; i += 32) {
            const u32 size = i / (CODES / 16) < there ? 16 : 0;
            copy16_sized(into + i * 16, k + i * 16, size);
            copy16_sized(into + TILE * ROW + i * 16, v + i * 16, size);
          }
#ifdef NIBBLES // of tokens that do not exist zeros
          if (lane < 8) {
            const real* source = (lane < 2 ? key_scale : lane < 4 ? key_zero : lane < 6 ? value_scale : value_zero) + first + lane % 2 * 8;
            copy16_sized(into + lane / 4 * TILE * ROW + TILE * CODES + lane % 4 * 16, source, max(0, min(16, (there - lane % 2 * 8) * 2)));
          }
          copies_commit();
          return;
#endif
          if (lane < 4) {
            const real* scales = (lane < 2 ? key_scale : value_scale) + first + lane % 2 * 8;
            copy16_sized(into + lane / 2 * TILE * ROW + TILE * CODES + lane % 2 * 16, scales, there > 0 ? 16 : 0);
          }
          copies_commit();
          return;
        }
#endif
#ifdef NIBBLES
        const long long at = page * ROW; // a slot has one such token
#else
        const long long at = (rows + token % page_size) * ROW;
#endif
#pragma unroll
        for (int i = lane; i < TILE * CHUNKS; i += 32) {
          const u32 size = i / CHUNKS < there ? 16 : 0, where = into + place(i / CHUNKS, i % CHUNKS);
          copy16_sized(where, keys + at + i * 16, size);
          copy16_sized(where + TILE * ROW, values + at + i * 16, size);
        }
      }
      copies_commit();
    };
    // The first blocks need not wait, unless the newest token is among them.
#ifdef MIXED
    if (!waited) dependency_wait(), waited = true;
#endif
    if (!waited && mine > 0 && token_of(min(mine, STAGES - 1) - 1) + TILE >= stored) dependency_wait(), waited = true;
#pragma unroll
    for (int j = 0; j < STAGES - 1; j++) fetch(j, j);
    if (!waited) dependency_wait(), waited = true;
    MARK(1)
    u32 query[TILES][D / 8];
    load_query(query, q + (long long)own * q_stride + (long long)head * GROUP_HEADS * D);
    Seen seen;
    seen.clear();
    for (int j = 0, slot = 0, free = STAGES - 1; j < mine; j++) {
      fetch(j + STAGES - 1, free);
      copies_wait<STAGES - 1>();
      __syncwarp();
      const int there = left_of(j);
#ifdef MIXED
      const u32 ok = there <= 0 ? 0u : there < TILE ? (1u << there) - 1 : 0xffffu;
      float2 key = make_float2(scale_log2, scale_log2), value = make_float2(1.f, 1.f);
      if (in_codes(j)) {
        char* stage = ring + (warp * STAGES + slot) * STAGE_BYTES;
        key = expand(stage), value = expand(stage + TILE * ROW);
        key.x *= scale_log2, key.y *= scale_log2;
        const int gid = lane >> 2; // scales of tokens that do not exist may be anything
        value.x = ok >> gid & 1 ? value.x : 0.f, value.y = ok >> (gid + 8) & 1 ? value.y : 0.f;
      }
      seen.take(query, ring_at + slot * STAGE_BYTES, ok, key.x, key.y, value.x, value.y);
#else
      seen.take(query, ring_at + slot * STAGE_BYTES, there < TILE ? (1u << there) - 1 : 0xffffu, scale_log2);
#endif
      __syncwarp();
      free = slot, slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    copies_wait<0>();
    MARK(2)
    block.gather(seen, laid);
    MARK(3)
    real* target = out + (long long)own * out_stride + (long long)head * GROUP_HEADS * D;
    // The block with unit u is the last whose share begins at or before it.
    const long long low = ((row.first + 1) * blocks - 1) / units, high = ((row.first + row.units) * blocks - 1) / units;
    float* noted = lse + ((long long)row.b * heads + row.head) * GROUP_HEADS;
    if (low == high) {
#ifdef NIBBLES
      if (threadIdx.x < GROUP_HEADS) noted[threadIdx.x] = block.top[threadIdx.x] + log2f(block.sum[threadIdx.x]);
#endif
      for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        store_output(target + i * 4, Block::output(laid, i * 4 / D, i * 4 % D), 1.f / block.sum[i * 4 / D]);
      }
    } else {
      float* share = shares + (2ll * blockIdx.x + (blockIdx.x == low)) * SHARE;
      for (int i = threadIdx.x; i < QUADS; i += THREADS) __stcg(reinterpret_cast<float4*>(share) + i, Block::output(laid, i * 4 / D, i * 4 % D));
      if (threadIdx.x < GROUP_HEADS) {
        __stcg(share + GROUP_HEADS * D + threadIdx.x, block.top[threadIdx.x]);
        __stcg(share + GROUP_HEADS * (D + 1) + threadIdx.x, block.sum[threadIdx.x]);
      }
      __threadfence();
      __syncthreads();
      int* count = arrived + (long long)row.b * heads + row.head;
      if (threadIdx.x == 0) is_last = atomicAdd(count, 1) == (int)(high - low);
      __syncthreads();
      MARK(4)
      if (is_last) {
        __threadfence();
        merge(shares, low, high, target, laid, noted);
        MARK(5)
        if (threadIdx.x == 0) *count = 0;
      }
    }
    __syncthreads(); // the ring and is_last are free again
    unit += to - from;
  }
  if (!waited) dependency_wait();
}

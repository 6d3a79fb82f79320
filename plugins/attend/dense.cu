// Decode attention over everything stored: the tokens of all sequences and key-value heads, laid end to end, are shared out evenly among the blocks.
//
// Built as tile.cuh says, with -DRAGGED where every head has its own length and pages, with -DRINGS where a new token takes the place of another, with
// -DMIXED where some tokens are encoded. A sequence's heads are rows; a row is read in units of a block of sixteen tokens for every warp. A block's share may begin within one row and end within another.
// Where several blocks have parts of a row, they exchange what they have seen, and each merges a share of it.
#include "mixed.cuh"
#include "split_kv.cuh"

#define UNIT_TOKENS (WARPS * TILE)
#define HALF_BYTES (TILE * ROW) // of a ring: the keys or the values of a block of tokens

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
  int b, head, units, first; // units, and the first of them among those of all rows
};
// The row of a unit; every lane of a warp calls it. Units are ordered by sequence, then head.
__device__ __forceinline__ Row find_row(const int* lens, const int* coded_lens, int batch, int heads, int unit) {
  const int lane = threadIdx.x & 31;
  int before = 0;
  for (int c = 0;; c += 32) {
    const int own = c + lane < batch ? UNITS(c + lane) : 0, end = before + warp_scan(own);
    const u32 hit = __ballot_sync(~0u, end * heads > unit);
    if (hit || c + 32 >= batch) {
      const int l = __ffs(hit) - 1, units = __shfl_sync(~0u, own, l), start = __shfl_sync(~0u, end, l) - units;
      const int head = (unit - start * heads) / units;
      return {c + l, head, units, start * heads + head * units};
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

// q [B, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride]; lens [B], at least 1; page_size a multiple of 16. Writes out
// [B, out_stride]. Where ragged: keys, values [P, page_size, D], table [Hk, B, table_stride], lens [Hk, B], so that heads are sequences of one head.
// Where mixed: coded_table [B, table_stride], coded_lens [B], codes in the bytes of keys and values as [P, Hk, FOLD page_size, D], scales [P, Hk,
// FOLD page_size]; else null. With -DNIBBLES: keys, values [slots, Hk, 1, D] are the newest tokens, coded_table [B] the slots; the other tokens of lens
// are codes of the pages in table: key_codes, value_codes [P, Hk, page_size, D / 2], scales and zero points [P, Hk, page_size]; lse [B, Hq] takes the
// logarithms to base 2 of the sums of the weights. shares [2 blocks, QUADS +
// GROUP_HEADS + blocks] words EMPTY and unmerged [2 blocks] zeros, and so again behind it. Page numbers, and tokens before the newest unless
// -DRINGS, were there before the kernel before this one began.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_dense(const real* q, const char* keys, const char* values, const int* table,
    const int* lens, real* out, uint4* shares, int* unmerged, int batch, int heads, int q_stride, int out_stride, int table_stride, int page_size,
    float scale_log2, const int* coded_table, const int* coded_lens, const real* key_scale, const real* value_scale,
    const char* key_codes, const char* value_codes, const real* key_zero, const real* value_zero, float* lse) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Block block;
  __shared__ MergeState state;
  MARK(0)
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#ifdef RAGGED
  const int sequences = batch;
  batch *= heads, heads = 1;
#endif
  int units = 0;
  for (int c = 0; c < batch; c += 32) units += __shfl_sync(~0u, warp_scan(c + lane < batch ? UNITS(c + lane) : 0), 31);
  units *= heads;
  const int blocks = min((int)gridDim.x, units), self = blockIdx.x;
  // Divisions take long, so lanes do several at once, and while keys are still on their way.
  const int bound = self < blocks ? (int)((long long)(self + (lane & 1)) * units / blocks) : 0;
  int unit = __shfl_sync(~0u, bound, 0);
  const int end = __shfl_sync(~0u, bound, 1);
  const u32 ring_at = shared_at(ring) + warp * HALVES * HALF_BYTES;
  float* laid = reinterpret_cast<float*>(ring + WARPS * HALVES * HALF_BYTES);
  bool waited = false;
  Parts front, back; // of the first row and of the last, where other blocks have parts of it
  front.blocks = back.blocks = 0;

  // The piece at hand: tokens of a row from unit `from` on, of which this warp has `mine` blocks.
  int b = 0, kv = 0, from = 0, mine = 0, stored = 0, here = 0, ahead = 0;
  Parts parts;
  const int* pages = table;
#ifdef MIXED
  int plain = 0, coded = 0;
  const int *coded_pages = table, *newest = nullptr;
  auto in_codes = [&](int j) { return from + j >= plain; };
  auto token_of = [&](int j) { return (from + j - (in_codes(j) ? plain : 0)) * UNIT_TOKENS + warp * TILE; };
  auto left_of = [&](int j) { return (in_codes(j) ? coded : stored) - token_of(j); };
  auto look_up = [&](int j) {
    const int token = token_of(j), each = in_codes(j) ? FOLD * page_size : page_size, page = token / each;
    if (!in_codes(j) && newest) return __ldcg(newest) * heads + kv; // a slot has one such token
    return (__ldcg((in_codes(j) ? coded_pages : pages) + page) * heads + kv) * each + token - page * each;
  };
#else
  auto token_of = [&](int j) { return (from + j) * UNIT_TOKENS + warp * TILE; };
  auto left_of = [&](int j) { return stored - token_of(j); };
  auto look_up = [&](int j) {
    const int token = token_of(j), page = token / page_size;
    return (__ldcg(pages + page) * heads + kv) * page_size + token - page * page_size;
  };
#endif
  // Lane l knows where block l of the 32 at hand begins in the pool, and of the 32 behind them, counted in tokens.
  auto start_of = [&](int j) { return j < mine && left_of(j) > 0 ? look_up(j) : 0; };
  auto fetch = [&](int j, bool second, int slot) { // the keys of block j, or second its values
    if (j < mine) {
      if (!second && j > 0 && (j & 31) == 0) here = ahead, ahead = start_of(j + lane + 32);
      const int there = left_of(j);
      const long long first = __shfl_sync(~0u, here, j & 31);
      const u32 into = ring_at + slot * HALF_BYTES;
#ifdef MIXED
      if (in_codes(j)) {
#ifdef NIBBLES
        const char* codes = (second ? value_codes : key_codes) + first * CODES;
#else
        const char* codes = (second ? values : keys) + first * CODES;
#endif
#pragma unroll
        for (int i = lane; i < TILE * CODES / 16; i += 32) copy16_sized(into + i * 16, codes + i * 16, i / (CODES / 16) < there ? 16 : 0);
        const real* scales = (second ? value_scale : key_scale) + first + lane % 2 * 8;
#ifdef NIBBLES // of tokens that do not exist zeros
        if (lane < 4) {
          const real* source = lane < 2 ? scales : (second ? value_zero : key_zero) + first + lane % 2 * 8;
          copy16_sized(into + TILE * CODES + lane * 16, source, max(0, min(16, (there - lane % 2 * 8) * 2)));
        }
#else
        if (lane < 2) copy16_sized(into + TILE * CODES + lane * 16, scales, there > 0 ? 16 : 0);
#endif
        copies_commit();
        return;
      }
#endif
      const char* from_pool = (second ? values : keys) + first * ROW + lane * 16;
#pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int chunk = i * 32 + lane;
        copy16_sized(into + place(chunk / CHUNKS, chunk % CHUNKS), from_pool + i * 512, chunk / CHUNKS < there ? 16 : 0);
      }
    }
    copies_commit();
  };
  // Begin with the units from `begin` to `end` of a row, and ask for its first blocks, which need not wait unless the newest token is among them.
  auto start = [&](int sequence, int head, int begin, int behind) {
    b = sequence, kv = head, from = begin, stored = PLAIN_OF(b), pages = table + (long long)b * table_stride;
#ifdef MIXED
    plain = units_of(stored), coded = CODED_OF(b);
#ifdef NIBBLES
    coded_pages = pages, newest = coded_table + b;
#else
    coded_pages = coded_table + (long long)b * table_stride;
#endif
#endif
#if defined(MIXED) || defined(RINGS) // the newest token may be anywhere
    if (!waited) dependency_wait(), waited = true;
#endif
    mine = behind - from - (left_of(behind - from - 1) <= 0); // of the blocks one before the codes may be empty
    here = start_of(lane), ahead = start_of(lane + 32);
#pragma unroll 1
    for (int i = 0; i < HALVES; i++) {
      if (!waited && i / 2 < mine && token_of(i / 2) + TILE >= stored) dependency_wait(), waited = true;
      fetch(i / 2, i % 2, i);
    }
  };
  auto turn_to_next = [&] {
    const Row row = find_row(lens, coded_lens, batch, heads, unit);
    const int begin = unit - row.first, behind = min(row.units, begin + end - unit);
    start(row.b, row.head, begin, behind);
    // The block with unit u is the last whose share begins at or before it.
    const int found = (int)(((long long)(row.first + (lane & 1 ? row.units : 1)) * blocks - 1) / units);
    const int low = __shfl_sync(~0u, found, 0), n = __shfl_sync(~0u, found, 1) - low + 1;
    parts = {low, n, self - low, (QUADS + n - 1) / n, b * heads + kv, nullptr};
    unit += behind - begin;
  };
  u32 query[TILES][D / 8];
  auto ask = [&] { // whose keys these are
#ifdef RAGGED
    const int own = b % sequences, head = b / sequences;
#else
    const int own = b, head = kv;
#endif
    load_query(query, q + (long long)own * q_stride + (long long)head * GROUP_HEADS * D);
    parts.to = out + (long long)own * out_stride + (long long)head * GROUP_HEADS * D;
  };

  Seen seen;
  for (bool first = true;; first = false) {
    // The next piece is on its way while the last one's sums are sent.
    const Parts row = parts;
    const bool more = unit < end;
    if (more) turn_to_next();
    if (!waited) dependency_wait();
    waited = true;
    if (first) { MARK(1) }
    if (more) ask();
    if (!first) {
      block.lay(seen, laid);
      __syncthreads();
      MARK(3)
      if (row.blocks == 1) {
#ifdef NIBBLES
        if (threadIdx.x < GROUP_HEADS) lse[row.row * GROUP_HEADS + threadIdx.x] = block.top[threadIdx.x] + log2f(block.sum[threadIdx.x]);
#endif
        for (int i = threadIdx.x; i < QUADS; i += THREADS) {
          store_output(row.to + i * 4, Block::output(laid, i * 4 / D, i * 4 % D), 1.f / block.sum[i * 4 / D]);
        }
      } else {
        send_part(row, shares, block, laid);
        if (row.rank == 0) back = row;
        else front = row;
      }
    }
    if (!more) break;
    seen.clear();
    int slot = 0;
    auto next = [&](int j, bool second) { // the half at `slot` has been read
      __syncwarp();
      fetch(j, second, slot);
      slot = slot + 1 == HALVES ? 0 : slot + 1;
      copies_wait<HALVES - 1>();
      __syncwarp();
    };
    copies_wait<HALVES - 1>();
    __syncwarp();
    for (int j = 0; j < mine; j++) {
      const int there = left_of(j);
      u32 weights[TILES][2];
#ifdef MIXED
      const u32 ok = there <= 0 ? 0u : there < TILE ? (1u << there) - 1 : 0xffffu;
      float2 key = make_float2(scale_log2, scale_log2), value = make_float2(1.f, 1.f);
      copies_wait<HALVES - 2>(); // values too: their scales are factors of the weights
      __syncwarp();
      if (in_codes(j)) {
        char* stages = ring + warp * HALVES * HALF_BYTES;
        key = expand(stages + slot * HALF_BYTES), value = expand(stages + (slot + 1 == HALVES ? 0 : slot + 1) * HALF_BYTES);
        key.x *= scale_log2, key.y *= scale_log2;
        const int gid = lane >> 2; // scales of tokens that do not exist may be anything
        value.x = ok >> gid & 1 ? value.x : 0.f, value.y = ok >> (gid + 8) & 1 ? value.y : 0.f;
      }
      seen.weigh(weights, query, ring_at + slot * HALF_BYTES, ok, key.x, key.y, value.x, value.y);
#else
      seen.weigh(weights, query, ring_at + slot * HALF_BYTES, there < TILE ? (1u << there) - 1 : 0xffffu, scale_log2, scale_log2, 1.f, 1.f);
#endif
      next(j + HALVES / 2, HALVES % 2);
      seen.add(weights, ring_at + slot * HALF_BYTES);
      next(j + (HALVES + 1) / 2, HALVES % 2 == 0);
    }
    MARK(2)
    block.note(seen);
    __syncthreads();
  }
  MARK(4)
  if (threadIdx.x == 0) state = {};
  __syncthreads(); // all is sent
  if (warp == WARPS - 1 && front.blocks + back.blocks) {
    __threadfence();
    for (int i = 0; i < 2; i++) {
      const Parts row = i ? back : front;
      for (int p = lane; p < row.blocks; p += 32) {
        if (__ldcg(unmerged + row.place(p))) state.others_unmerged[i] = 1;
      }
    }
  }
  for (int i = 0; i < 2; i++) {
    const Parts row = i ? back : front;
    if (row.blocks) finish_row(row, state, i, shares, unmerged, lse + (long long)row.row * GROUP_HEADS);
  }
  MARK(5)
}

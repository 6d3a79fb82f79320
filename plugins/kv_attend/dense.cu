// Decode attention over everything stored: the tokens of all sequences and key-value heads, laid end to end, are shared out evenly among the blocks.
//
// Built as tile.cuh says, with -DRAGGED where every head has its own length and pages, with -DMIXED where some tokens are encoded. A sequence's
// heads are rows; a row is read in units of a block of sixteen tokens for every warp. A block's share may begin within one row and end within another.
// Where several blocks have parts of a row, the last of them to finish merges all.
#include "mixed.cuh"

#define UNIT_TOKENS (WARPS * TILE)
#define QUADS (GROUP_HEADS * D / 4)
#ifndef BOUND_BLOCKS
#define BOUND_THREADS THREADS
#define BOUND_BLOCKS 1
#endif
#define HALF_BYTES (TILE * ROW) // of a ring: the keys or the values of a block of tokens
#ifndef LATE
#define LATE 5 // sixteenths of a long row that are read by whichever blocks have time, less than eight
#endif
#define LONG_SHARE 6 // units of a block from which rows are long
#define PIECES 512   // the most pieces in which blocks take what is late
#define EMPTY 0xffffffffu // of a word that nobody has written; no sum comes out as this NaN

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

// A row: its units (or late pieces) and the first of them among those of all rows, and the same of its late pieces (or units).
struct Row {
  int b, head, units, first, others, others_first;
};
// The row of a unit; every lane of a warp calls it. Units are ordered by sequence, then head; count(b) are those of a head, other(b) the others.
template <typename F, typename G> __device__ __forceinline__ Row find_row(int batch, int heads, int unit, F count, G other) {
  const int lane = threadIdx.x & 31;
  int before = 0, others_before = 0;
  for (int c = 0;; c += 32) {
    const int own = c + lane < batch ? count(c + lane) : 0, end = before + warp_scan(own);
    const int others = c + lane < batch ? other(c + lane) : 0, others_end = others_before + warp_scan(others);
    const u32 hit = __ballot_sync(~0u, end * heads > unit);
    if (hit || c + 32 >= batch) {
      const int l = __ffs(hit) - 1, units = __shfl_sync(~0u, own, l), start = __shfl_sync(~0u, end, l) - units;
      const int more = __shfl_sync(~0u, others, l), others_start = __shfl_sync(~0u, others_end, l) - more;
      const int head = (unit - start * heads) / units;
      return {c + l, head, units, start * heads + head * units, more, others_start * heads + head * more};
    }
    before = __shfl_sync(~0u, end, 31), others_before = __shfl_sync(~0u, others_end, 31);
  }
}

// A word of sixteen bytes is written and read as one: who sees it filled has it all, so there is no barrier, no fence and no counter. Who reads a word
// empties it again. Every block of the grid must be resident.
__device__ __forceinline__ void post(uint4* to, u32 a, u32 b, u32 c, u32 d) {
  const u64 low = (u64)b << 32 | a, high = (u64)d << 32 | c;
  asm volatile("{.reg .b128 v;\n mov.b128 v,{%1,%2};\n st.relaxed.gpu.global.b128 [%0],v;}" ::"l"(to), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v;\n ld.relaxed.gpu.global.b128 v,[%2];\n mov.b128 {%0,%1},v;}" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ __forceinline__ void empty(uint4* word) { post(word, EMPTY, EMPTY, EMPTY, EMPTY); }

// A row that several blocks have parts of, as one of them sees it. Every block merges a share of `each` quads of channels.
struct Parts {
  int low, blocks, rank, each, row; // the first of its blocks, how many, and which of them this is
  int late, first_late;             // pieces that any block read, and the first of them among those of all rows
  real* to;
  // What part p of the row tells: its quads, and behind them its largest score and sum of head h for block r at place r + h, which no other pair of
  // a block and a head in its share has. The first block has the row as its last part, the others as their first; late pieces come behind.
  __device__ __forceinline__ uint4* words(uint4* shares, int p) const {
    const int place = p < blocks ? 2 * (low + p) + (p == 0) : 2 * gridDim.x + first_late + p - blocks;
    return shares + (long long)place * (QUADS + GROUP_HEADS + gridDim.x);
  }
  __device__ __forceinline__ int begin(int r) const { return min(r * each, QUADS); }
};

// Tell the other blocks of the row what this one has seen.
__device__ __forceinline__ void tell(const Parts& row, int part, uint4* shares, const Block& block, const float* laid) {
  uint4* to = row.words(shares, part);
  for (int r = threadIdx.x; r < row.blocks; r += THREADS) {
    const int begin = row.begin(r), end = row.begin(r + 1);
    for (int h = begin * 4 / D; h * D < end * 4; h++) post(to + QUADS + r + h, __float_as_uint(block.top[h]), __float_as_uint(block.sum[h]), 0, 0);
  }
  for (int i = threadIdx.x; i < QUADS; i += THREADS) {
    const float4 x = Block::output(laid, i * 4 / D, i * 4 % D);
    post(to + i, __float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
  }
}

// Merge this block's share of a row, a quad by as many lanes as the row has blocks; with -DNIBBLES also lse [G].
__device__ __forceinline__ void merge(const Parts& row, uint4* shares, float* lse) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, begin = row.begin(row.rank), end = row.begin(row.rank + 1);
  const int parts = row.blocks + row.late;
  constexpr int AT_ONCE = 4;
  int span = 2;
  while (span < 32 && span < parts) span *= 2;
  const int own = lane & (span - 1), beside = 32 / span;
  for (int i = begin + warp * beside; i < end; i += WARPS * beside) {
    const int quad = i + lane / span, h = quad * 4 / D;
    float top = -1e30f, sum = 0.f;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = own; quad < end && p < parts; p += AT_ONCE * span) {
      uint4 *from[AT_ONCE], v[AT_ONCE], t[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        from[k] = row.words(shares, p + k * span);
        if (p + k * span < parts) v[k] = look(from[k] + quad), t[k] = look(from[k] + QUADS + row.rank + h);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        if (p + k * span >= parts) break;
        while (t[k].w == EMPTY) t[k] = look(from[k] + QUADS + row.rank + h);
        while (v[k].w == EMPTY) v[k] = look(from[k] + quad);
        empty(from[k] + quad);
        const float m = fmaxf(top, __uint_as_float(t[k].x)), f = exp2_fast(top - m), g = exp2_fast(__uint_as_float(t[k].x) - m);
        top = m, sum = sum * f + __uint_as_float(t[k].y) * g;
        x.x = x.x * f + __uint_as_float(v[k].x) * g, x.y = x.y * f + __uint_as_float(v[k].y) * g;
        x.z = x.z * f + __uint_as_float(v[k].z) * g, x.w = x.w * f + __uint_as_float(v[k].w) * g;
      }
    }
    float m = top;
    for (int o = span / 2; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    const float f = exp2_fast(top - m);
    sum *= f, x.x *= f, x.y *= f, x.z *= f, x.w *= f;
    for (int o = span / 2; o; o >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, o);
      x.x += __shfl_xor_sync(~0u, x.x, o), x.y += __shfl_xor_sync(~0u, x.y, o);
      x.z += __shfl_xor_sync(~0u, x.z, o), x.w += __shfl_xor_sync(~0u, x.w, o);
    }
    if (quad < end && own == 0) {
      store_output(row.to + quad * 4, x, 1.f / sum);
#ifdef NIBBLES
      if (quad * 4 % D == 0) lse[h] = m + log2f(sum);
#endif
    }
  }
  __syncthreads(); // several warps look at a head's score
  for (int p = threadIdx.x; p < parts; p += THREADS) {
    for (int h = begin * 4 / D; h * D < end * 4; h++) empty(row.words(shares, p) + QUADS + row.rank + h);
  }
}

// q [B, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride]; lens [B], at least 1; page_size a multiple of 16. Writes out
// [B, out_stride]. Where ragged: keys, values [P, page_size, D], table [Hk, B, table_stride], lens [Hk, B], so that heads are sequences of one head.
// Where mixed: coded_table [B, table_stride], coded_lens [B], codes in the bytes of keys and values as [P, Hk, FOLD page_size, D], scales [P, Hk,
// FOLD page_size]; else null. With -DNIBBLES: keys, values [slots, Hk, 1, D] are the newest tokens, coded_table [B] the slots; the other tokens of lens
// are codes of the pages in table: key_codes, value_codes [P, Hk, page_size, D / 2], scales and zero points [P, Hk, page_size]; lse [B, Hq] takes the
// logarithms to base 2 of the sums of the weights. shares [2 blocks, SHARE];
// arrived [B Hk] zeros, and zeros again behind it. Tokens before the newest and page numbers were there before the kernel before this one began.
extern "C" __global__ void __launch_bounds__(BOUND_THREADS, BOUND_BLOCKS) attend_dense(const real* q, const char* keys, const char* values, const int* table,
    const int* lens, real* out, uint4* shares, u32* claims, int batch, int heads, int q_stride, int out_stride, int table_stride, int page_size,
    float scale_log2, const int* coded_table, const int* coded_lens, const real* key_scale, const real* value_scale,
    const char* key_codes, const char* value_codes, const real* key_zero, const real* value_zero, float* lse) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Block block;
  __shared__ u32 claimed;
  MARK(0)
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#ifdef RAGGED
  const int sequences = batch;
  batch *= heads, heads = 1;
#endif
  // All units; those of long rows that are late, in pieces of `size`, and the others, in equal shares.
  int all = 0;
  for (int c = 0; c < batch; c += 32) all += __shfl_sync(~0u, warp_scan(c + lane < batch ? UNITS(c + lane) : 0), 31);
  all *= heads;
  const int share = (all + gridDim.x - 1) / gridDim.x, size = LATE && share >= LONG_SHARE ? (all / 16 * LATE + PIECES) / PIECES : 0;
  // A row with late pieces has more units left than a block's share, so that no block has parts of more than two of them.
  auto late_of = [&](int b) {
    const int u = UNITS(b);
    return size && u >= 2 * share ? u * LATE / 16 / size : 0;
  };
  auto units_of_row = [&](int b) { return UNITS(b) - late_of(b) * size; };
  int pieces = 0;
  for (int c = 0; size && c < batch; c += 32) pieces += __shfl_sync(~0u, warp_scan(c + lane < batch ? late_of(c + lane) : 0), 31);
  pieces *= heads;
  const int units = all - pieces * size, blocks = min((int)gridDim.x, units), self = blockIdx.x;
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
  int b = 0, kv = 0, from = 0, mine = 0, stored = 0, part = 0, here = 0, ahead = 0;
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
  // Who has parts of a row: of its units `count` from `first` on, and of its late pieces.
  auto share_out = [&](int first, int count, int first_late, int late) {
    // The block with unit u is the last whose share begins at or before it.
    const int found = (int)(((long long)(first + (lane & 1 ? count : 1)) * blocks - 1) / units);
    const int low = __shfl_sync(~0u, found, 0), n = __shfl_sync(~0u, found, 1) - low + 1;
    parts = {low, n, self - low, (QUADS + n - 1) / n, b * heads + kv, late, first_late, nullptr};
  };
  auto own_piece = [&] {
    const Row row = find_row(batch, heads, unit, units_of_row, late_of);
    const int begin = unit - row.first, behind = min(row.units, begin + end - unit);
    start(row.b, row.head, begin, behind);
    share_out(row.first, row.units, row.others_first, row.others);
    part = parts.rank, unit += behind - begin;
  };
  auto late_piece = [&](int piece) {
    const Row row = find_row(batch, heads, piece, late_of, units_of_row);
    const int begin = row.others + (piece - row.first) * size;
    start(row.b, row.head, begin, begin + size);
    share_out(row.others_first, row.others, row.first, row.units);
    part = parts.blocks + piece - row.first;
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

  bool more = unit < end;
  if (more) own_piece();
  if (!waited) dependency_wait();
  waited = true;
  MARK(1)
  if (more) ask();
  while (more) {
    const bool last = unit >= end;
    u32 claim = 0;
    if (last && pieces && threadIdx.x == 0) claim = atomicInc(claims, pieces + blocks - 1); // every block fails once, so it ends as zero
    Seen seen;
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
      copies_wait<HALVES - 2>(); // the scales of the values are factors of the weights
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
    if (threadIdx.x == 0) claimed = claim;
    __syncthreads();
    // The next piece is on its way while this one's sums are told.
    const Parts row = parts;
    const int own_part = part;
    more = true;
    if (!last) own_piece(), ask();
    else if (pieces && claimed < (u32)pieces) late_piece(claimed), ask();
    else more = false;
    block.lay(seen, laid);
    __syncthreads();
    MARK(3)
    if (row.blocks + row.late == 1) {
#ifdef NIBBLES
      if (threadIdx.x < GROUP_HEADS) lse[row.row * GROUP_HEADS + threadIdx.x] = block.top[threadIdx.x] + log2f(block.sum[threadIdx.x]);
#endif
      for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        store_output(row.to + i * 4, Block::output(laid, i * 4 / D, i * 4 % D), 1.f / block.sum[i * 4 / D]);
      }
    } else {
      tell(row, own_part, shares, block, laid);
      if (own_part < row.blocks) {
        if (own_part == 0) back = row;
        else front = row;
      }
    }
  }
  MARK(4)
  // A block waits for others only when it has told them everything.
  for (int i = 0; i < 2; i++) {
    const Parts row = i ? back : front;
    if (row.blocks == 0) continue;
    merge(row, shares, lse + (long long)row.row * GROUP_HEADS);
  }
  MARK(5)
}

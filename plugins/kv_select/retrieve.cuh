// Choice and attention in the launch that scores: every block attends to what is chosen of the units that it scored, and blocks merge what they saw.
//
// Built as pooling.cuh and tile.cuh say, with -DUNIT (tokens of a unit), -DHELD (stages of TILE tokens a warp) and CHUNK (units that lie together: the
// blocks of a row take chunks in turn, so that neighbours that are chosen together are read by different blocks).
//
// What lies above the bin that is cut is certain, and what lies in it is fetched with it, before the blocks agree which of that is chosen: the others
// get no weight. Keys lie where places says, so no list and no page table is read.
#pragma once
#include "exchange.cuh"
#include "../kv_attend/tile.cuh"

#define CACHED 512                            // tokens read in any case whose rows a block looks up early
#define OUT_WORDS ((GROUP_HEADS * D + 2) / 3) // words of a row's output
#define TILE_BYTES (2 * TILE * ROW)

// What blocks tell each other at last: words [blocks, blocks, each()] of three outputs by reader and writer, then [blocks, GROUP_HEADS] tops and sums.
struct Merge {
  uint4* words;
  int blocks;
  __device__ __forceinline__ int each() const { return (OUT_WORDS + blocks - 1) / blocks; }
  __device__ __forceinline__ uint4* output(int reader, int writer) const { return words + (reader * blocks + writer) * each(); }
  __device__ __forceinline__ uint4* sums(int writer) const { return words + blocks * blocks * each() + writer * GROUP_HEADS; }
};

// The tokens that a row reads in any case: units [0, first) and those behind a gap.
struct Certain {
  int units, first, gap, stored;
  const int* table;
  int head, heads, page_size;

  __device__ __forceinline__ int tiles() const { return (units * UNIT + TILE - 1) / TILE; }
  __device__ __forceinline__ int row(int i) const { // of the i-th token in the pool, -1 behind the last
    const int u = i / UNIT, token = (u < first ? u : u + gap) * UNIT + i % UNIT;
    if (u >= units || token >= stored) return -1;
    const int page = token / page_size;
    return (table[page] * heads + head) * page_size + token - page * page_size;
  }
};

struct Work { // of a block
  int sure, near; // units that are chosen, and candidates behind them
  int rows[CACHED];
  unsigned char wins[CROWD]; // candidates that are chosen
  Block seen;
};

// Where the block's parts of dynamic shared memory lie.
struct Places {
  u32* exact;     // [room] ordered scores; later the merged outputs
  u16* list;      // [room] chosen units from the front, candidates from the back
  int* units;     // [room / CHUNK] rows of chunks in the pool
  char* tiles;    // [WARPS, HELD, TILE_BYTES], then outputs of warps
  int room;
};
// Behind the rows of chunks: a scorer's ring, then scores, whose place is later that of all else.
__device__ __forceinline__ int ring_at(int room) { return (room / CHUNK * 4 + 127) / 128 * 128; }
__device__ __forceinline__ Places places_of(char* dynamic, int room, int exact_bytes) {
  char* exact = dynamic + ring_at(room);
  char* list = exact + exact_bytes;
  return {reinterpret_cast<u32*>(exact), reinterpret_cast<u16*>(list), reinterpret_cast<int*>(dynamic), list + (room * 2 + 127) / 128 * 128, room};
}

__device__ __forceinline__ int entry(const Places& at, int sure, int i) { return i < sure ? at.list[i] : at.list[at.room - 1 - (i - sure)]; }

// Eight units: which are chosen, and which are candidates.
__device__ __forceinline__ void classify(const Units& units, const Candidates& of, int packet, u32& set, u32& near) {
  const uint4 a = reinterpret_cast<const uint4*>(units.exact)[2 * packet], b = reinterpret_cast<const uint4*>(units.exact)[2 * packet + 1];
  const u32 exact[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  set = near = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int bin = exact[k] ? units.key_again(exact[k]) >> 6 : -1;
    set |= (u32)(bin > of.bin) << k, near |= (u32)(bin == of.bin) << k;
  }
  if (of.key >= 0) { // rare: a candidate's key and score were looked at more closely
#pragma unroll 1
    for (u32 left = near; left; left &= left - 1) {
      const int k = __ffs(left) - 1, place = of.place(units, units.exact[packet * 8 + k], units.unit(packet * 8 + k));
      if (place != 0) near &= ~(1u << k);
      if (place > 0) set |= 1u << k;
    }
  }
  if (of.crowd == of.need) set |= near, near = 0;
}

// List what the block chose, in the order of its units, and tell the row the candidates.
__device__ __forceinline__ void pick(Desk& s, Work& work, const Mail& mail, const Units& units, const Candidates& of, const Places& at) {
  const int packets = units.count / 8, each = (packets + THREADS - 1) / THREADS;
  const int from = min(packets, (int)threadIdx.x * each), to = min(packets, from + each);
  u32 set = 0, near = 0;
  int both = 0, turn = 0;
#pragma unroll 1
  for (int p = from; p < to; p++) {
    classify(units, of, p, set, near);
    both += __popc(set) + (__popc(near) << 16);
  }
  const int end = block_scan(both, s.warp_sums, turn);
  if (threadIdx.x == THREADS - 1) work.sure = end & 0xffff, work.near = end >> 16;
  int sure = (end - both) & 0xffff, later = (end - both) >> 16;
#pragma unroll 1
  for (int p = from; p < to; p++) {
    if (each > 1) classify(units, of, p, set, near);
#pragma unroll 1
    for (u32 left = set; left; left &= left - 1) at.list[sure++] = p * 8 + __ffs(left) - 1;
#pragma unroll 1
    for (u32 left = near; left; left &= left - 1) {
      const int i = p * 8 + __ffs(left) - 1;
      post(mail.list() + of.start + later, units.exact[i], ~(u32)units.unit(i), 0, mail.stamp);
      at.list[at.room - 1 - later++] = i;
    }
  }
  __syncthreads();
}

// Say which of the block's candidates are chosen, when all of the row are known.
__device__ __forceinline__ void settle(Desk& s, Work& work, const Mail& mail, const Candidates& of) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int i = threadIdx.x; i < of.crowd; i += THREADS) {
    const uint4 v = await(mail.list() + i, mail.stamp);
    s.list[i] = (u64)v.x << 32 | v.y;
  }
  __syncthreads();
  MARK(12)
#pragma unroll 1
  for (int i = warp; i < work.near; i += THREADS / 32) {
    const u64 own = s.list[of.start + i];
    int better = 0;
#pragma unroll 2
    for (int k = lane; k < of.crowd; k += 32) better += s.list[k] > own;
    better = __reduce_add_sync(~0u, better);
    if (lane == 0) work.wins[i] = better < of.need;
  }
  __syncthreads();
}

// A warp's tiles of what the block reads: first what is read in any case, then the list.
struct Reader {
  const char *keys, *values;
  const Certain& certain;
  const Places& at;
  Work& work;
  int blocks, rank, sure, near; // of the row; of the list

  __device__ __forceinline__ int certain_tiles() const { return (certain.tiles() - rank + blocks - 1) / blocks; }
  __device__ __forceinline__ int tiles() const { return certain_tiles() + ((sure + near) * UNIT + TILE - 1) / TILE; }
  __device__ __forceinline__ u32 stage(int j) const { return shared_at(at.tiles) + ((threadIdx.x >> 5) * HELD + j % HELD) * TILE_BYTES; }
  __device__ __forceinline__ int certain_row(int i) const { // the i-th of this block's tokens that are read in any case
    return certain.row((i / TILE * blocks + rank) * TILE + i % TILE);
  }
  // Where token `lane & 15` of a tile lies, -1 where there is none.
  __device__ __forceinline__ int row(int tile, int first) const {
    const int r = threadIdx.x & (TILE - 1);
    if (tile < first) {
      const int i = tile * TILE + r;
      return i < CACHED ? work.rows[i] : certain_row(i);
    }
    const int i = (tile - first) * TILE + r, e = i / UNIT;
    if (e >= sure + near) return -1;
    const int u = entry(at, sure, e);
    return (at.units[u / CHUNK] * CHUNK + u % CHUNK) * UNIT + i % UNIT;
  }
  __device__ __forceinline__ void fetch(int j, int tile, int first, int all) const {
    if (tile < all) {
      const int lane = threadIdx.x & 31, own = row(tile, first);
      const u32 to = stage(j);
#pragma unroll
      for (int i = lane; i < TILE * CHUNKS; i += 32) {
        const int r = i / CHUNKS, c = i % CHUNKS, from = __shfl_sync(~0u, own, r);
        const long long byte = (long long)max(from, 0) * ROW + c * 16;
        copy16_sized(to + place(r, c), keys + byte, from >= 0 ? 16 : 0);
        copy16_sized(to + TILE * ROW + place(r, c), values + byte, from >= 0 ? 16 : 0);
      }
    }
    copies_commit();
  }
  // Which tokens of a tile count.
  __device__ __forceinline__ u32 live(int tile, int first) const {
    bool ok = row(tile, first) >= 0;
    if (tile >= first) {
      const int e = ((tile - first) * TILE + (int)(threadIdx.x & (TILE - 1))) / UNIT;
      if (ok && e >= sure) ok = work.wins[e - sure];
    }
    return __ballot_sync(~0u, ok) & 0xffff;
  }
};

// The block's outputs and what they weigh, told to the row; then the block's share of the row's output [G D] from what all have told.
__device__ __forceinline__ void merge(Work& work, const Places& at, const Merge& to, const Mail& mail, int used, real* out) {
  const float* laid = reinterpret_cast<const float*>(at.tiles);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, each = to.each();
#pragma unroll 1
  for (int i = tid; i < OUT_WORDS + GROUP_HEADS; i += THREADS) {
    if (i >= OUT_WORDS) {
      const int h = i - OUT_WORDS;
      post(to.sums(mail.rank) + h, __float_as_uint(work.seen.top[h]), __float_as_uint(work.seen.sum[h]), 0, mail.stamp);
      continue;
    }
    float x[3];
#pragma unroll
    for (int k = 0; k < 3; k++) {
      const int e = min(3 * i + k, GROUP_HEADS * D - 1);
      const float* from = laid + e / D * LAID + e % D;
      x[k] = from[0];
#pragma unroll 4
      for (int w = 1; w < used; w++) x[k] += from[w * HEADS8 * LAID];
    }
    post(to.output(i / each, mail.rank) + i % each, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), mail.stamp);
  }
  MARK(16)
  // What all told: outputs [blocks, 3 each], factors [GROUP_HEADS, blocks].
  float *outputs = reinterpret_cast<float*>(at.exact), *factors = outputs + to.blocks * 3 * each;
  const int mine = max(0, min(each, OUT_WORDS - mail.rank * each));
#pragma unroll 1
  for (int h = warp; h < GROUP_HEADS; h += THREADS / 32) {
    float top = -1e30f, sum = 0.f;
#pragma unroll 1
    for (int p = lane; p < to.blocks; p += 32) {
      const uint4 v = await(to.sums(p) + h, mail.stamp);
      const float own = __uint_as_float(v.x), more = __uint_as_float(v.y), high = fmaxf(top, own);
      sum = sum * exp2_fast(top - high) + more * exp2_fast(own - high), top = high;
      factors[h * to.blocks + p] = own;
    }
    __syncwarp();
    const float high = highest(top);
    sum *= exp2_fast(top - high);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
#pragma unroll 1
    for (int p = lane; p < to.blocks; p += 32) factors[h * to.blocks + p] = exp2_fast(factors[h * to.blocks + p] - high) / sum;
  }
#pragma unroll 1
  for (int i = tid; i < mine * to.blocks; i += THREADS) {
    const int p = i / mine, w = i - p * mine;
    const uint4 v = await(to.output(mail.rank, p) + w, mail.stamp);
    float* into = outputs + p * 3 * each + 3 * w;
    into[0] = __uint_as_float(v.x), into[1] = __uint_as_float(v.y), into[2] = __uint_as_float(v.z);
  }
  __syncthreads();
  MARK(17)
#pragma unroll 1
  for (int i = tid >> 2; i < (3 * mine + 7) / 8 * 8; i += THREADS / 4) { // four lanes an output; whole warps
    const int e = mail.rank * each * 3 + i, h = min(e / D, GROUP_HEADS - 1);
    float x = 0.f;
    if (i < 3 * mine) {
#pragma unroll 4
      for (int p = tid & 3; p < to.blocks; p += 4) x += outputs[p * 3 * each + i] * factors[h * to.blocks + p];
    }
    x += __shfl_xor_sync(~0u, x, 1), x += __shfl_xor_sync(~0u, x, 2);
    if ((tid & 3) == 0 && i < 3 * mine && e < GROUP_HEADS * D) out[e] = to_real(x);
  }
}

// For lists: mark the units [units] that the block read, of those that are chosen between the certain ones.
__device__ __forceinline__ void put_marks(const Work& work, const Places& at, const Units& units, unsigned char* marks) {
#pragma unroll 1
  for (int i = threadIdx.x; i < work.sure + work.near; i += THREADS) {
    if (i < work.sure || work.wins[i - work.sure]) marks[units.unit(entry(at, work.sure, i))] = 1;
  }
}

// Of a row, where somebody asks for it, else null.
struct Record {
  unsigned char* marks; // [score_stride] 1 where a unit is read, if the sequence is not read whole
  u32* ranked;          // [score_stride] ordered pooled scores, 0 where a unit is no candidate; with scores
  __half* scores;       // [HEADS, score_stride]
  long long score_stride;

  __device__ __forceinline__ void put(const Units& units, int all) const { // before tiles come where scores lie
#pragma unroll 1
    for (int i = threadIdx.x; i < units.count; i += THREADS) {
      const int u = units.unit(i);
      if (u >= all) continue;
      ranked[u] = units.exact[i];
      for (int h = 0; h < HEADS; h++) scores[h * score_stride + u] = units.scores[h * units.stride + i];
    }
    __syncthreads();
  }
};

// From the scores of the block's units to its share of the row's output [G D].
__device__ __forceinline__ void retrieve(Desk& s, Work& work, const Mail& mail, const Merge& to, const Reading& row, const Certain& certain, Units& units,
    const Places& at, const real* q, const char* keys, const char* values, const Record& record, u32* stamp, real* out, float scale_log2) {
  const int warp = threadIdx.x >> 5, tid = threadIdx.x;
  Reader reader = {keys, values, certain, at, work, mail.blocks, mail.rank, 0, 0};
  const int first = reader.certain_tiles();
#pragma unroll 1
  for (int i = THREADS - 1 - tid; i < min(first * TILE, CACHED); i += THREADS) work.rows[i] = reader.certain_row(i); // the first warps normalize
  u32 query[TILES][D / 8];
  load_query(query, q);
  if (!row.plain) {
    float add[HEADS];
    normalize(s, mail, add);
    units.scale(s.low, (MAXIMUM ? HEADS : 1) / (float)row.wanted);
    MARK(6)
    if (units.count <= 2 * THREADS) units.pool_all<1>(add, s.own);
    else units.pool_all<4>(add, s.own);
    __syncthreads();
    MARK(7)
    if (record.ranked) record.put(units, row.units);
    const Lower lower = add_counts<BINS>(s, mail, mail.bins());
    MARK(9)
    const Chosen found = cut_row<BINS>(s, lower, row.wanted, units.eligible(row.last), units.eligible_lower());
    Candidates candidates = {found.cut.bin, row.wanted - found.cut.above, found.cut.count, found.lower_above, found.lower_count, -1, 0, 60};
    MARK(10)
    split(s, mail, units, candidates);
    pick(s, work, mail, units, candidates, at);
    MARK(11)
    reader.sure = work.sure, reader.near = work.near;
    const int all = reader.tiles();
#pragma unroll
    for (int j = 0; j < HELD; j++) reader.fetch(j, warp + j * WARPS, first, all);
    if (work.near) settle(s, work, mail, candidates); // the same in all threads
  } else {
    if (tid == 0) work.sure = work.near = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; j++) reader.fetch(j, warp + j * WARPS, first, first);
  }
  MARK(13)
  const int all = reader.tiles();
  Seen seen;
  seen.clear();
#pragma unroll 1
  for (int j = 0; warp + j * WARPS < all; j++) {
    const int tile = warp + j * WARPS;
    const u32 ok = reader.live(tile, first);
    copies_wait<HELD - 1>();
    __syncwarp();
    seen.take(query, reader.stage(j), ok, scale_log2);
    __syncwarp();
    reader.fetch(j + HELD, tile + HELD * WARPS, first, all);
  }
  copies_wait<0>();
  MARK(14)
  work.seen.gather(seen, reinterpret_cast<float*>(at.tiles));
  MARK(15)
  merge(work, at, to, mail, min(all, WARPS), out);
  if (tid == 0 && mail.rank == 0) *stamp = mail.stamp; // every block has read the stamp, because it has told what it saw
  if (record.marks && !row.whole) {
    put_marks(work, at, units, record.marks);
#pragma unroll 1
    for (int i = mail.rank * THREADS + tid; i < certain.units; i += mail.blocks * THREADS) record.marks[i < certain.first ? i : i + certain.gap] = 1;
  }
  MARK(18)
}

// What a row reads in any case.
__device__ __forceinline__ Certain certain_of(const Reading& row, int stored, const int* table, int head, int heads, int page_size) {
  const int gap = row.plain ? (row.whole || row.wanted > 0 ? 0 : row.last - row.first) : row.last - row.first;
  const int count = row.units - gap;
  return {row.plain && !row.whole ? min(count, row.width) : count, row.first, gap, stored, table, head, heads, page_size};
}

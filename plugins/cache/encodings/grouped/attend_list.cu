// Decode attention over a list of tokens or pages of an encoded cache: split over blocks of a row, merged by whichever of them ends last.
//
// Built as `attend.cu` is, with -DLISTED=1, -DUNIT (tokens a list entry: 1, 4, 8 or a multiple of 16) and -DPLACED where the pages of a row are not
// those of a table: the list of rows of pages that `recall.cu` writes says where each entry's page lies.
//
// What is read is a tile of 16 tokens, because codes lie in the order of the matrix instruction: tokens of a tile that are not asked for get no weight.
// Each warp takes an equal share of the list, 32 tiles at a time, a lane each; two of them are a step. Entries of one tile that two warps or two such
// rounds find are read twice, each time with the tokens of its own.
#include "merge_states.cuh"

#define TILES_OF_UNIT (UNIT > TILE ? UNIT / TILE : 1)

// As `attend_encoded`, whose parameters these are; chosen [B, Hk, chosen_stride] int32 has ascending entries of UNIT tokens and last their count, -1 for
// everything stored; placed [B, Hk, chosen_stride] names, in table's stead, the page of each entry, or of each page where everything is read.
extern "C" __global__ void __launch_bounds__(THREADS, (D > 128 ? 256 : 512) / THREADS) attend_encoded_list(const real* q, const char* key_codes,
    const char* key_scale, const char* key_minimum, const char* value_codes, const char* value_scale, const char* value_minimum, const char* keys,
    const char* values, const int* table, const int* lens, const int* slots, const int* origins, const int* chosen, const int* placed, real* out, float* parts, float* tops,
    int* counters, int q_stride, int out_stride, int table_stride, int page_size, int chosen_stride, int ring_tokens, int residual, int lag, int together,
    float scale_log2) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Block block;
  __shared__ int ticket;
  __shared__ uint4 zeros;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int splits = gridDim.x, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  dependency_wait();
  const int stored = lens[b], slot = slots[b];
  const int* pages = table + (long long)b * table_stride;
  const int* list = chosen + ((long long)b * heads + head) * chosen_stride;
  const int count = list[chosen_stride - 1];
  const bool sparse = count >= 0;
  const auto [keys_end, values_end] = ends_of(stored, origins, slot, residual, lag, together);
  const int coded = min(keys_end, values_end) / TILE; // tiles of codes alone
  const int total = sparse ? count * TILES_OF_UNIT : (stored + TILE - 1) / TILE;
  const int workers = splits * WARPS, worker = blockIdx.x * WARPS + warp;
  const int begin = worker * (total / workers) + min(worker, total % workers), mine = total / workers + (worker < total % workers); // contiguous
  const Codes codes = {key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum};

  // The tiles of the share from `base` on, one a lane: its place in the pool, the tokens that are asked for, and which lanes have one.
  int tile, rows;
  u32 asked;
  auto look = [&](int base) {
    const int i = begin + base + lane;
    int page_row = 0;
    tile = -1, asked = 0;
    if (base + lane < mine) {
      tile = i, asked = 0xffffu;
      if (sparse) {
        const int entry = list[i / TILES_OF_UNIT];
        tile = UNIT < TILE ? entry * UNIT / TILE : entry * TILES_OF_UNIT + i % TILES_OF_UNIT;
        if (UNIT < TILE) asked = ((1u << UNIT % TILE) - 1) << (entry * UNIT % TILE);
      }
#ifdef PLACED
      page_row = placed[((long long)b * heads + head) * chosen_stride + (sparse ? i / TILES_OF_UNIT : tile * TILE / page_size)];
#endif
      const int left = stored - tile * TILE;
      if (left < TILE) asked &= (1u << max(left, 0)) - 1;
    }
    bool first = tile >= 0;
    if (UNIT < TILE) { // neighbours may ask for tokens of the same tile: the first of them reads it for all
#pragma unroll
      for (int o = 1; o < TILE / (UNIT < TILE ? UNIT : 1); o <<= 1) {
        const int there = __shfl_sync(~0u, tile, lane + o);
        const u32 more = __shfl_sync(~0u, asked, lane + o);
        if (lane + o < 32 && there == tile) asked |= more;
      }
      const int before = __shfl_up_sync(~0u, tile, 1);
      if (lane > 0 && before == tile) first = false;
    }
    first = first && asked != 0;
    const int token = max(tile, 0) * TILE, page = token / page_size;
#ifndef PLACED
    if (first) page_row = pages[page];
#endif
    rows = first ? (page_row * heads + head) * page_size + token - page * page_size : 0;
    return __ballot_sync(~0u, first);
  };

  u32 query[D / 8];
  load_query(query, q + (long long)b * q_stride + head * GROUP_HEADS * D);
  begin_codes(query);
  const u32 magic = MAGIC | (u32)(page_size >> 30); // pages are smaller
  if (threadIdx.x == 0) zeros = make_uint4(0, 0, 0, 0);
  __syncthreads();
  char* own = ring + warp * RING_BYTES;
  const u32 own_at = shared_at(own);
  SeenCodes seen;
  seen.clear();
  int mixed = mine; // where tiles begin that are not codes alone
  for (int base = 0; base < mine; base += 32) {
    const u32 there = look(base), full = there & __ballot_sync(~0u, tile < coded);
    if (there != full) mixed = min(mixed, base);
    const int steps = (__popc(full) + 1) / 2;
    u32 ahead = full, left = full;
    auto fetch = [&](int j) {
      if (j < steps) {
        const int one = __ffs(ahead) - 1;
        ahead &= ahead - 1;
        const int two = ahead ? __ffs(ahead) - 1 : one; // of an odd number the last is read twice
        ahead &= ahead - 1;
        codes.fetch_tiles(own_at + j % STAGES * STEP_BYTES, __shfl_sync(~0u, rows, one), __shfl_sync(~0u, rows, two));
      }
      copies_commit();
    };
#pragma unroll
    for (int j = 0; j < STAGES - 1; j++) fetch(j);
    for (int j = 0; j < steps; j++) {
      fetch(j + STAGES - 1);
      const int one = __ffs(left) - 1;
      left &= left - 1;
      u32 ok = __shfl_sync(~0u, asked, one);
      if (left) ok |= __shfl_sync(~0u, asked, __ffs(left) - 1) << TILE;
      left &= left - 1;
      copies_wait<STAGES - 1>();
      __syncwarp();
      seen.take_codes(query, own + j % STAGES * STEP_BYTES, &zeros, magic, scale_log2, ok);
      __syncwarp();
    }
    copies_wait<0>();
  }
  seen.leave_codes(query);

  // Entries ascend, so tiles with tokens in full precision come last.
  const Residual rest = {keys, values, (long long)(slot * heads + head) * ring_tokens, ring_tokens, keys_end, values_end};
  for (int base = mixed; base < mine; base += 32) {
    const u32 there_are = look(base);
    for (u32 left = there_are & __ballot_sync(~0u, tile >= coded); left; left &= left - 1) {
      const int one = __ffs(left) - 1, first = __shfl_sync(~0u, tile, one) * TILE, there = min(TILE, stored - first);
      rest.fetch(own_at, codes, first, there, __shfl_sync(~0u, rows, one), -1);
      copies_commit();
      copies_wait<0>();
      __syncwarp();
      seen.take_mixed(query, own, rest, first, there, __shfl_sync(~0u, asked, one), scale_log2);
    }
  }
  merge_blocks(seen, block, ticket, ring, out + (long long)b * out_stride + head * GROUP_HEADS * D, parts, tops, counters);
}

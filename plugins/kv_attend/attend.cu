// Decode attention over a list of tokens or pages, or over everything stored: one thread-block cluster a key-value head, split over its blocks.
//
// Built as tile.cuh says, with -DCLUSTER and -DUNIT (tokens a list entry).
//
// Every warp takes blocks of 16 tokens. Warps are merged through shared memory, blocks through the cluster's.
#include "tile.cuh"

// q [B, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride]; lens [B]; chosen [B, Hk, chosen_stride] int32, the entries and
// last their count, -1 for everything stored, or null. Writes out [B, out_stride]. Lengths were there before the kernel before this one began; where
// settled, queries too.
extern "C" __global__ void __launch_bounds__(THREADS) attend_list(const real* q, const char* keys, const char* values, const int* table, const int* lens,
    const int* chosen, real* out, int q_stride, int out_stride, int table_stride, int page_size, int chosen_stride, int settled, float scale_log2) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Block block;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const int stored = lens[b];
  const int* pages = table + (long long)b * table_stride;
  const int* list = chosen ? chosen + ((long long)b * heads + head) * chosen_stride : 0;
  const real* queries = q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D;
  const int room = chosen_stride - 1;
  const int workers = CLUSTER * WARPS, worker = rank * WARPS + warp;
  int total = list ? room * UNIT : stored, blocks = (total + TILE - 1) / TILE;
  int begin = worker * (blocks / workers) + min(worker, blocks % workers), mine = blocks / workers + (worker < blocks % workers); // contiguous
  u32 query[TILES][D / 8];
  MARK(0)
  if (settled) load_query(query, queries);
  dependency_wait();
  MARK(1)
  // The count and the first entries come together: that the list is one, and full, is nearly always true.
  const int count = list ? list[room] : -1;
  int first_entry = list ? list[min((begin * TILE + lane) / UNIT, room - 1)] : 0;
  if (!settled) load_query(query, queries);
  const bool sparse = count >= 0;
  if (list && count != room) {
    total = sparse ? count * UNIT : stored, blocks = (total + TILE - 1) / TILE;
    begin = worker * (blocks / workers) + min(worker, blocks % workers), mine = blocks / workers + (worker < blocks % workers);
    if (sparse) first_entry = list[min((begin * TILE + lane) / UNIT, room - 1)];
  }

  // Lane l looks up the row of token l of the next two blocks; -1 behind the end.
  auto lookup = [&](int j) {
    const int i = (begin + j) * TILE + lane;
    if (i >= total || i / TILE >= begin + mine) return -1;
    int token = i;
    if (sparse) {
      const int entry = j == 0 ? first_entry : list[i / UNIT];
      if (entry < 0) return -1; // behind the last entry
      token = entry * UNIT + i % UNIT;
    }
    if (token >= stored) return -1;
    const int page = token / page_size;
    return (pages[page] * heads + head) * page_size + token - page * page_size;
  };
  const u32 ring_at = shared_at(ring) + warp * STAGES * STAGE_BYTES;
  int rows = lookup(0), rows_ahead = mine > 2 ? lookup(2) : -1;
  u32 held[STAGES]; // bits of the tokens that exist in the fetched blocks
  auto fetch = [&](int j) {
    if (j < mine) {
      if (j > 0 && (j & 1) == 0) {
        rows = rows_ahead;
        if (j + 2 < mine) rows_ahead = lookup(j + 2);
      }
      const u32 to = ring_at + (j % STAGES) * STAGE_BYTES;
#pragma unroll
      for (int i = lane; i < TILE * CHUNKS; i += 32) {
        const int r = i / CHUNKS, c = i % CHUNKS;
        const int row = __shfl_sync(~0u, rows, (j & 1) * 16 + r);
        const long long at = (long long)max(row, 0) * ROW + c * 16; // rows behind the end are masked: any memory of the pool will do
        copy16_sized(to + place(r, c), keys + at, row >= 0 ? 16 : 0);
        copy16_sized(to + TILE * ROW + place(r, c), values + at, row >= 0 ? 16 : 0);
      }
      const u32 ok = __ballot_sync(~0u, rows >= 0);
      const u32 bits16 = (j & 1) ? ok >> 16 : ok & 0xffffu;
#pragma unroll
      for (int s = 0; s < STAGES; s++) {
        if (j % STAGES == s) held[s] = bits16;
      }
    }
    copies_commit();
  };
#pragma unroll
  for (int j = 0; j < STAGES - 1; j++) fetch(j);

  Seen seen;
  seen.clear();
  MARK(2)
  for (int j = 0; j < mine; j++) {
    fetch(j + STAGES - 1);
    copies_wait<STAGES - 1>();
    __syncwarp();
    u32 ok = held[0];
#pragma unroll
    for (int s = 1; s < STAGES; s++) {
      if (j % STAGES == s) ok = held[s];
    }
    seen.take(query, ring_at + (j % STAGES) * STAGE_BYTES, ok, scale_log2);
    __syncwarp();
  }
  copies_wait<0>();
  MARK(3)
  float* laid = reinterpret_cast<float*>(ring);
  block.gather(seen, laid);
  MARK(4)
#if CLUSTER > 1
  for (int i = threadIdx.x; i < GROUP_HEADS * D; i += THREADS) {
    float* at = laid + i / D * LAID + i % D;
    float x = at[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) x += at[w * HEADS8 * LAID];
    at[0] = x;
  }
  MARK(5)
  cluster_sync();
  MARK(6)
#endif
  real* to = out + (long long)b * out_stride + (long long)head * GROUP_HEADS * D;
  for (int i = rank * THREADS + threadIdx.x; i < GROUP_HEADS * D; i += CLUSTER * THREADS) {
    const int h = i / D;
    float* at = laid + h * LAID + i % D;
    float x = 0.f, l = 0.f;
#if CLUSTER > 1
    float m = -1e30f, tops[CLUSTER];
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) tops[c] = *peer(&block.top[h], c), m = fmaxf(m, tops[c]);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const float f = exp2_fast(tops[c] - m);
      x += *peer(at, c) * f, l += *peer(&block.sum[h], c) * f;
    }
#else
#pragma unroll
    for (int w = 0; w < WARPS; w++) x += at[w * HEADS8 * LAID];
    l = block.sum[h];
#endif
    to[i] = to_real(x / l);
  }
  MARK(7)
  cluster_sync(); // nobody leaves while others read its memory
}

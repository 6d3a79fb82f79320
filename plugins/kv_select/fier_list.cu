// FIER's scorer for many rows: of a row's packets of four tokens it lists those that may be chosen, with their scores, for listed.cu.
//
// Built as fier_groups.cuh says, and -DMAXIMUM where the heads' softmaxes are pooled by their maximum.
#define LISTS
#ifndef MAXIMUM
#define MAXIMUM 0
#endif
#include "fier_groups.cuh"
#define THREADS (WARPS * 32)
#include "reading.cuh"

#ifndef SPREAD
#define SPREAD 5.5f // times the wanted units may reach the bound, of a 64th of the row: as real scores need for a sample of 32 pairs a part
#endif
#ifndef RESIDENT
#define RESIDENT (D > 128 ? 1 : 2) // blocks on a multiprocessor
#endif

// Less where more are wanted.
__device__ __forceinline__ float spread(float share) { return fmaxf(2.5f, SPREAD * rsqrtf(sqrtf(share))); }

// q, bits, meta, table, lens, told as of fier_score; lists: row_bytes a row, a region of equal size for every warp of every part, of packets, then
// their first units (u32). Writes parts [R, gridDim.x, GROUP_HEADS]: reference, log2 of the sum of exponentials, the bound (listing.cuh) or -3e38 where all is
// listed; counts [R, gridDim.x, WARPS] packets, more than the capacity where they do not fit. slots, budgets, dense_below, room, sink, window as of
// select_units. Dynamic shared memory: the ring, then the sample: 2 KB a warp for four heads, 4 KB for more.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) fier_list(const real* q, const char* bits, const char* meta, const int* table, const int* lens,
    char* lists, float4* parts, int* counts, const uint4* told, const int* slots, const int* budgets, int q_stride, int table_stride, int page_groups,
    long long row_bytes, int budget, int dense_below, int room, int sink, int window, float scale_log2) {
  extern __shared__ __align__(128) char smem[];
  const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z, part = blockIdx.x, warp = threadIdx.x >> 5;
  const long long row = (long long)b * heads + head;
  Query query(q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, told, row);
  const int stored = lens[b], own_budget = budgets ? budgets[slots[b]] : 0, groups = stored <= budget ? 0 : stored >> 5;
  const Reading reading(stored, groups * 32, 1, Budget(own_budget, budget, dense_below, room, 1), sink, window);
  Groups share = {bits, meta, table + (long long)b * table_stride, head, heads, page_groups, stored, part, groups, reading.plain, true, 0,
      Dealt(groups, gridDim.x, part, warp, SAMPLED)};
  share.first = share.place(threadIdx.x & 31);
  const u32 region = (u32)(row_bytes / (gridDim.x * WARPS)) & ~127u;
  const int units = WARPS * SAMPLED * 64, reach = spread(64.f * reading.wanted / stored) * units * reading.wanted / stored;
  const long long list = (row * gridDim.x + part) * WARPS + warp;
  const bool all = share.dealt.full <= 2 * SAMPLED || reach > units / 10 * 7;
  const Listing to = {lists + row * row_bytes + (long long)region * (part * WARPS + warp), counts + list, (int)(region / (PACKET + 4)) & ~31, reach, all};
  if (reading.plain && (threadIdx.x & 31) == 0) counts[list] = 0;
  float4* to_parts = parts + (row * gridDim.x + part) * GROUP_HEADS;
  score_groups(share, query, smem, to, scale_log2, [] {}, [&](int h, float4 one) { to_parts[h] = one; });
}

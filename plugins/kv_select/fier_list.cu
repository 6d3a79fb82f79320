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

#define SPREAD 4 // times the wanted units may reach the bound: what is listed for nothing costs less than a row that has to be scored again
#ifndef RESIDENT
#define RESIDENT (D > 128 ? 1 : 2) // blocks on a multiprocessor
#endif

// q, bits, meta, table, lens, told as of fier_score; lists: row_bytes a row, a region of equal size for every warp of every part, of packets, then
// for every round of the warp a mask (u32) of those that it has: four bits a quartet of tokens, one of which stands for each of the two groups. Writes parts [R, gridDim.x, GROUP_HEADS]: reference, log2 of the sum of exponentials, the bound (listing.cuh) or -3e38 where all is
// listed; counts [R, gridDim.x, WARPS] packets, more than the capacity where they do not fit. slots, budgets, dense_below, room, sink, window as of
// select_units. Dynamic shared memory: the ring, then the sample: 2 KB a warp.
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
  const u32 region = (u32)(row_bytes / (gridDim.x * WARPS)) & ~127u, rounds = (u32)(row_bytes / (GROUP_HEADS * 128)) / (gridDim.x * WARPS) + 1;
  const int units = WARPS * SAMPLED * 64, reach = (int)((float)SPREAD * units * reading.wanted / stored);
  const long long list = (row * gridDim.x + part) * WARPS + warp;
  const bool all = share.dealt.full <= 2 * SAMPLED || reach > units / 10 * 7;
  const Listing to = {lists + row * row_bytes + (long long)region * (part * WARPS + warp), counts + list, (int)((region - 4 * rounds) / PACKET) & ~15, reach, all};
  if (reading.plain && (threadIdx.x & 31) == 0) counts[list] = 0;
  float4* to_parts = parts + (row * gridDim.x + part) * GROUP_HEADS;
  score_groups(share, query, smem, to, scale_log2, [] {}, [&](int h, float4 one) { to_parts[h] = one; });
}

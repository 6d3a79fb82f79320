// FIER's scores and what may be chosen of them, for many rows: scores never leave the multiprocessor, and the choice of one row runs beside the scores
// of the next.
//
// Built as fier_groups.cuh says, with -DBUFFERS (score buffers) and -DMAXIMUM (pool by maximum instead of mean). Every multiprocessor has one block; a
// team of blocks shares a row, and takes every so many-th. Sixteen warps score, two groups of four choose, each in every other row. rank_lists.cu finds the best of what is listed.
#define SCORERS 16 // warps, a power of two
#define CHOOSERS 4 // warps of each of two groups
#define WARPS SCORERS
#define HEADS GROUP_HEADS
#define THREADS (32 * (SCORERS + 2 * CHOOSERS))
#include "stream_choose.cuh"

// Fill the list of the team's rows that are not read whole: one warp, a row a lane.
__device__ __forceinline__ void list_lines(Stream& s, const int* lens, const int* slots, const int* budgets, int team, int teams, int rows, int heads, int rank,
    int blocks, int budget, int dense_below, int list_room, int sink, int window) {
  const int lane = threadIdx.x & 31;
  int live = 0;
#pragma unroll 1
  for (int from = team; from < rows; from += 32 * teams) {
    const int row = from + lane * teams, b = min(row, rows - 1) / heads, stored = lens[b], groups = stored >> 5;
    const Reading reading(stored, groups * 32, 1, Budget(budgets ? budgets[slots[b]] : 0, budget, dense_below, list_room, 1), sink, window);
    const bool alive = row < rows && !reading.plain;
    const u32 all = __ballot_sync(~0u, alive);
    if (alive) {
      s.lines[live + __popc(all & ((1u << lane) - 1))] = {b, row - b * heads, max(0, (groups - rank + blocks - 1) / blocks), stored, reading.first, reading.last,
          reading.wanted, row};
    }
    live += __popc(all);
  }
  if (lane == 0) s.live = live;
}

// q [B, q_stride] the rotated queries; bits, meta, table [B, table_stride], lens [B], slots, budgets and dense_below as of fier_select.cu; mail [R,
// STREAM_MAIL, blocks of a team] and stamps [1], zero before the first launch; lists [R, list_stride] and counts [R], which is zero before every launch,
// and bounds [R] for rank_lists.cu. pooled: null, or [R, list_stride] for checks. Grid: blocks of a team, teams. Dynamic shared memory: the warps'
// rings, then BUFFERS times GROUP_HEADS times `stride` scores, then twice `stride` pooled ones in four bytes; stride is a multiple of 64 and eight, and at least
// the units of a block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fier_stream(const real* q, const char* bits, const char* meta, const int* table, const int* lens,
    const int* slots, const int* budgets, uint4* mail, const u32* stamps, uint2* lists, int* counts, float* bounds, float* pooled, int q_stride,
    int table_stride, int page_groups, long long list_stride, int rows, int heads, int budget, int dense_below, int list_room, int sink, int window,
    int stride, float scale_log2) {
  extern __shared__ __align__(128) char dynamic[];
  __shared__ Stream s;
  __shared__ Chooser choosers[2];
  const int rank = blockIdx.x, blocks = gridDim.x, warp = threadIdx.x >> 5;
  if (warp == 0) list_lines(s, lens, slots, budgets, blockIdx.y, gridDim.y, rows, heads, rank, blocks, budget, dense_below, list_room, sink, window);
  if (threadIdx.x == 32) {
    gate_open(&s.asked[0], 32 * CHOOSERS), gate_open(&s.asked[1], 32 * CHOOSERS);
    for (int i = 0; i < BUFFERS; i++) gate_open(&s.full[i], SCORERS), gate_open(&s.empty[i], 32 * CHOOSERS);
  }
  __syncthreads();
  u16* buffers = reinterpret_cast<u16*>(dynamic + SCORERS * STAGES * STAGE_BYTES);
  if (warp < SCORERS) {
    more_registers<SCORER_REGISTERS>();
    score_lines(s, {bits, meta, table, table_stride, heads, page_groups, rank, blocks}, dynamic, buffers, stride, scale_log2);
  } else {
    fewer_registers<CHOOSER_REGISTERS>();
    const int group = (warp - SCORERS) / CHOOSERS;
    float* pooled_scores = reinterpret_cast<float*>(buffers + BUFFERS * GROUP_HEADS * stride) + group * stride;
    choose_lines(s, choosers[group], group, buffers, pooled_scores, stride, rank, blocks, mail, stamps, {lists, counts, bounds, pooled, list_stride},
        [&](const Line& line) { return q + (long long)line.sequence * q_stride + (long long)line.head * GROUP_HEADS * D; });
  }
}

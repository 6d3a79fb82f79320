// FIER scorer for many rows: every block scores an equal share of a row's groups, as fier.cu does, but keeps only what may be chosen.
//
// Built as fier_groups.cuh says with POOL 0 and G > 1, and -DMAXIMUM (the heads' softmaxes are pooled by maximum instead of mean).
#include "fier_lists.cuh"

#ifndef RESIDENT
#define RESIDENT (D > 128 ? 1 : 2) // blocks on a multiprocessor
#endif

// Arguments and parts as of fier.cu; parts are equal to its bit for bit, but infinite where a share's sums are beyond one reference. Writes lists in the
// place of the scores [R, G, score_stride] and notes [R, gridDim.x, NOTES]. wanted: tokens that a row may choose, at most.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) fier_list(const real* q, const char* bits, const char* meta, const int* table,
    const int* lens, __half* scores, float4* parts, int* notes, int q_stride, int table_stride, int page_groups, long long score_stride, int budget,
    int wanted, float scale_log2) {
  extern __shared__ __align__(128) char smem[];
  __shared__ int tallies[16];
  const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  const int stored = lens[b], groups = stored >> 5;
  const int per = (groups + gridDim.x - 1) / gridDim.x;
  const int begin = min(groups, (int)blockIdx.x * per), end = min(groups, begin + per);
  int* to_notes = notes + (row * gridDim.x + blockIdx.x) * NOTES;
  float4* to_parts = parts + (row * gridDim.x + blockIdx.x) * GROUP_HEADS;
  const bool idle = stored <= budget || !listed(groups * 32, wanted);
  const Groups share = {bits, meta, table + (long long)b * table_stride, head, heads, page_groups, stored, begin, end, idle};
  if (idle) {
    dependency_wait();
    if (threadIdx.x < WARPS) to_notes[threadIdx.x] = NOT_LISTED;
    return;
  }
  Listing listing = {List<GROUP_HEADS>(scores, row, score_stride, gridDim.x, blockIdx.x, threadIdx.x >> 5), to_notes, tallies, groups,
      (int)((long long)wanted * LIST_FACTOR * Listing::SPREAD / groups) + LIST_EXTRA};
  score_groups(share, q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, smem, nullptr, 0, scale_log2, [] {},
      [&](int h, float4 part) { to_parts[h] = part; }, listing);
}

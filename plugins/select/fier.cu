// FIER scorer: every block scores an equal share of a row's groups, scores and what is said about the shares go to the selector.
//
// Built as fier_groups.cuh says.
#include "fier_groups.cuh"

#define CACHED_SCORES (20 << 20) // that the second-level cache of an H200 holds beside what is read
#ifndef RESIDENT
#define RESIDENT (D > 128 ? 1 : 2) // blocks on a multiprocessor
#endif

// q [B, q_stride] the rotated queries; bits, meta the pool of one layer: BIT_BYTES and META_BYTES a group, [P, Hk, N / 32] groups;
// table [B, table_stride] page numbers; lens [B] stored tokens. Writes scores [R, STEP_HEADS, score_stride] fp16, times scale and log2(e) and
// minus the reference of the part, and parts [R, gridDim.x, STEP_HEADS]: reference, then log2 of the sum of exponentials (POOL 0 and G > 1)
// or the maximum, and the minimum. published [B, Hk, G HEAD_WORDS] as query.cuh says, or null.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) fier_score(const real* q, const char* bits, const char* meta,
    const int* table, const int* lens, __half* scores, float4* parts, const uint4* published, int q_stride,
    int table_stride, int page_groups, long long score_stride, int budget, float scale_log2) {
  extern __shared__ __align__(128) char smem[];
  const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  Query query(q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, published, row);
  const int stored = lens[b], groups = stored <= budget ? 0 : stored >> 5;
  const int per = (groups + gridDim.x - 1) / gridDim.x;
  const int begin = min(groups, (int)blockIdx.x * per), end = min(groups, begin + per);
  const bool many = score_stride * (heads * gridDim.z * STEP_HEADS) > CACHED_SCORES;
  Groups share = {bits, meta, table + (long long)b * table_stride, head, heads, page_groups, stored, begin, end, stored <= budget, many, 0};
  share.first = share.place(threadIdx.x & 31);
  float4* to_parts = parts + (row * gridDim.x + blockIdx.x) * STEP_HEADS;
  score_groups(share, query, smem, scores + row * STEP_HEADS * score_stride + begin * 32ll,
      score_stride, scale_log2, [] {}, [&](int h, float4 part) { to_parts[h] = part; });
}

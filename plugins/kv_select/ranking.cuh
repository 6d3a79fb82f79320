// Finding the wanted-th best unit of a row over the blocks of a cluster: histogram, cut, candidates.
//
// Built as pooling.cuh says, with -DCLUSTER (1 to 16).
#pragma once
#include "pooling.cuh"

#define BINS (4 * THREADS)
#define COARSE (BINS / 16)    // sums of sixteen bins: what the blocks of a cluster tell each other
#define CANDIDATES 1024
#define CROWD 192

struct Cut {
  int bin, above, count; // bin of the wanted-th unit, units in higher bins, units in it
};
struct Shared {
  __align__(16) int hist[BINS];
  __align__(16) u32 told[COARSE]; // sums of bins of this block
  union {
    __align__(16) u32 coarse[16][COARSE]; // sums of bins of every block of the cluster, before
    struct {
      u32 all_scores[CANDIDATES], all_units[CANDIDATES]; // the candidates of the cluster
      uint2 own[CANDIDATES];                             // scores and units of this block's
    };
  };
  int fine[16], warp_sums[64];
  float row_low, lows[32];
  int2 counts; // of this block: candidates, units above them
  int starts[CLUSTER + 1], before, lower, round_count[2];
  Cut cut;
  u32 cut_score, cut_unit;
};

// What is added to every part's scores, so that heads are normalized over the row; the range of raw scores. Uses sums [num_parts, HEADS].
__device__ __forceinline__ void normalize(Shared& s, Share& share, const float4* parts, int num_parts, float* sums) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  float lowest = 3e38f;
  for (int i = tid; i < num_parts * HEADS; i += THREADS) {
    const float4 v = parts[i];
    share.add[i] = v.x, sums[i] = v.y;
    lowest = fminf(lowest, v.z);
  }
  if (HEADS == 1) {
#pragma unroll
    for (int o = 16; o; o >>= 1) lowest = fminf(lowest, __shfl_xor_sync(~0u, lowest, o));
    if (lane == 0) s.lows[warp] = lowest;
  }
  __syncthreads();
  if (warp < HEADS) {
    float top = -3e38f, total = 0.f;
    for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, sums[p * HEADS + warp]);
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float zero = top; // raw scores: differences count at the top
    if (HEADS > 1) {
      for (int p = lane; p < num_parts; p += 32) total += exp2_fast(sums[p * HEADS + warp] - top);
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      zero += log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS));
    }
    for (int p = lane; p < num_parts; p += 32) share.add[p * HEADS + warp] -= zero;
    if (HEADS == 1) {
      float low = lane < THREADS / 32 ? s.lows[lane] : 3e38f;
#pragma unroll
      for (int o = 16; o; o >>= 1) low = fminf(low, __shfl_xor_sync(~0u, low, o));
      if (lane == 0) s.row_low = low - top;
    }
  }
  __syncthreads();
  share.scale = {0.f, 0.f};
  if (HEADS == 1) share.scale = {s.row_low, 65534.f / fmaxf(-s.row_low, 1e-30f)};
}

// Look through values [THREADS, N] of this thread, which stand for bins from `top` down, for the one with the wanted-th unit.
template <int N> __device__ __forceinline__ void find_cut(Shared& s, const int (&values)[N], int top, int wanted, int& turn) {
  int mine = 0;
#pragma unroll
  for (int i = 0; i < N; i++) mine += values[i];
  int seen = block_scan(mine, s.warp_sums, turn) - mine;
  if (seen < wanted && seen + mine >= wanted) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (seen < wanted && seen + values[i] >= wanted) s.cut = {top - i, seen, values[i]};
      seen += values[i];
    }
  }
  __syncthreads();
}

// The bin of the cluster's histograms with the wanted-th unit.
__device__ __forceinline__ void cut_cluster(Shared& s, int wanted, int rank, int& turn) {
  const int tid = threadIdx.x;
#if CLUSTER == 1
  __syncthreads();
  const int4 v = *reinterpret_cast<const int4*>(s.hist + BINS - 4 - tid * 4);
  const int values[4] = {v.w, v.z, v.y, v.x};
  find_cut<4>(s, values, BINS - 1 - tid * 4, wanted, turn);
#else
  __syncthreads();
  cluster_wait(); // every block has begun
  const int4 v = *reinterpret_cast<const int4*>(s.hist + tid * 4);
  int sum = v.x + v.y + v.z + v.w;
  sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
  if ((tid & 3) == 0) s.told[tid >> 2] = sum;
  __syncthreads();
  constexpr int QUADS = COARSE / 4;
  const int quad = tid % QUADS, c = tid / QUADS; // two warps tell a block
  if (c < CLUSTER) *peer(reinterpret_cast<uint4*>(s.coarse[rank]) + quad, c) = *(reinterpret_cast<const uint4*>(s.told) + quad);
  cluster_sync();
  int values[1] = {0};
  if (tid < COARSE) {
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) values[0] += s.coarse[c][COARSE - 1 - tid];
  }
  find_cut<1>(s, values, COARSE - 1 - tid, wanted, turn);
  if (tid < 32) { // the bins of that sum: two lanes a bin, from the highest on
    const int bin = s.cut.bin * 16 + 15 - (tid & 15), above = s.cut.above;
    int own = 0;
#pragma unroll
    for (int c = tid >> 4; c < CLUSTER; c += 2) own += peer(s.hist, c)[bin];
    own += __shfl_xor_sync(~0u, own, 16);
    const int seen = above + warp_scan(tid < 16 ? own : 0) - own;
    __syncwarp();
    if (tid < 16 && seen < wanted && seen + own >= wanted) s.cut = {bin, seen, own};
  }
  __syncthreads();
#endif
}

// Narrow the cut to one key of its bin: the need-th best by the counts of the lower four bits.
__device__ __forceinline__ void cut_fine(Shared& s, u32 from, int wanted, int need) {
  const int tid = threadIdx.x;
  cluster_sync();
  if (tid < 32) {
    int sum = 0;
    if (tid < 16) {
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) sum += peer(s.fine, c)[15 - tid];
    }
    const int seen = warp_scan(sum) - sum;
    if (seen < need && seen + sum >= need) s.cut = {(int)((from & ~15u) | (15 - tid)), wanted - need + seen, sum};
  }
  __syncthreads();
}

// Bring the candidates of all blocks together, and count what lower blocks have selected above them.
__device__ __forceinline__ void gather(Shared& s, int rank, bool listed) {
  const int tid = threadIdx.x, lane = tid & 31;
  if (CLUSTER == 1) return; // they are together
  constexpr int SLOTS = THREADS / CLUSTER; // candidates of a block that are fetched while their number is
  const int c = tid / SLOTS, slot = tid % SLOTS;
  uint2 first = make_uint2(0, 0);
  if (listed && c < CLUSTER) first = peer(s.own, c)[slot];
  if (tid < 32) {
    const int2 theirs = lane < CLUSTER ? *peer(&s.counts, lane) : make_int2(0, 0);
    const int end = warp_scan(theirs.x);
    int above = lane < rank ? theirs.y : 0;
#pragma unroll
    for (int o = 16; o; o >>= 1) above += __shfl_xor_sync(~0u, above, o);
    if (lane <= CLUSTER) s.starts[lane] = end - theirs.x; // lane CLUSTER: all
    if (lane == 0) s.before = above;
  }
  __syncthreads();
  if (!listed) return;
  if (c < CLUSTER) {
    const int start = s.starts[c], count = s.starts[c + 1] - start;
    for (int i = slot; i < count; i += SLOTS) {
      const uint2 v = i == slot ? first : peer(s.own, c)[i];
      s.all_scores[start + i] = v.x, s.all_units[start + i] = v.y;
    }
  }
  __syncthreads();
}

// Find the need-th best of the candidates: eight lanes compare one with all.
__device__ __forceinline__ void rank_candidates(Shared& s, int crowd, int need) {
  const int tid = threadIdx.x;
  for (int i = crowd + tid; i < ((crowd + 31) & ~31); i += THREADS) s.all_scores[i] = 0; // below every score
  __syncthreads();
  for (int i = tid >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
    const u32 own = i < crowd ? s.all_scores[i] : 0;
    int better = 0, equal = 0;
    for (int k = (tid & 7) * 4; k < crowd; k += 32) {
      const uint4 o = *reinterpret_cast<const uint4*>(s.all_scores + k);
      better += (o.x > own) + (o.y > own) + (o.z > own) + (o.w > own);
      equal += (o.x == own) + (o.y == own) + (o.z == own) + (o.w == own);
    }
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o), equal += __shfl_xor_sync(~0u, equal, o);
    if (i >= crowd || (tid & 7) || better >= need || better + equal < need) continue;
    const u32 unit = s.all_units[i];
    for (int k = 0; equal > 1 && k < crowd; k++) better += s.all_scores[k] == own && s.all_units[k] < unit;
    if (better == need - 1) s.cut_score = own, s.cut_unit = unit;
  }
  __syncthreads();
}

// Mark the candidates that are chosen in bitmap, a bit a unit of [lowest, behind); returns how many lie below.
__device__ __forceinline__ int mark_candidates(Shared& s, int crowd, u32 lowest, u32 behind, u32* bitmap) {
  int less = 0;
  for (int i = threadIdx.x; i < crowd; i += THREADS) {
    const u32 score = s.all_scores[i], unit = s.all_units[i];
    if (score > s.cut_score || (score == s.cut_score && unit <= s.cut_unit)) {
      if (unit < lowest) less++;
      else if (unit < behind) atomicOr(&bitmap[(unit - lowest) >> 5], 1u << ((unit - lowest) & 31));
    }
  }
  if (less) atomicAdd(&s.lower, less);
  __syncthreads();
  return s.lower;
}

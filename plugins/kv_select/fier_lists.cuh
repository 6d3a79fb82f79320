// What is kept of FIER's scores where rows are many: those of tokens that may be chosen, the selector of `select_lists.cu` ranks them.
//
// Every block scores a sample of its row first. The sample's normalizers give every head a weight w, and a threshold that LIST_FACTOR times the wanted
// number of tokens should reach with the sum of w exp2(score) over the heads (or its maximum). Four tokens one of which may reach it are listed with the
// scores of all heads. What is left out lies below the threshold, so once the row's normalizers are known, its probability lies below the
// threshold times the largest ratio of a head's true weight to w.
#pragma once
#include "fier_groups.cuh"
#include "lists.cuh"

#define SHARERS (MERGED ? 2 : 4) // lanes that share a set
#if MAXIMUM
#define MERGE(a, b) fmaxf(a, b)
#else
#define MERGE(a, b) ((a) + (b))
#endif

struct Listing {
  static constexpr int SAMPLE = 4;
  static constexpr int SAMPLED = SAMPLE * WARPS, SPREAD = SAMPLED - 2; // groups of the sample: the row's first and last, others evenly

  List<GROUP_HEADS> list;
  int* notes; // of the part
  int* tallies; // shared, SAMPLE rounds of the search
  int groups, rank; // of the row; of the sample's tokens so many reach the threshold
  int count;
  float weight0, weight1, threshold;
  u32 before; // lanes of lower sets

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ int pair() const { return MERGED ? lane() & 1 : lane() & 3; }
  __device__ __forceinline__ int second() const { return MERGED ? lane() >> 1 & 1 : 0; }

  __device__ __forceinline__ int sample_group(int i) const {
    const int spread = 1 + (int)((2u * i - 1u) * (u32)max(groups - 2, 0) / (2 * SPREAD));
    return i == 0 ? 0 : i == SAMPLED - 1 ? groups - 1 : min(spread, groups - 1);
  }
  // Of all lanes with the same heads.
  template <bool SUM> __device__ __forceinline__ float across(float x) const {
#pragma unroll
    for (int o = MERGED ? 2 : 4; o < 32; o <<= 1) {
      const float y = __shfl_xor_sync(~0u, x, o);
      x = SUM ? x + y : fmaxf(x, y);
    }
    return x;
  }
  // Pooled over the lanes that share a set.
  __device__ __forceinline__ float shared_by_lanes(float x) const {
    x = MERGE(x, __shfl_xor_sync(~0u, x, 1));
    if (!MERGED) x = MERGE(x, __shfl_xor_sync(~0u, x, 2));
    return x;
  }

  // Weights and threshold from the scores of the sample's groups.
  __device__ __forceinline__ void learn(const float (&t)[SAMPLE / 2][SETS][2][4], float (&tops)[WARPS][8], float2 (&sums)[WARPS][8]) {
    const int warp = threadIdx.x >> 5, head = 2 * pair();
    auto edge = [&](int r, int g) {
      const int i = (2 * r + (MERGED ? second() : g)) * WARPS + warp;
      return i == 0 || i == SAMPLED - 1;
    };
    float top0 = -3e38f, top1 = -3e38f, spread0 = -3e38f, spread1 = -3e38f;
#pragma unroll
    for (int r = 0; r < SAMPLE / 2; r++) {
#pragma unroll
      for (int g = 0; g < SETS; g++) {
#pragma unroll
        for (int v = 0; v < 4; v++) top0 = fmaxf(top0, t[r][g][0][v]), top1 = fmaxf(top1, t[r][g][1][v]);
        if (!edge(r, g)) spread0 = fmaxf(fmaxf(spread0, fmaxf(t[r][g][0][0], t[r][g][0][1])), fmaxf(t[r][g][0][2], t[r][g][0][3]));
        if (!edge(r, g)) spread1 = fmaxf(fmaxf(spread1, fmaxf(t[r][g][1][0], t[r][g][1][1])), fmaxf(t[r][g][1][2], t[r][g][1][3]));
      }
    }
    top0 = across<false>(top0), top1 = across<false>(top1), spread0 = across<false>(spread0), spread1 = across<false>(spread1);
    const bool first = lane() < 4 && second() == 0;
    if (first) tops[warp][head] = top0, tops[warp][head + 1] = top1;
    if (threadIdx.x < 16) tallies[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) top0 = fmaxf(top0, tops[w][head]), top1 = fmaxf(top1, tops[w][head + 1]);
    float sum0 = 0.f, sum1 = 0.f;
    const float stands_for = (float)max(groups - 2, 0) * (1.f / SPREAD);
#pragma unroll
    for (int r = 0; r < SAMPLE / 2; r++) {
#pragma unroll
      for (int g = 0; g < SETS; g++) {
        const float times = edge(r, g) ? 1.f : stands_for;
#pragma unroll
        for (int v = 0; v < 4; v++) sum0 += times * exp2_fast(t[r][g][0][v] - top0), sum1 += times * exp2_fast(t[r][g][1][v] - top1);
      }
    }
    // A warp's heaviest token stands for itself: heads whose weight is too small by chance loosen the bound, others only lengthen the lists.
    sum0 = across<true>(sum0) - fmaxf(stands_for - 1.f, 0.f) * exp2_fast(spread0 - top0);
    sum1 = across<true>(sum1) - fmaxf(stands_for - 1.f, 0.f) * exp2_fast(spread1 - top1);
    if (first) sums[warp][head] = make_float2(sum0, 0.f), sums[warp][head + 1] = make_float2(sum1, 0.f);
    __syncthreads();
    sum0 = sum1 = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum0 += sums[w][head].x, sum1 += sums[w][head + 1].x;
    weight0 = head < GROUP_HEADS ? -(top0 + log2f(sum0)) : -3e38f; // log2, still without a reference
    weight1 = head + 1 < GROUP_HEADS ? -(top1 + log2f(sum1)) : -3e38f;

    int pooled[SAMPLE * 32 / 32]; // every lane has as many of the warp's tokens, as ordered bits; -1 where they do not count
#pragma unroll
    for (int r = 0; r < SAMPLE / 2; r++) {
#pragma unroll
      for (int g = 0; g < SETS; g++) {
        float p[4];
#pragma unroll
        for (int v = 0; v < 4; v++) p[v] = shared_by_lanes(MERGE(exp2_fast(t[r][g][0][v] + weight0), exp2_fast(t[r][g][1][v] + weight1)));
        const bool odd = pair() & 1, upper = pair() & 2, none = edge(r, g);
        const float x = MERGED ? odd ? p[2] : p[0] : upper ? odd ? p[3] : p[2] : odd ? p[1] : p[0];
        pooled[2 * r + (MERGED ? 0 : g)] = none ? -1 : (int)__float_as_uint(x);
        if (MERGED) pooled[2 * r + 1] = none ? -1 : (int)__float_as_uint(odd ? p[3] : p[1]);
      }
    }
    int from = 0, to = 0x7f80; // the upper sixteen bits of the largest threshold that `rank` tokens reach
#pragma unroll 1
    for (int i = 0; i < 15; i++) {
      const int middle = (from + to + 1) >> 1;
      int n = 0;
#pragma unroll
      for (int k = 0; k < SAMPLE; k++) n += pooled[k] >= middle << 16;
      n = __reduce_add_sync(~0u, n);
      if (lane() == 0 && n) atomicAdd(&tallies[i], n);
      __syncthreads();
      if (tallies[i] >= rank) from = middle;
      else to = middle - 1;
    }
    threshold = fmaxf(__uint_as_float((u32)from << 16), 7.9e-31f); // so that a product that underflows lies below it
  }

  // The references of the share are known.
  __device__ __forceinline__ void begin(float ref0, float ref1) {
    const int head = 2 * pair();
    weight0 = fminf(fmaxf(ref0 + weight0, -100.f), 100.f), weight1 = fminf(fmaxf(ref1 + weight1, -100.f), 100.f);
    if (threadIdx.x < 4 && second() == 0) {
      if (head < GROUP_HEADS) notes[NOTE_WEIGHTS + head] = (int)__float_as_uint(weight0);
      if (head + 1 < GROUP_HEADS) notes[NOTE_WEIGHTS + head + 1] = (int)__float_as_uint(weight1);
    }
    if (threadIdx.x == 0) notes[NOTE_THRESHOLD] = (int)__float_as_uint(threshold);
    weight0 = head < GROUP_HEADS ? exp2_fast(weight0) : 0.f, weight1 = head + 1 < GROUP_HEADS ? exp2_fast(weight1) : 0.f;
    count = 0;
    before = (1u << (lane() & ~(SHARERS - 1))) - 1;
  }

  // Scores of four tokens of a group and this lane's two heads: lists them where they may be chosen.
  __device__ __forceinline__ void keep(bool exists, const float (&t)[2][4], float& sum0, float& sum1, int group) {
    float e[2][4], bound = 0.f;
#pragma unroll
    for (int v = 0; v < 4; v++) {
      e[0][v] = exp2_fast(t[0][v]), e[1][v] = exp2_fast(t[1][v]);
      bound = fmaxf(bound, MERGE(weight0 * e[0][v], weight1 * e[1][v]));
    }
    if (exists) sum0 += (e[0][0] + e[0][1]) + (e[0][2] + e[0][3]), sum1 += (e[1][0] + e[1][1]) + (e[1][2] + e[1][3]);
    bound = shared_by_lanes(bound); // of four tokens: at least the sum of any
    const bool hit = exists && bound >= threshold;
    const u32 hits = __ballot_sync(~0u, hit);
    const int at = count + __popc(hits & before) / SHARERS;
    if (hit && at < list.room) {
      if (2 * pair() < GROUP_HEADS) {
        *reinterpret_cast<uint4*>(list.entries + (u32)at * list.ENTRY + pair() * 16) =
            make_uint4(pack_halves(t[0][0], t[0][1]), pack_halves(t[0][2], t[0][3]), pack_halves(t[1][0], t[1][1]), pack_halves(t[1][2], t[1][3]));
      }
      if (pair() == 0) list.sets[at] = group * 8 + (lane() >> 2);
    }
    count += __popc(hits) / SHARERS;
  }

  // Sums that are too large for one reference are said to be infinite: the row is scored again.
  __device__ __forceinline__ void end(float& sum0, float& sum1) {
    const float infinity = __uint_as_float(0x7f800000u);
    if (2 * pair() < GROUP_HEADS && !(sum0 < 1e36f)) sum0 = infinity;
    if (2 * pair() + 1 < GROUP_HEADS && !(sum1 < 1e36f)) sum1 = infinity;
    if (lane() == 0) notes[threadIdx.x >> 5] = count;
  }
};

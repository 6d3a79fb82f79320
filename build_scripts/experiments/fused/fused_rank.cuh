// Normalizers, histogram, exact cut and output of fused.cu.
#pragma once
#include "fused_block.cuh"

// Tell the cluster the block's normalizers (or limits), and learn the row's: weight, or limits.
__device__ __forceinline__ void normalize(int rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  __syncthreads();
#if RAW
  if (warp == 0) {
    float high = lane < WARPS ? warp_ref[lane][0] : -3e38f, low = lane < WARPS ? warp_sum[lane][0] : 3e38f;
#pragma unroll
    for (int o = 16; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o)), low = fminf(low, __shfl_xor_sync(~0u, low, o));
    if (lane < CLUSTER) send(there(&gathered[rank][0], lane), make_float2(high, low), there(arrivals, lane));
  }
  received(0);
  if (warp == 0) {
    float high = lane < CLUSTER ? gathered[lane % CLUSTER][0].x : -3e38f, low = lane < CLUSTER ? gathered[lane % CLUSTER][0].y : 3e38f;
#pragma unroll
    for (int o = 16; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o)), low = fminf(low, __shfl_xor_sync(~0u, low, o));
    if (lane == 0) limits = make_float2(low, BINS / fmaxf(high - low, 1e-30f));
  }
#else
  const bool real_head = lane < WARPS && warp < GROUP_HEADS;
  const float ref = real_head ? warp_ref[lane][warp] : 0.f, sum = real_head ? warp_sum[lane][warp] : 0.f;
  if (warp < GROUP_HEADS) {
    const float mine = sum > 0.f ? ref + __log2f(sum) : -3e38f;
    float top = mine;
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float total = exp2_fast(mine - top);
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane < CLUSTER) send(there(&gathered[rank][warp], lane), make_float2(top + __log2f(total), 0.f), there(arrivals, lane));
  }
  received(0);
  if (warp < GROUP_HEADS) {
    const float theirs = lane < CLUSTER ? gathered[lane % CLUSTER][warp].x : -3e38f;
    float top = theirs;
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float total = exp2_fast(theirs - top);
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane < WARPS) weight[lane][warp] = exp2_fast(ref - top - __log2f(total)) * (POOL == 0 ? 1.f / GROUP_HEADS : 1.f);
  }
#endif
  __syncthreads();
}

#if POOL == 3
#define JOIN_SHARES(a, b) fmaxf(a, b)
#else
#define JOIN_SHARES(a, b) ((a) + (b))
#endif
// Bins rise with the key. Softmaxes: 32 an octave below the largest value that the wanted-th unit can have, 1 / wanted times G at most.
struct Binning {
  float low, factor;
  int offset;
  __device__ __forceinline__ int of(u32 key) const {
#if RAW
    return (int)fminf(fmaxf((unordered(key) - low) * factor, 0.f), BINS - 1.f);
#else
    return min(max((int)(key - 1 >> 18) - offset, 0), BINS - 1);
#endif
  }
};
// Keys of the share, 0 where a unit is no candidate, and how many fall in which bin.
__device__ __forceinline__ void count(const Row& row, const char* values, int stride, u32* keys, const Binning& binning, float* pooled_out) {
  const int padded = (row.units + 127) & ~127;
  for (int i = threadIdx.x * 4; i < padded; i += THREADS * 4) {
    const int u = row.begin + i;
    u32 key[4] = {0, 0, 0, 0};
    if (i < row.units && u < row.last) {
#if RAW
      const uint4 v = *reinterpret_cast<const uint4*>(keys + i);
      key[0] = v.x, key[1] = v.y, key[2] = v.z, key[3] = v.w;
#else
      float pooled[4] = {0.f, 0.f, 0.f, 0.f};
      const float* w = weight[i / CHUNK % WARPS];
#pragma unroll
      for (int h = 0; h < GROUP_HEADS; h++) {
        const uint2 e = *reinterpret_cast<const uint2*>(values + 2 * (h * stride + i));
        const u32 bits[4] = {e.x << 16, e.x & 0xffff0000u, e.y << 16, e.y & 0xffff0000u};
#pragma unroll
        for (int k = 0; k < 4; k++) pooled[k] = JOIN_SHARES(pooled[k], __uint_as_float(bits[k]) * w[h]);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) key[k] = __float_as_uint(pooled[k]) + 1;
#endif
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (u + k < row.first || u + k >= row.last) key[k] = 0;
        else {
          atomicAdd(&hist[binning.of(key[k])], 1);
          if (pooled_out) pooled_out[u + k] = RAW ? unordered(key[k]) : __uint_as_float(key[k] - 1);
        }
      }
    }
    *reinterpret_cast<uint4*>(keys + i) = make_uint4(key[0], key[1], key[2], key[3]);
  }
}
// Send the histogram to every block of the cluster: slots [CLUSTER, BINS] of 16 bits. Rounds after the first reuse them between barriers.
template <bool First> __device__ __forceinline__ void spread(int rank, uint4* slots) {
  __syncthreads();
  const int piece = threadIdx.x % (BINS / 8); // eight bins
  const uint4 x = reinterpret_cast<const uint4*>(hist)[2 * piece], y = reinterpret_cast<const uint4*>(hist)[2 * piece + 1];
  const uint4 packed = make_uint4(x.x | x.y << 16, x.z | x.w << 16, y.x | y.y << 16, y.z | y.w << 16);
#pragma unroll
  for (int p = threadIdx.x / (BINS / 8); p < CLUSTER; p += THREADS / (BINS / 8)) {
    if (First) send(there(slots + rank * (BINS / 8) + piece, p), packed, there(arrivals + 1, p));
    else put(there(slots + rank * (BINS / 8) + piece, p), packed);
  }
  if (First) {
    received(1);
  } else {
    cluster_arrive();
    cluster_wait();
  }
}
// Look through the cluster's bins from the top for the one with the wanted-th unit.
__device__ __forceinline__ void find_cut(const u32* slots, int rank, int wanted, int& turn) {
  static_assert(BINS == 2 * THREADS, "two bins a thread");
  const int pair = THREADS - 1 - threadIdx.x;
  int lower = 0, upper = 0;
#pragma unroll
  for (int c = 0; c < CLUSTER; c++) {
    const u32 v = slots[c * THREADS + pair];
    lower += v & 0xffffu, upper += v >> 16;
  }
  const int seen = block_scan(lower + upper, turn) - lower - upper;
  if (seen < wanted && seen + upper >= wanted) cut = {2 * pair + 1, seen, upper};
  else if (seen < wanted && seen + upper + lower >= wanted) cut = {2 * pair, seen + upper, lower};
  __syncthreads();
  // Units above the cut in lower blocks: a warp a block.
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (warp < rank) {
    int above = 0;
    for (int i = lane; i < THREADS; i += 32) {
      const u32 v = slots[warp * THREADS + i];
      above += (2 * i > cut.bin ? v & 0xffffu : 0) + (2 * i + 1 > cut.bin ? v >> 16 : 0);
    }
    above = warp_total(above);
    if (lane == 0 && above) atomicAdd(&before, above);
  }
}
__device__ __forceinline__ u64 with_index(u32 key, int u) { return (u64)key << 20 | (0xfffff - u); } // at equal scores the lower index is better

// Find the wanted-th best unit of the row: returns its first bin; cut_key is the least key that is selected in it, before what lower blocks select.
__device__ __forceinline__ Cut rank_units(const Row& row, const u32* keys, uint4* slots, const Binning& binning, int wanted, int& turn) {
  const int tid = threadIdx.x, lane = tid & 31;
  const u32* words = reinterpret_cast<const u32*>(slots);
  const int padded = (row.units + 127) & ~127;
  spread<true>(row.rank, slots);
  MARK(6)
  find_cut(words, row.rank, wanted, turn);
  MARK(7)
  const Cut first = cut;
  Cut now = first;
  int need = wanted - now.above;
  u64 prefix = 0, mask = 0;
  // Crowded: further digits of score and index, ten bits a round, until few are left. The last round tells single units apart.
  for (int shift = 42; now.count > CANDIDATES && now.count != need; shift = max(0, shift - 10)) {
    const u32 digits = shift ? 1023 : 3;
    __syncthreads();
    for (int i = tid; i < BINS; i += THREADS) hist[i] = 0;
    __syncthreads();
    for (int i = tid; i < padded; i += THREADS) {
      const u64 key = with_index(keys[i], row.begin + i);
      if (keys[i] && binning.of(keys[i]) == first.bin && (key & mask) == prefix) atomicAdd(&hist[key >> shift & digits], 1);
    }
    cluster_arrive();
    cluster_wait(); // everybody has read the histograms before
    spread<false>(row.rank, slots);
    find_cut(words, row.rank, need, turn);
    now = cut;
    need -= now.above;
    prefix |= (u64)now.bin << shift, mask |= (u64)digits << shift;
  }
  const bool whole = now.count == need;
  int base = 0, below = 0; // candidates of lower blocks
  if (lane < CLUSTER) below = words[lane * THREADS + (now.bin >> 1)] >> (now.bin & 1) * 16 & 0xffff;
  base = warp_total(lane < row.rank ? below : 0);
  if (whole) {
    if (tid == 0) cut_key = prefix, atomicAdd(&before, base);
    __syncthreads();
    return first;
  }
  for (int i = tid * 4; i < padded; i += THREADS * 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(keys + i);
    const u32 key[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u64 both = with_index(key[k], row.begin + i + k);
      if (key[k] && binning.of(key[k]) == first.bin && (both & mask) == prefix) own[atomicAdd(&own_count, 1)] = both;
    }
  }
  __syncthreads();
  const int count = own_count;
  if (tid == 0) expected(2, now.count * 8);
  for (int i = tid; i < count * CLUSTER; i += THREADS) {
    const int to = i % CLUSTER;
    send(there(rivals + base + i / CLUSTER, to), own[i / CLUSTER], there(arrivals + 2, to));
  }
  received(2);
  MARK(8)
  // Eight lanes compare one candidate with all.
  for (int i = tid >> 3; i < ((now.count + 3) & ~3); i += THREADS / 8) {
    const u64 a = i < now.count ? rivals[i] : 0;
    int better = 0;
    for (int k = tid & 7; k < now.count; k += 8) better += rivals[k] > a;
    better += __shfl_xor_sync(~0u, better, 1), better += __shfl_xor_sync(~0u, better, 2), better += __shfl_xor_sync(~0u, better, 4);
    if (i < now.count && (tid & 7) == 0) {
      if (better == need - 1) cut_key = a;
      if (better < need && 0xfffff - (int)(a & 0xfffff) < row.begin) atomicAdd(&before, 1);
    }
  }
  __syncthreads();
  return first;
}

// Write the block's selected units in ascending order; a warp owns consecutive tiles of 128.
// Their keys and values are fetched into the second-level cache where pools are given: attention comes next.
__device__ __forceinline__ void emit(const Row& row, const u32* keys, const Binning& binning, int bin, int* out, const char* pool_keys,
                                     const char* pool_values, int& turn) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tiles = (row.units + 127) >> 7, each = (tiles + WARPS - 1) / WARPS, begin = min(tiles, warp * each), end = min(tiles, begin + each);
  const u64 least = cut_key;
  auto flags = [&](int tile) {
    const uint4 v = *reinterpret_cast<const uint4*>(keys + tile * 128 + lane * 4);
    const u32 key[4] = {v.x, v.y, v.z, v.w};
    u32 chosen = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int own_bin = binning.of(key[k]);
      if (key[k] && (own_bin > bin || (own_bin == bin && with_index(key[k], row.begin + tile * 128 + lane * 4 + k) >= least))) chosen |= 1u << k;
    }
    return chosen;
  };
  int mine = 0;
  for (int t = begin; t < end; t++) mine += __popc(flags(t));
  const int total = warp_total(mine);
  int* sums = warp_counts + turn * 32;
  turn ^= 1;
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  int at = before + warp_total(lane < warp ? sums[lane] : 0);
  const u32 below = (1u << lane) - 1;
  for (int t = begin; t < end; t++) {
    const u32 chosen = flags(t);
    int lower = 0, whole = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 votes = __ballot_sync(~0u, chosen >> k & 1);
      lower += __popc(votes & below), whole += __popc(votes);
    }
    int to = at + lower;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (chosen >> k & 1) out[to++] = row.begin + t * 128 + lane * 4 + k;
    }
    at += whole;
    if (pool_keys == nullptr) continue;
#if PAGE
#pragma unroll
    for (int k = 0; k < 4; k++) {
      for (u32 votes = __ballot_sync(~0u, chosen >> k & 1); votes; votes &= votes - 1) {
        const long long from = (long long)row.places[t * 128 + (__ffs(votes) - 1) * 4 + k] * (2 * D * PAGE);
        for (int line = lane * 128; line < 2 * D * PAGE; line += 32 * 128) prefetch(pool_keys + from + line), prefetch(pool_values + from + line);
      }
    }
#else
    for (u32 left = chosen; left; left &= left - 1) {
      const int i = t * 128 + lane * 4 + __ffs(left) - 1;
      const long long from = ((long long)row.places[i >> 5] * 32 + (i & 31)) * (2 * D);
#pragma unroll
      for (int line = 0; line < 2 * D; line += 128) prefetch(pool_keys + from + line), prefetch(pool_values + from + line);
    }
#endif
  }
}

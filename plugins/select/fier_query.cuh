// The query of a row on its way to the products of fier_groups.cuh, by all warps of a block.
//
// Built as that says.
#pragma once
#include "query.cuh"

#define PATIENCE 128 // looks at a word of the query before the block waits for the kernels in front

// The query of a row: published says where the append kernel in front tells it (query.cuh), in words that were empty before that began; null: nowhere.
// q [G, D] holds it in any case behind the wait.
struct Query {
  const real* q;
  const uint4* published;
  uint4 word; // of this thread, looked at before anything else

  __device__ __forceinline__ Query(const real* q_, const uint4* words, long long row)
      : q(q_), published(words ? words + row * (GROUP_HEADS * HEAD_WORDS) : nullptr), word(make_uint4(EMPTY, EMPTY, EMPTY, EMPTY)) {
    poll();
  }
  __device__ __forceinline__ void poll() {
    if (published && is_empty(word)) word = poll_query(published + min((int)threadIdx.x, GROUP_HEADS * HEAD_WORDS - 1));
  }
};

// The query in the order of the products, for every lane four registers at a time: register 4 (2 w + f) + i, the p-th, holds channel 4 p + tig of the
// lane's head in its upper half, over a power of two.
struct Fragments {
  uint4 four[D / 16][32];
  int exponents[8];
};

// From the words of the append kernel. False, for the whole block, where some stayed empty for so many looks more.
__device__ __forceinline__ bool take_published(Fragments& to, const Query& query, int patience) {
  int missing = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < GROUP_HEADS * HEAD_WORDS; i += WARPS * 32) {
    const int head = i / HEAD_WORDS, w = i - head * HEAD_WORDS;
    uint4 v = query.word;
#pragma unroll 1
    for (int left = patience; left > 0 && (is_empty(v) || i != threadIdx.x); left--) {
      v = poll_query(query.published + i);
      if (!is_empty(v)) break;
    }
    missing |= is_empty(v);
    if (w == HEAD_WORDS - 1) {
      to.exponents[head] = (int)v.x - EXPONENT_ZERO;
    } else {
      uint4* at = &to.four[w / 4 * 2][head * 4 + w % 4];
      at[0] = make_uint4(v.x << 16, v.x & 0xffff0000u, v.y << 16, v.y & 0xffff0000u);
      at[32] = make_uint4(v.z << 16, v.z & 0xffff0000u, v.w << 16, v.w & 0xffff0000u);
    }
  }
  return !__syncthreads_or(missing);
}
// From the query itself, [G, D].
__device__ __forceinline__ void take_query(Fragments& to, const real* q) {
  __shared__ __align__(16) real queries[GROUP_HEADS][D + 8]; // padded against bank conflicts
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int i = threadIdx.x * 8; i < GROUP_HEADS * D; i += WARPS * 32 * 8) {
    *reinterpret_cast<uint4*>(&queries[i / D][i % D]) = __ldcg(reinterpret_cast<const uint4*>(q + i));
  }
  __syncthreads();
  if (warp < GROUP_HEADS) {
    u32 top = 0;
#pragma unroll
    for (int i = lane; i < D; i += 32) top = max(top, __float_as_uint(fabsf(to_float(queries[warp][i]))));
    top = __reduce_max_sync(~0u, top);
    if (lane == 0) to.exponents[warp] = exponent_of(top);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < D / 16 * GROUP_HEADS * 4; i += WARPS * 32) {
    const int p = i / (GROUP_HEADS * 4), other = i - p * (GROUP_HEADS * 4), head = other >> 2, from = p * 16 + (other & 3);
    const float down = power_of_two(-to.exponents[head]);
    u32 four[4];
#pragma unroll
    for (int k = 0; k < 4; k++) four[k] = pack_halves(0.f, to_float(queries[head][from + 4 * k]) * down);
    to.four[p][other] = make_uint4(four[0], four[1], four[2], four[3]);
  }
  __syncthreads();
}

// What the blocks that have parts of a row exchange through global memory, and how they merge it. Built as tile.cuh says.
#pragma once
#include "tile.cuh"

#define QUADS (GROUP_HEADS * D / 4) // of a row's channels
#ifndef PATIENCE
#define PATIENCE 4096 // looks at a word that is not there, a few milliseconds
#endif
#define EMPTY 0xffffffffu // of a word that nobody has written; no sum comes out as this NaN

// A word of sixteen bytes is written and read as one: who sees it filled has it all, so there is no barrier, no fence and no counter. Who has merged
// what a word says empties it again.
__device__ __forceinline__ void send(uint4* to, u32 a, u32 b, u32 c, u32 d) {
  const u64 low = (u64)b << 32 | a, high = (u64)d << 32 | c;
  asm volatile("{.reg .b128 v;\n mov.b128 v,{%1,%2};\n st.relaxed.gpu.global.b128 [%0],v;}" ::"l"(to), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ uint4 poll(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v;\n ld.relaxed.gpu.global.b128 v,[%2];\n mov.b128 {%0,%1},v;}" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ __forceinline__ void empty(uint4* word) { send(word, EMPTY, EMPTY, EMPTY, EMPTY); }

// A row that several blocks have parts of, as one of them sees it. Every block merges a share of `each` quads of channels.
struct Parts {
  int low, blocks, rank, each, row; // the first of its blocks, how many, and which of them this is
  real* to;
  // The first block has the row as its last part, the others as their first.
  __device__ __forceinline__ int place(int p) const { return 2 * (low + p) + (p == 0); }
  // What block p of the row sends: its quads, and behind them its largest score and sum of head h for block r at place r + h, which no other pair of
  // a block and a head in its share has.
  __device__ __forceinline__ uint4* words(uint4* shares, int p) const {
    return shares + (long long)place(p) * (QUADS + GROUP_HEADS + gridDim.x);
  }
  __device__ __forceinline__ int begin(int r) const { return min(r * each, QUADS); }
};

// Tell the other blocks of the row what this one has seen.
__device__ __forceinline__ void send_part(const Parts& row, uint4* shares, const Block& block, const float* laid) {
  uint4* to = row.words(shares, row.rank);
  for (int r = threadIdx.x; r < row.blocks; r += THREADS) {
    const int begin = row.begin(r), end = row.begin(r + 1);
    for (int h = begin * 4 / D; h * D < end * 4; h++) send(to + QUADS + r + h, __float_as_uint(block.top[h]), __float_as_uint(block.sum[h]), 0, 0);
  }
  for (int i = threadIdx.x; i < QUADS; i += THREADS) {
    const float4 x = Block::output(laid, i * 4 / D, i * 4 % D);
    send(to + i, __float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
  }
}

// Call f(block of the row, its words, quad) for the quads of share r, one by as many lanes as the row has blocks; done(quad) behind those of a quad,
// by all lanes of a warp. Quads behind the share are -1.
template <typename F, typename G> __device__ __forceinline__ void for_share(const Parts& row, int r, uint4* shares, int span, F f, G done) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, end = row.begin(r + 1), beside = 32 / span;
  for (int i = row.begin(r) + warp * beside; i < end; i += WARPS * beside) {
    const int quad = i + lane / span < end ? i + lane / span : -1;
    for (int p = lane & (span - 1); quad >= 0 && p < row.blocks; p += span) f(row.words(shares, p), quad);
    done(quad);
  }
}
__device__ __forceinline__ int span_of(const Parts& row) {
  int span = 2;
  while (span < 32 && span < row.blocks) span *= 2;
  return span;
}

// Merge share r of a row and empty its words; with -DNIBBLES also lse [G]. Return whether every block sent its part while it was looked at `patience`
// times: where one did not, nothing is written. `timed_out` is zero before.
__device__ __forceinline__ bool merge(const Parts& row, int r, uint4* shares, float* lse, int patience, int& timed_out) {
  const int lane = threadIdx.x & 31, span = span_of(row), own = lane & (span - 1);
  float top = -1e30f, sum = 0.f;
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  bool gave_up = false;
  auto take = [&](uint4* from, int quad) {
    const uint4 *outputs = from + quad, *score = from + QUADS + r + quad * 4 / D;
    uint4 v = poll(outputs), t = poll(score);
    for (int left = patience; t.w == EMPTY || v.w == EMPTY;) {
      if (left-- == 0) {
        gave_up = true;
        return;
      }
      if (t.w == EMPTY) t = poll(score);
      if (v.w == EMPTY) v = poll(outputs);
    }
    const float m = fmaxf(top, __uint_as_float(t.x)), f = exp2_fast(top - m), g = exp2_fast(__uint_as_float(t.x) - m);
    top = m, sum = sum * f + __uint_as_float(t.y) * g;
    x.x = x.x * f + __uint_as_float(v.x) * g, x.y = x.y * f + __uint_as_float(v.y) * g;
    x.z = x.z * f + __uint_as_float(v.z) * g, x.w = x.w * f + __uint_as_float(v.w) * g;
  };
  for_share(row, r, shares, span, take, [&](int quad) {
    if (__any_sync(~0u, gave_up)) {
      timed_out = 1;
      return;
    }
    float m = top;
    for (int o = span / 2; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    const float f = exp2_fast(top - m);
    sum *= f, x.x *= f, x.y *= f, x.z *= f, x.w *= f;
    for (int o = span / 2; o; o >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, o);
      x.x += __shfl_xor_sync(~0u, x.x, o), x.y += __shfl_xor_sync(~0u, x.y, o);
      x.z += __shfl_xor_sync(~0u, x.z, o), x.w += __shfl_xor_sync(~0u, x.w, o);
    }
    if (quad >= 0 && own == 0) {
      store_output(row.to + quad * 4, x, 1.f / sum);
#ifdef NIBBLES
      if (quad * 4 % D == 0) lse[quad * 4 / D] = m + log2f(sum);
#endif
    }
    top = -1e30f, sum = 0.f, x = make_float4(0.f, 0.f, 0.f, 0.f);
  });
  __syncthreads(); // several warps look at a head's score
  if (timed_out) return false;
  for_share(row, r, shares, span, [&](uint4* from, int quad) { empty(from + quad); }, [](int) {});
  for (int p = threadIdx.x; p < row.blocks; p += THREADS) {
    for (int h = row.begin(r) * 4 / D; h * D < row.begin(r + 1) * 4; h++) empty(row.words(shares, p) + QUADS + r + h);
  }
  return true;
}

// What a block does when it has sent its parts of a row. Blocks may wait for each other only while all have places on the GPU, and other kernels may
// hold those. So who has waited long leaves its share of the merge to whoever sends the last part: it notes so in `unmerged`, then looks once more, while
// who has sent a part looks at `unmerged` behind it; of the two at least one sees what the other wrote, and the exchange lets only one of them merge.
struct MergeState {
  int others_unmerged[2], timed_out[2], incomplete[2], claimed;
};
__device__ __forceinline__ void finish_row(const Parts& row, MergeState& state, int i, uint4* shares, int* unmerged, float* lse) {
  int from = 0, to = 0; // shares that nobody else may merge
  if (merge(row, row.rank, shares, lse, PATIENCE, state.timed_out[i])) {
    if (state.others_unmerged[i]) to = row.blocks;
  } else {
    if (threadIdx.x == 0) {
      atomicExch(unmerged + row.place(row.rank), 1);
      __threadfence();
    }
    __syncthreads();
    for_share(row, row.rank, shares, span_of(row), [&](uint4* words, int quad) {
      if (poll(words + quad).w == EMPTY || poll(words + QUADS + row.rank + quad * 4 / D).w == EMPTY) state.incomplete[i] = 1;
    }, [](int) {});
    __syncthreads();
    if (!state.incomplete[i]) from = row.rank, to = from + 1;
  }
  for (int r = from; r < to; r++) {
    __syncthreads();
    if (threadIdx.x == 0) state.claimed = atomicExch(unmerged + row.place(r), 0), state.timed_out[i] = 0;
    __syncthreads();
    if (state.claimed) merge(row, r, shares, lse, -1, state.timed_out[i]);
  }
}

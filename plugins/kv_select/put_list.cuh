// Writing a row's list. Built as pooling.cuh says.
#pragma once
#include "units.cuh"

// Write the block's chosen units, ascending, from out[at] on.
__device__ __forceinline__ void put_chosen(Desk& s, const Units& units, const unsigned char* flags, int* out, int at) {
  const int packets = units.count / 8, each = (packets + THREADS - 1) / THREADS;
  const int from = min(packets, (int)threadIdx.x * each), to = min(packets, from + each);
  int mine = 0, turn = 0;
#pragma unroll 1
  for (int i = from; i < to; i++) mine += __popc(flags[i]);
  at += block_scan(mine, s.warp_sums, turn) - mine;
#pragma unroll 1
  for (int i = from; i < to; i++) {
    u32 set = flags[i];
#pragma unroll 1
    while (set) {
      out[at++] = units.begin + i * 8 + __ffs(set) - 1;
      set &= set - 1;
    }
  }
}

// a / b of few numbers below 2^20, without a division.
__device__ __forceinline__ int quotient(int a, int b) { return (int)__fdividef((float)a + 0.5f, (float)b); }

// Write what a block has to write of the row: the chosen units of `groups` groups from group `first` on, a word of bits each, from out[s.before] on.
__device__ __forceinline__ void put_groups(const Desk& s, const u32* bits, int first, int groups, int* out) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int w = threadIdx.x >> 5; 32 * w < groups; w += THREADS / 32) {
    int before = 0;
#pragma unroll 1
    for (int i = lane; i < 32 * w; i += 32) before += __popc(bits[i]);
    u32 set = 32 * w + lane < groups ? bits[32 * w + lane] : 0;
    const int mine = __popc(set);
    int to = s.before + __reduce_add_sync(~0u, before) + warp_scan(mine) - mine;
#pragma unroll 1
    for (; set; set &= set - 1) out[to++] = (first + 32 * w + lane) * 32 + __ffs(set) - 1;
  }
}
// The groups of which a block writes what is chosen: as many in every block, in order.
struct Range {
  int first, end;
  __device__ __forceinline__ Range(int groups, const Mail& mail) {
    const int per = quotient(groups + mail.blocks - 1, mail.blocks);
    first = min(groups, mail.rank * per), end = min(groups, first + per);
  }
};
// Where groups are dealt in turn: blocks tell each other what they have chosen, a bit a unit. s.before counts nothing yet.
__device__ __forceinline__ void put_dealt(Desk& s, const Mail& mail, const Units& units, u32* bits, int groups, int* out) {
  const int words = ((groups + mail.blocks - 1) / mail.blocks + 2) / 3, own = units.count / 32;
  const Range range(groups, mail);
#pragma unroll 1
  for (int i = threadIdx.x; i < words; i += THREADS) {
    u32 v[3];
    for (int k = 0; k < 3; k++) v[k] = 3 * i + k < own ? bits[3 * i + k] : 0;
    post(mail.marks() + mail.rank * words + i, v[0], v[1], v[2], mail.stamp);
  }
  __syncthreads(); // bits are told
  int before = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < mail.blocks * words; i += THREADS) {
    const uint4 told = await(mail.marks() + i, mail.stamp);
    const u32 v[3] = {told.x, told.y, told.z};
    for (int k = 0; k < 3; k++) {
      const int group = i / words + (i % words * 3 + k) * mail.blocks;
      if (group < range.first) before += __popc(v[k]);
      else if (group < range.end) bits[group - range.first] = v[k];
    }
  }
  if (before) atomicAdd(&s.before, before);
  __syncthreads();
  put_groups(s, bits, range.first, range.end - range.first, out);
}

// For checks: the block's scores as a scorer leaves them.
__device__ __forceinline__ void put_scores(const Units& units, __half* scores, long long stride) {
#pragma unroll 1
  for (int i = threadIdx.x; i < HEADS * units.count; i += THREADS) {
    const int h = i / units.count, u = i - h * units.count;
    scores[h * stride + units.unit(u)] = units.scores[h * units.stride + u];
  }
}
__device__ __forceinline__ void put_images(const Units& units, u32* images) {
#pragma unroll 1
  for (int i = threadIdx.x; i < units.count; i += THREADS) images[units.unit(i)] = units.exact[i];
}

// What a row's list holds beside the units that are chosen; all blocks write some of it, each by its last threads.
template <int BY = THREADS> __device__ __forceinline__ void put_forced(const Mail& mail, const Reading& row, int* out) {
  const int at = mail.rank * BY + (int)threadIdx.x - (THREADS - BY), step = mail.blocks * BY;
  if (BY < THREADS && threadIdx.x < THREADS - BY) return;
#pragma unroll 1
  for (int i = at; i < row.first; i += step) out[i] = i;
#pragma unroll 1
  for (int i = at; i < row.units - row.last; i += step) out[row.first + row.wanted + i] = row.last + i;
#pragma unroll 1
  for (int i = row.width + at; i < row.room; i += step) out[i] = -1;
}
// The list's length, and the stamp for the next launch: every block has read this one's, because it has told its part.
__device__ __forceinline__ void put_stamp(const Mail& mail, const Reading& row, int* out, u32* stamp) {
  if (mail.rank == 0 && threadIdx.x == 0) out[row.room] = row.width, *stamp = mail.stamp;
}

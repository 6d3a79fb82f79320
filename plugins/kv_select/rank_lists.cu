// The best of what fier_stream.cu has listed: score descending, index ascending on ties, ascending output. A block a row.
#include "common.cuh"

#define THREADS 1024
#define BINS 2048
#define CROWD 1024 // units of the bin that is cut which are compared with each other
#define HELD 4     // entries of a thread that are kept in registers

#include "reading.cuh"

struct Desk {
  __align__(16) int bins[BINS];
  u64 crowd[CROWD];
  int warp_sums[64], listed;
  int bin, above, count; // the bin that is cut: units above it, and in it
  u64 cut;
};

// Inclusive prefix sum over the block; the two halves of warp_sums are used in turn, so that one barrier is enough.
__device__ __forceinline__ int block_scan(int v, int* warp_sums, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  v = warp_scan(v);
  int* sums = warp_sums + turn * 32;
  turn ^= 1;
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  const int own = sums[lane];
  return v + __shfl_sync(~0u, warp_scan(own) - own, warp);
}
__device__ __forceinline__ u64 value(uint2 v) { return (u64)v.x << 32 | ~v.y; }

// A row's list; bins are finer the nearer the bound is to the highest scores.
struct List {
  const uint2* entries;
  int count;
  u32 low;
  int shift;
  uint2 held[HELD];

  __device__ __forceinline__ void load(long long room) { // before their count is known
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < room) held[k] = __ldcg(entries + i);
    }
  }
  __device__ __forceinline__ int bin(u32 score) const { return (int)min((score - low) >> shift, BINS - 1u); }
  template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if ((int)threadIdx.x + k * THREADS < count) f(held[k]);
    }
#pragma unroll 1
    for (int i = threadIdx.x + HELD * THREADS; i < count; i += THREADS) f(__ldcg(entries + i));
  }
};

// The bin with the wanted-th unit; two bins a thread.
__device__ __forceinline__ void cut_bins(Desk& s, int wanted, int& turn) {
  const int bin = BINS - 2 - 2 * threadIdx.x;
  const int2 n = *reinterpret_cast<const int2*>(s.bins + bin);
  const int mine = n.x + n.y, seen = block_scan(mine, s.warp_sums, turn) - mine;
  if (seen < wanted && seen + mine >= wanted) {
    const bool upper = seen + n.y >= wanted;
    s.bin = bin + upper, s.above = upper ? seen : seen + n.y, s.count = upper ? n.y : n.x;
  }
  __syncthreads();
}

// Rare: the need-th highest value of the bin that is cut, digit by digit.
__device__ __forceinline__ void cut_digits(Desk& s, const List& list, int bin, int need, int& turn) {
  u64 prefix = 0;
#pragma unroll 1
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    list.each([&](uint2 v) {
      const u64 x = value(v);
      if (list.bin(v.x) == bin && (shift == 56 || x >> (shift + 8) == prefix)) atomicAdd(&s.bins[(int)(x >> shift) & 255], 1);
    });
    __syncthreads();
    cut_bins(s, need, turn);
    prefix = prefix << 8 | s.bin, need -= s.above;
    __syncthreads();
  }
  if (threadIdx.x == 0) s.cut = prefix;
  __syncthreads();
}

// The wanted-th highest value of the list.
__device__ __forceinline__ void find_cut(Desk& s, const List& list, int wanted, int& turn) {
  const int lane = threadIdx.x & 31;
  list.each([&](uint2 v) { atomicAdd(&s.bins[list.bin(v.x)], 1); });
  __syncthreads();
  cut_bins(s, wanted, turn);
  const int bin = s.bin, need = wanted - s.above, crowd = s.count;
  if (crowd > CROWD) {
    __syncthreads();
    cut_digits(s, list, bin, need, turn);
    return;
  }
  list.each([&](uint2 v) {
    if (list.bin(v.x) == bin) s.crowd[atomicAdd(&s.listed, 1)] = value(v);
  });
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x >> 5; i < crowd; i += THREADS / 32) { // a warp compares one with all
    const u64 own = s.crowd[i];
    int better = 0;
    for (int k = lane; k < crowd; k += 32) better += s.crowd[k] > own;
    better = __reduce_add_sync(~0u, better);
    if (lane == 0 && better == need - 1) s.cut = own;
  }
  __syncthreads();
}

// Write the marked units, ascending, from out[0] on.
__device__ __forceinline__ void put_marked(Desk& s, const u32* marks, int words, int* out, int& turn) {
  const int each = (words + THREADS - 1) / THREADS, from = min(words, (int)threadIdx.x * each), to = min(words, from + each);
  int mine = 0;
#pragma unroll 4
  for (int i = from; i < to; i++) mine += __popc(marks[i]);
  int at = block_scan(mine, s.warp_sums, turn) - mine;
#pragma unroll 1
  for (int i = from; i < to; i++) {
    u32 set = marks[i];
#pragma unroll 1
    for (; set; set &= set - 1) out[at++] = i * 32 + __ffs(set) - 1;
  }
}

// lists [R, list_stride], counts [R], bounds [R] and stamps [1] as fier_stream.cu leaves them; counts are made zero again, the stamp one more. lens, slots,
// budgets and out as of select.cu. Dynamic shared memory: a bit a unit of the longest row, in words.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rank_lists(const uint2* lists, int* counts, const float* bounds, u32* stamps, const int* lens, int* out,
    const int* slots, const int* budgets, long long list_stride, int rows_per_sequence, int budget, int dense_below, int list_room, int sink, int window) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Desk s;
  const int row = blockIdx.x, tid = threadIdx.x, sequence = row / rows_per_sequence, stored = lens[sequence];
  const Reading reading(stored, stored >> 5 << 5, 1, Budget(budgets ? budgets[slots[sequence]] : 0, budget, dense_below, list_room, 1), sink, window);
  u32* marks = reinterpret_cast<u32*>(dynamic);
  const int words = (stored + 31) >> 5;
  int turn = 0;
  MARK(0)
  for (int i = tid; i < BINS; i += THREADS) s.bins[i] = 0;
  for (int i = tid; i < words; i += THREADS) marks[i] = 0;
  if (tid == 0) s.listed = 0;
  dependency_wait();
  MARK(1)
  out += (long long)row * (list_room + 1);
  if (row == 0 && tid == 0) *stamps = __ldcg(stamps) + 1;
  if (reading.plain) {
    reading.put_plain(out, 0, 1);
    return;
  }
  List list = {lists + row * list_stride, 0, 0, 0};
  list.load(list_stride);
  list.count = __ldcg(counts + row), list.low = __float_as_uint(__ldcg(bounds + row));
#pragma unroll 1
  while ((0x3f800000u - min(list.low, 0x3f800000u)) >> list.shift >= BINS) list.shift++;
  __syncthreads();
  MARK(2)
  if (tid == 0) counts[row] = 0;
  find_cut(s, list, reading.wanted, turn);
  MARK(3)
  const u64 cut = s.cut;
  list.each([&](uint2 v) {
    if (value(v) >= cut) atomicOr(&marks[v.y >> 5], 1u << (v.y & 31));
  });
  __syncthreads();
  put_marked(s, marks, words, out + reading.first, turn);
#pragma unroll 1
  for (int i = tid; i < reading.first; i += THREADS) out[i] = i;
#pragma unroll 1
  for (int i = tid; i < reading.units - reading.last; i += THREADS) out[reading.first + reading.wanted + i] = reading.last + i;
#pragma unroll 1
  for (int i = reading.width + tid; i < reading.room; i += THREADS) out[i] = -1;
  if (tid == 0) out[reading.room] = reading.width;
  MARK(4)
}

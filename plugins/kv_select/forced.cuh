// What is in a list of chosen units whatever their scores are.
#pragma once
#include "pooling.cuh"

// What of a row is chosen among: units [first, last) of its stored tokens; `wanted` of them. Units behind `usable` have no scores yet.
struct Bounds {
  int usable, units, first, last, wanted;
  __device__ __forceinline__ Bounds(int stored, int width, int sink, int window) {
    const int closed = stored / GROUP * GROUP;
    usable = closed / UNIT, units = (stored + UNIT - 1) / UNIT;
    first = (sink + UNIT - 1) / UNIT, last = max(first, min(closed, stored - window) / UNIT), wanted = width - first - (units - last);
  }
  // Every unit is chosen, or nothing but the forced ones.
  __device__ __forceinline__ bool plain() const { return wanted >= last - first || wanted <= 0; }
};

// The list of a row that is read whole, or of which nothing is chosen by scores.
__device__ __forceinline__ void put_plain(int* out, const Bounds& b, int width, int room, int rank, bool whole) {
  const int gap = b.wanted <= 0 ? b.last - b.first : 0, count = whole ? -1 : min(b.units - gap, width);
#pragma unroll 1
  for (int i = rank * THREADS + threadIdx.x; i <= room; i += CLUSTER * THREADS) out[i] = i == room ? count : i >= count ? -1 : i < b.first ? i : i + gap;
}

// What is read in any case, and what is behind the list's last unit.
__device__ __forceinline__ void put_forced(int* out, const Bounds& b, int room, int rank) {
  const int count = b.first + b.wanted + b.units - b.last; // == width
#pragma unroll 1
  for (int i = rank * THREADS + threadIdx.x; i <= room - b.wanted; i += CLUSTER * THREADS) {
    const int at = i < b.first ? i : i + b.wanted;
    out[at] = at == room ? count : i < b.first ? i : at < count ? b.last + i - b.first : -1;
  }
}

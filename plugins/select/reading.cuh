// What the query of a row reads: which units in any case, and how many it may choose.
#pragma once

// How many units a sequence may read, and up to how many tokens it reads all: its own smaller budget, 0 for none, or its engine's.
struct Budget {
  int width, whole_to, room; // room: of its list

  __device__ __forceinline__ Budget(int own, int budget, int dense_below, int room_, int unit)
      : width(own ? min(room_, (own + unit - 1) / unit) : room_), whole_to(own ? max(min(own, budget), dense_below) : budget), room(room_) {}
};

// What a row's query reads: units [0, first) and [last, units) in any case, `wanted` of those between.
struct Reading {
  int units, first, last, wanted, width, room;
  bool whole, plain; // plain: all is read, every unit chosen, or nothing but the forced ones

  __device__ __forceinline__ Reading(int stored, int closed, int unit, Budget at, int sink, int window) { // closed: tokens with a summary
    units = (stored + unit - 1) / unit, first = (sink + unit - 1) / unit, last = max(first, min(closed, max(0, stored - window)) / unit);
    width = at.width, room = at.room, whole = stored <= at.whole_to;
    wanted = width - first - (units - last), plain = whole || wanted >= last - first || wanted <= 0;
  }
  __device__ __forceinline__ void put_plain(int* out, int rank, int blocks) const {
    const int gap = wanted <= 0 ? last - first : 0, count = whole ? -1 : min(units - gap, width);
#pragma unroll 1
    for (int i = rank * THREADS + threadIdx.x; i <= room; i += blocks * THREADS) out[i] = i == room ? count : i >= count ? -1 : i < first ? i : i + gap;
  }
};

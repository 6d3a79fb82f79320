// A row's list as attention takes it up while the choice still runs: a header, then a word an entry.
//
// The header names the launch that writes the list, by its stamp, or says that the list is there once that launch has ended. It is written before the
// launch lets attention begin. A word is of that launch if it carries its stamp.
#pragma once
#include "words.cuh"

#define NOT_HANDED 0u // a stamp: wait for the launch to end

struct Handed {
  uint4* words; // [1 + entries] of the row, null where lists are not handed over
  __device__ __forceinline__ uint4* entry(int i) const { return words + 1 + i; }
  // A unit, -1 for none, and the row of keys and values where it begins.
  __device__ __forceinline__ void put(int i, int unit, int place, u32 stamp) const { post(entry(i), unit, place, 0, stamp); }
  // Announce a list of `width` entries, in one thread: once the result is there, the next launch may begin.
  __device__ __forceinline__ u64 announce(int width, u32 stamp) const {
    return atomicExch(reinterpret_cast<u64*>(words), (u64)stamp << 32 | (u32)width);
  }
  __device__ __forceinline__ u64 header() const { return look8(words); }
};

// How the scorer of many rows hands what may be chosen to its selector: lists of sets of four tokens, one a warp, in the scratch of all scores.
#pragma once
#include "common.cuh"

#define LIST_WARPS 8
#define NOTES 24                  // words of a part: counts of its lists, log2 of the weights a head, the threshold
#define NOTE_WEIGHTS LIST_WARPS
#define NOTE_THRESHOLD (LIST_WARPS + 8)
#define NOT_LISTED 0x40000000     // a count above every room: nothing is known about the part
#define MOST_SHARE 6              // rows of which more than a sixth would be listed are not
#ifndef LIST_FACTOR
#define LIST_FACTOR 3             // so many times more than may be chosen is listed
#endif
#define LIST_EXTRA 8              // of the sample, beside that

// A list: entries of ENTRY bytes (fp16 scores of four tokens a head), then the sets' numbers; a set is four tokens, the first 4 times its number.
template <int SCORED> struct List {
  static constexpr int ENTRY = 16 * ((SCORED + 1) / 2);
  char* entries;
  u32* sets;
  int room;

  __device__ __forceinline__ List(__half* scores, long long row, long long stride, int parts, int part, int warp) { // scores [R, SCORED, stride]
    const long long bytes = SCORED * stride * 2 / (parts * LIST_WARPS) / 16 * 16;
    room = (int)(bytes / (ENTRY + 4));
    entries = reinterpret_cast<char*>(scores + row * SCORED * stride) + ((long long)part * LIST_WARPS + warp) * bytes;
    sets = reinterpret_cast<u32*>(entries + (long long)room * ENTRY);
  }
};
__device__ __forceinline__ bool listed(int units, int wanted) { return (long long)wanted * LIST_FACTOR * MOST_SHARE <= units; }

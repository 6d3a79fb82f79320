// How the groups of a row are dealt to its parts and their warps, and in which order a warp takes them.
//
// Pairs of neighbouring groups go to the parts in turn, and within a part to its warps. A warp begins with a sample of its pairs, so chosen that those of
// all warps of the row are spread over it evenly.
#pragma once

#define DEALT_WARPS 8

struct Dealt {
  int parts, groups; // of the row
  int seat;          // warp * parts + part
  int full, span, shift; // rounds in which every warp of the row has a whole pair

  __device__ __forceinline__ Dealt() {}
  __device__ __forceinline__ Dealt(int groups_, int parts_, int part, int warp, int sample) : parts(parts_), groups(groups_), seat(warp * parts_ + part) {
    full = groups / 2 / (parts * DEALT_WARPS), span = full / sample;
    shift = (2 * seat + 1) * full / (2 * DEALT_WARPS * sample * parts);
  }
  __device__ __forceinline__ int rounds() const { return ((groups + 1) / 2 - seat + parts * DEALT_WARPS - 1) / (parts * DEALT_WARPS); }
  __device__ __forceinline__ int mine() const { return max(0, rounds() * 2 - (groups % 2 && (groups - 1) / 2 % (parts * DEALT_WARPS) == seat)); } // groups
  // The pair of a warp's i-th round.
  __device__ __forceinline__ int pair(int i, int sample) const {
    int round = i;
    if (i < full) {
      if (i < span * sample) round = i % sample * span + i / sample;
      round += shift;
      if (round >= full) round -= full;
    }
    return round * (parts * DEALT_WARPS) + seat;
  }
};

// A matrix of codes and what its groups of weights share. Built with -DBITS (4, or 8), -DSIGNED (eight bits are integers, else e4m3), -DGROUP (weights
// that share a scale, 0: a row), -DZEROS (groups have zero points), -DMINIMA (groups have numbers that are added; with neither, the zero of four bits is
// 8), -DSCALE (of scales and minima: 0: fp32, 1: fp16, 2: bf16, 3: integers of eight bits) and -DBLOCK (weights that share a factor of these, 0: none).
#pragma once
#include "common.cuh"

#if SCALE == 0
typedef float scale_type;
__device__ __forceinline__ float to_number(float x) { return x; }
#elif SCALE == 1
typedef __half scale_type;
__device__ __forceinline__ float to_number(__half x) { return __half2float(x); }
#elif SCALE == 2
typedef __nv_bfloat16 scale_type;
__device__ __forceinline__ float to_number(__nv_bfloat16 x) { return __bfloat162float(x); }
#else
typedef signed char scale_type;
__device__ __forceinline__ float to_number(signed char x) { return (float)x; }
#endif

#define WEIGHTS (128 / BITS) // in 16 bytes
// A matrix is codes [rows, k], scales, zeros and minima [rows, groups], and factors of scales and minima [rows, k / BLOCK]; what it has not is null.
__device__ __forceinline__ int groups_of(int k) { return GROUP ? (k + max(GROUP, 1) - 1) / max(GROUP, 1) : 1; }
// Where what a row's groups share begins, and the factors of its blocks: fewer numbers than registers hold.
struct Row {
  u32 groups, blocks;
};
__device__ __forceinline__ Row row_of(u32 row, int k) { return {row * groups_of(k), BLOCK ? row * (k / max(BLOCK, 1)) : 0}; }
// A scale or a minimum of a row's group.
__device__ __forceinline__ float shared_of(const scale_type* values, const __half* blocks, Row row, int group) {
  const float own = to_number(values[row.groups + group]);
  return BLOCK ? own * __half2float(blocks[row.blocks + group / max(BLOCK / max(GROUP, 1), 1)]) : own;
}
__device__ __forceinline__ float zero_of(const unsigned char* zeros, Row row, int group) {
  return MINIMA ? 0.f : ZEROS ? (float)zeros[row.groups + group] : 8.f;
}

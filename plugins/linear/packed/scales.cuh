// The type of a matrix's scales. Built with -DSCALE (0: fp32, 1: fp16, 2: bf16).
#pragma once
#include "common.cuh"

#if SCALE == 0
typedef float scale_type;
__device__ __forceinline__ float scale_of(float x) { return x; }
#elif SCALE == 1
typedef __half scale_type;
__device__ __forceinline__ float scale_of(__half x) { return __half2float(x); }
#else
typedef __nv_bfloat16 scale_type;
__device__ __forceinline__ float scale_of(__nv_bfloat16 x) { return __bfloat162float(x); }
#endif

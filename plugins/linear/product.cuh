// What products of few and of some tokens share: numbers, launches that overlap, results. Built with -DGATED and -DFP16 (fp16 instead of bf16).
#pragma once
#if !defined(FP16) && !defined(BF16)
#define BF16
#endif
#include "common.cuh"

__device__ __forceinline__ float wide(real x) { return to_float(x); }
__device__ __forceinline__ real narrow(float x) { return to_real(x); }
#ifdef FP16
__device__ __forceinline__ float2 both(u32 x) { return __half22float2(*reinterpret_cast<const __half2*>(&x)); }
#else
__device__ __forceinline__ float2 both(u32 x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
#endif
__device__ __forceinline__ float rounded(float x) { return wide(narrow(x)); }

// Let the kernel behind this one start: it loads what nobody writes, and waits for all before it.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Of a matrix, before the wait too: the assembler moves loads that are declared as never written (ld.global.nc) behind it, these it leaves where they are.
__device__ __forceinline__ uint4 load_once(const real* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ void unpack(const uint4& v, float2 (&entries)[4]) {
  entries[0] = both(v.x), entries[1] = both(v.y), entries[2] = both(v.z), entries[3] = both(v.w);
}
__device__ __forceinline__ u32 pack(float2 x) {
  const real pair[2] = {narrow(x.x), narrow(x.y)};
  return *reinterpret_cast<const u32*>(pair);
}

// One result: of a product, and GATED of the one that it gates.
__device__ __forceinline__ void finish(const float* found, float offset, real* out, int t, int row, int n) {
  if (GATED) {
    const float gate = rounded(found[0]);
    out[(long long)t * n + row] = narrow(rounded(gate / (1.f + expf(-gate))) * rounded(found[1]));
  } else {
    out[(long long)t * n + row] = narrow(found[0] + offset);
  }
}


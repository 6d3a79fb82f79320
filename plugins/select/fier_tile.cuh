// What fier_groups.cuh is made of: sparse products, their operands from shared memory, stores of scores.
#pragma once
#include "common.cuh"

// d = c + a b for sixteen tokens and eight columns; chosen: where of every four rows of b the two values of a belong, in lanes of a quad from 2 HALF on.
template <int HALF> __device__ __forceinline__ void mma(float (&d)[4], const float (&c)[4], const u32 (&a)[4], const u32* b, u32 chosen) {
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9,%10,%11},{%12,%13,%14,%15},%16,%17;"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "r"(chosen),
        "n"(HALF));
}
__device__ __forceinline__ void shared_units(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void put8(__half* p, u32 x, u32 y, u64 policy) {
#ifdef SCORES_SHARED
  *reinterpret_cast<uint2*>(p) = make_uint2(x, y);
#else
  asm volatile("st.global.L2::cache_hint.v2.u32 [%0],{%1,%2},%3;" ::"l"(p), "r"(x), "r"(y), "l"(policy) : "memory");
#endif
}

// The same address, of which the compiler does not know that it could be made anew for every use.
__device__ __forceinline__ const char* kept(const char* p) {
  return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<u64>(p), threadIdx.x & 31));
}
// Of bytes that are read once. They are the first to leave the second-level cache, but not where scores leave it too: written back late they come
// between the reads of the next ones.
__device__ __forceinline__ u64 read_policy(bool leaves_first) {
  u64 first, normal;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return leaves_first ? first : normal;
}
// Of scores: half of them are the last to leave that cache, so that the selector, and the next layer's scorer, find them there.
__device__ __forceinline__ u64 score_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 0.5;" : "=l"(policy));
  return policy;
}

// What the kernels of more than one source use. CLUSTER is the number of blocks of a cluster, 1 where a source does not say; BF16 chooses `real`.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifdef TRACE // clocks of every block, for a profile
extern "C" __device__ long long trace[192 * 32];
#define TRACED (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z))
#define MARK(i) if (threadIdx.x == 0 && TRACED < 192) trace[TRACED * 32 + i] = clock64();
#else
#define MARK(i)
#endif

#ifdef BF16
typedef __nv_bfloat16 real;
__device__ __forceinline__ real to_real(float x) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ float to_float(real x) { return __bfloat162float(x); }
__device__ __forceinline__ u32 pack_real(float x, float y) {
  __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
#else
typedef __half real;
__device__ __forceinline__ real to_real(float x) { return __float2half_rn(x); }
__device__ __forceinline__ float to_float(real x) { return __half2float(x); }
__device__ __forceinline__ u32 pack_real(float x, float y) {
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
#endif
__device__ __forceinline__ u32 pack_halves(float x, float y) {
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fma_sat(float x, float y, float z) { // x y + z between 0 and 1
  asm("fma.rn.sat.f32 %0,%0,%1,%2;" : "+f"(x) : "f"(y), "f"(z));
  return x;
}

// Wait for the kernels before this one.
__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Let the kernel behind this one start: it loads what nobody writes, and waits for all before it.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Both: it may read what was written before the kernel before it.
__device__ __forceinline__ void dependency_wait() { wait_for_input(), start_next(); }
__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
  cluster_arrive(), cluster_wait();
#else
  __syncthreads();
#endif
}
// The same shared variable of another block of the cluster.
template <typename T> __device__ __forceinline__ T* peer(T* p, int rank) {
#if CLUSTER > 1
  T* there;
  asm("mapa.u64 %0,%1,%2;" : "=l"(there) : "l"(p), "r"(rank));
  return there;
#else
  return p;
#endif
}

// Of a matrix, before the wait too: the assembler moves loads that are declared as never written (ld.global.nc) behind it, these it leaves where they are.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 shared4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
// Sixteen bytes from global to shared memory, beside the computation; the sized form writes zeros behind `size` bytes.
__device__ __forceinline__ void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void copy16_sized(u32 to, const void* from, u32 size) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy16_once(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ int warp_scan(int v) { // inclusive prefix sum
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int y = __shfl_up_sync(~0u, v, o);
    if (lane >= o) v += y;
  }
  return v;
}

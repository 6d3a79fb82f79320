// How the warps of a block wait for each other where they do different work: barriers in shared memory that count arrivals, and named ones of some warps.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void gate_open(u64* gate, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(shared_at(gate)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void gate_arrive(u64* gate) { asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(shared_at(gate)) : "memory"); }
// Until the phase of this parity is complete.
__device__ __forceinline__ void gate_await(u64* gate, u32 parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done,[%0],%1;\n@!done bra AGAIN;\n}" ::"r"(shared_at(gate)), "r"(parity)
               : "memory");
}
template <int COUNT> __device__ __forceinline__ void some_sync(int id) { asm volatile("barrier.cta.sync %0,%1;" ::"r"(id), "n"(COUNT) : "memory"); }

// Registers of a thread: a block shares out what it was launched with. Only where the kernel is compiled for exactly this GPU.
template <int N> __device__ __forceinline__ void more_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void fewer_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

// Stores to shared memory of other blocks of a cluster, counted in bytes by barriers there. For sm_90 on.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void barrier_init(u64* barrier) { // of one arrival
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_at(barrier)) : "memory");
}
// Behind the initializations of a thread: other blocks see them.
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrive, and expect so many bytes in this phase.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 size) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(size) : "memory");
}
__device__ __forceinline__ void barrier_await(u64* barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
                   shared_at(barrier)),
               "r"(parity)
               : "memory");
}
// The cluster's blocks run, and their barriers are ready: arrive early, wait late.
__device__ __forceinline__ void cluster_arrive_ready() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait_ready() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Store to the place that `to` is in block `rank` of the cluster, and tell its barrier.
__device__ __forceinline__ void push16(float4* to, int rank, u64* barrier, float4 x) {
  asm volatile(
      "{\n.reg .b32 there, arrive;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 arrive, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3,%4,%5,%6}, [arrive];\n}" ::"r"(shared_at(to)),
      "r"(shared_at(barrier)), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
}
__device__ __forceinline__ void push8(float2* to, int rank, u64* barrier, float2 x) {
  asm volatile(
      "{\n.reg .b32 there, arrive;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 arrive, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3,%4}, [arrive];\n}" ::"r"(shared_at(to)),
      "r"(shared_at(barrier)), "r"(rank), "f"(x.x), "f"(x.y)
      : "memory");
}

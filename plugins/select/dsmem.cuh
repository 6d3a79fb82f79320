// What blocks of a cluster write into each other's shared memory, counted by bytes where it arrives: no barrier, no fence.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void dsmem_init(u64* box) { asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared_at(box)) : "memory"); }
// Say, in one thread, how many bytes of others are to come.
__device__ __forceinline__ void dsmem_expect(u64* box, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_at(box)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void dsmem_wait(u64* box) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],0; @!p bra again;}" ::"r"(shared_at(box)) : "memory");
}
__device__ __forceinline__ u32 dsmem_map(const void* own, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(shared_at(own)), "r"(rank));
  return there;
}
// To where `to` lies in block `rank`, counted by its box.
__device__ __forceinline__ void dsmem_store(uint4* to, uint4 v, u64* box, int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(dsmem_map(to, rank)), "r"(v.x), "r"(v.y),
      "r"(v.z), "r"(v.w), "r"(dsmem_map(box, rank)) : "memory");
}
__device__ __forceinline__ void dsmem_store(u64* to, u64 v, u64* box, int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0],%1,[%2];" ::"r"(dsmem_map(to, rank)), "l"(v), "r"(dsmem_map(box, rank))
      : "memory");
}

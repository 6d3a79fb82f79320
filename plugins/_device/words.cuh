// Words of sixteen bytes that are written and read as one: who sees a part of a word has it all, so there is no barrier and no fence.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void post(uint4* to, u32 a, u32 b, u32 c, u32 d) {
  const u64 low = (u64)b << 32 | a, high = (u64)d << 32 | c;
  asm volatile("{.reg .b128 v;\n mov.b128 v,{%1,%2};\n st.relaxed.gpu.global.b128 [%0],v;}" ::"l"(to), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v;\n ld.relaxed.gpu.global.b128 v,[%2];\n mov.b128 {%0,%1},v;}" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
// The first half of one.
__device__ __forceinline__ u64 look8(const void* from) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.b64 %0,[%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

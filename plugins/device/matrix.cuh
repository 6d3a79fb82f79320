// Matrix instructions over tiles of sixteen rows of D channels in shared memory. Built with -DD (head dimension, multiple of 32) and -DBF16.
#pragma once
#include "mma.cuh"

#define ROW (2 * D) // bytes of a key
#define CHUNKS (ROW / 16)

__device__ __forceinline__ void read4(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void read4_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ u32 transpose8(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(y) : "r"(x));
  return y;
}
// Where 16-byte chunk c of row r lies, so that ldmatrix meets every bank once.
__device__ __forceinline__ u32 place(u32 r, u32 c) { return r * ROW + (CHUNKS % 8 == 0 ? c ^ (r & 7) : c ^ ((r >> 1) & 3)) * 16; }

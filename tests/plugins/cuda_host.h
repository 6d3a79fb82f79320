// What a CUDA kernel of warps, matrix instructions and shared memory needs to run on a CPU: every thread of a block is a fiber, blocks run one by one.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
struct dim { int x, y, z; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Numbers of sixteen bits, rounded to nearest even.
struct __half { _Float16 v; };
struct __half2 { __half x, y; };
struct __nv_bfloat16 { u16 v; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static float __half2float(__half x) { return (float)x.v; }
static __half to_half(float x) { return {(_Float16)x}; }
static float __bfloat162float(__nv_bfloat16 x) { u32 b = (u32)x.v << 16; float f; memcpy(&f, &b, 4); return f; }
static __nv_bfloat16 to_bfloat16(float x) { u32 b; memcpy(&b, &x, 4); return {(u16)((b + 0x7fff + (b >> 16 & 1)) >> 16)}; }
static __half2 __floats2half2_rn(float x, float y) { return {to_half(x), to_half(y)}; }
static __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {to_bfloat16(x), to_bfloat16(y)}; }
static __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
static __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
static float number_of(__half x) { return __half2float(x); }
static float number_of(__nv_bfloat16 x) { return __bfloat162float(x); }
static __half2 pair_of(float x, float y, __half2) { return __floats2half2_rn(x, y); }
static __nv_bfloat162 pair_of(float x, float y, __nv_bfloat162) { return __floats2bfloat162_rn(x, y); }
template <typename T> static T __hmul2(T x, T y) { return pair_of(number_of(x.x) * number_of(y.x), number_of(x.y) * number_of(y.y), x); }
template <typename T> static T __hfma2(T x, T y, T z) {
  return pair_of(std::fma(number_of(x.x), number_of(y.x), number_of(z.x)), std::fma(number_of(x.y), number_of(y.y), number_of(z.y)), x);
}
static __half __ushort_as_half(u16 x) { __half h; memcpy(&h, &x, 2); return h; }

// Fibers.
static dim threadIdx, blockIdx, gridDim, blockDim;
static ucontext_t scheduler;
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
static std::vector<Fiber> fibers;
static std::function<void()> body;
static int running;
extern "C" {
int backwards = 0; // the last thread first: what lacks a barrier then reads other values
}
static void pause_fiber() {
  const int own = running;
  swapcontext(&fibers[own].context, &scheduler);
  running = own, threadIdx = {own, 0, 0};
}
struct Barrier {
  int arrived = 0;
  long phase = 0;
  void wait(int count) {
    const long own = phase;
    if (++arrived == count) arrived = 0, phase++;
    else while (phase == own) pause_fiber();
  }
};
static Barrier block_barrier;
struct Slot { alignas(16) char data[64]; };
struct Warp { Barrier barrier; Slot slots[2][32]; };
static std::vector<Warp> warps;
static void __syncthreads() { block_barrier.wait(blockDim.x); }
// Give a value to all lanes of the warp: returns those of all. Two sets alternate, so nobody overwrites what another still reads.
template <typename T> static const Slot* exchange(const T& value) {
  static_assert(sizeof(T) <= 64, "");
  Warp& warp = warps[threadIdx.x / 32];
  Slot* set = warp.slots[warp.barrier.phase & 1];
  memcpy(set[threadIdx.x % 32].data, &value, sizeof(T));
  warp.barrier.wait(32);
  return set;
}
template <typename T> static T of_lane(const Slot* set, int lane) { T x; memcpy(&x, set[lane].data, sizeof(T)); return x; }
static void __syncwarp() { exchange(0); }
template <typename T> static T __shfl_sync(u32, T x, int lane) { return of_lane<T>(exchange(x), lane & 31); }
template <typename T> static T __shfl_xor_sync(u32, T x, int mask) { const int lane = threadIdx.x % 32; return of_lane<T>(exchange(x), lane ^ mask); }
static bool __any_sync(u32, bool x) {
  const Slot* set = exchange(x);
  bool any = false;
  for (int lane = 0; lane < 32; lane++) any |= of_lane<bool>(set, lane);
  return any;
}
static void __threadfence() {}
static int atomicAdd(int* at, int x) { const int old = *at; *at += x; return old; }
template <typename T> static T __ldcg(const T* at) { return *at; }
template <typename T> static void __stcg(T* at, T x) { *at = x; }

// Shared memory by its distance from the dynamic part, and what reads it.
alignas(128) static char ring[1 << 18];
static u32 shared_at(const void* p) { return (u32)((const char*)p - ring); }
static char* at_shared(u32 at) { return ring + (int)at; }
static void copy16(u32 to, const void* from) { memcpy(at_shared(to), from, 16); }
static void copies_commit() {}
template <int LEFT> static void copies_wait() {}
static void dependency_wait() {}
static float exp2_fast(float x) { return exp2f(x); }

#ifdef BF16
typedef __nv_bfloat16 half_kind;
#else
typedef __half half_kind;
#endif
static float element(u32 pair, int i) { const u16 bits = pair >> (16 * i); half_kind x; memcpy(&x, &bits, 2); return number_of(x); }
struct Operands { u32 a[4], b[2]; };
static void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const Slot* set = exchange(Operands{{a0, a1, a2, a3}, {b0, b1}});
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * tig + i % 2;
    for (int t = 0; t < 4; t++) {
      const Operands left = of_lane<Operands>(set, gid * 4 + t), right = of_lane<Operands>(set, column * 4 + t);
      for (int half = 0; half < 2; half++)
        for (int e = 0; e < 2; e++) c[i] += element(left.a[row + 2 * half], e) * element(right.b[half], e);
    }
  }
}
static void read4(u32 (&r)[4], u32 at) {
  const int lane = threadIdx.x % 32;
  const Slot* set = exchange(at);
  for (int m = 0; m < 4; m++) memcpy(&r[m], at_shared(of_lane<u32>(set, 8 * m + lane / 4)) + lane % 4 * 4, 4);
}
static void read4_transposed(u32 (&r)[4], u32 at) {
  const int lane = threadIdx.x % 32;
  const Slot* set = exchange(at);
  for (int m = 0; m < 4; m++) {
    u16 pair[2];
    for (int e = 0; e < 2; e++) memcpy(&pair[e], at_shared(of_lane<u32>(set, 8 * m + lane % 4 * 2 + e)) + lane / 4 * 2, 2);
    r[m] = pair[0] | (u32)pair[1] << 16;
  }
}
static u32 transpose8(u32 x) {
  const int lane = threadIdx.x % 32;
  const Slot* set = exchange(x);
  u32 made = 0;
  for (int e = 0; e < 2; e++) {
    const u32 from = of_lane<u32>(set, (lane % 4 * 2 + e) * 4 + lane / 4 / 2);
    made |= (from >> (lane / 4 % 2 * 16) & 0xffff) << (16 * e);
  }
  return made;
}

static void begin_fiber() {
  body();
  fibers[running].done = true;
  swapcontext(&fibers[running].context, &scheduler);
}
// Run every block of a grid, one after the other.
static void run_grid(dim grid, int threads, std::function<void()> work) {
  body = work, gridDim = grid, blockDim = {threads, 1, 1};
  fibers.resize(threads);
  for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
        block_barrier = Barrier(), warps.assign(threads / 32, Warp());
        memset(ring, 0xff, sizeof(ring));
        for (int i = 0; i < threads; i++) {
          Fiber& one = fibers[i];
          one.stack.resize(1 << 16), one.done = false;
          getcontext(&one.context);
          one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size(), one.context.uc_link = nullptr;
          makecontext(&one.context, begin_fiber, 0);
        }
        for (bool left = true; left;) {
          left = false;
          for (int k = 0; k < threads; k++) {
            const int i = backwards ? threads - 1 - k : k;
            if (fibers[i].done) continue;
            left = true, running = i, threadIdx = {i, 0, 0};
            swapcontext(&scheduler, &fibers[i].context);
          }
        }
      }
}

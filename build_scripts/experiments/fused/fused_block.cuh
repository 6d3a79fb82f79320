// What the parts of fused.cu share: the block's variables, exchanges over the cluster, small arithmetic.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef TRACE
extern "C" __device__ long long trace[64 * 32];
#define MARK(i) if (threadIdx.x == 0 && blockIdx.x + gridDim.x * blockIdx.y < 64) trace[(blockIdx.x + gridDim.x * blockIdx.y) * 32 + i] = clock64();
#else
#define MARK(i)
#endif

#define WARPS 16
#define THREADS (32 * WARPS)
#define SLOTS 4               // groups of a warp in flight, a power of two
#define BINS 1024             // two for every thread
#define CANDIDATES 512
#define EXCHANGES 3           // of the cluster: normalizers, histograms, candidates
#define WORDS (D / 32)        // 32-bit words of bits that a lane owns in a group; 16-byte pieces that it reads of a bound
#define PAIRS (D / 8)         // channel pairs that a lane owns
#define BIT_BYTES (4 * D)     // bytes of bits in a group
#define META_BYTES (4 * D)    // lows, then ranges, fp16
#define SLOT_BYTES (6 * D)    // bits and ranges
#define RAW (GROUP_HEADS == 1 || POOL == 1 || POOL == 2) // units are ranked by scores, not by softmaxes
#define CHUNK (PAGE ? 16 : 32) // units that a warp scores at a time
#define GROUP (PAGE ? PAGE : 32)
#define UNIT (PAGE ? PAGE : 1)

#ifdef BF16
typedef __nv_bfloat16 qtype;
__device__ __forceinline__ float to_float(qtype x) { return __bfloat162float(x); }
#else
typedef __half qtype;
__device__ __forceinline__ float to_float(qtype x) { return __half2float(x); }
#endif

// What a block knows of its row.
struct Row {
  const int *table, *length;   // of the sequence; length is what `stored` was read from
  int head, heads, rank, stored;
  int per_page;                // groups (or units, of bounds) of a page of the table
  int begin, units;            // first unit of this block's share and its length
  int usable, first, last;     // units with a summary; candidates are [first, last)
  int* places;                 // where the groups (or units) of the share lie in the pool, in groups (or units)
};
struct Cut {
  int bin, above, count; // bin of the wanted-th unit, units in higher bins, units in it
};

__shared__ __align__(16) u32 hist[BINS];
__shared__ __align__(8) u64 arrivals[EXCHANGES];
__shared__ u64 own[CANDIDATES], rivals[CANDIDATES];
__shared__ float warp_ref[WARPS][8], warp_sum[WARPS][8];
__shared__ __align__(16) float weight[WARPS][8]; // from a warp's exponentials to shares of the pooled softmax
__shared__ float2 gathered[CLUSTER][8];          // of every block: log2 of its sum of exponentials, or maximum and minimum
__shared__ float2 limits;
__shared__ int warp_counts[64], before;
__shared__ int own_count;
__shared__ Cut cut;
__shared__ u64 cut_key;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pack_half(float x, float y) {
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
__device__ __forceinline__ u32 pack_bf16(float x, float y) {
  __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
#if PAGE && defined(BF16)
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }
// Read before the dependency is waited for, past the multiprocessor's own cache, which may be older.
__device__ __forceinline__ int load_fresh(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Wait for the kernels before this one, then let the one behind start its preamble: it may read what was written before the kernel before it.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Blocks that disagree about the length would wait for each other for ever, so what was begun early counts only if all read the same behind the wait.
__device__ __forceinline__ bool unchanged(const Row& row, int length) {
  if (!__syncthreads_or(length != row.stored)) return true;
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  return false;
}
__device__ __forceinline__ void cluster_begin() { // arrive with nothing to tell but what `prepare_exchanges` told
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Where a shared variable lies in another block of the cluster.
__device__ __forceinline__ u32 there(const void* p, int rank) {
  u32 at = (u32)__cvta_generic_to_shared(p);
#if CLUSTER > 1
  asm("mapa.shared::cluster.u32 %0,%0,%1;" : "+r"(at) : "r"(rank));
#endif
  return at;
}
__device__ __forceinline__ void put(u32 at, uint4 v) {
#if CLUSTER > 1
  asm volatile("st.shared::cluster.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
// Stores into another block that its mbarrier counts: unlike the cluster's barrier they need no fence over the device. `expected` tells a block's own
// mbarrier how many bytes come in this exchange, `received` waits for them.
#if CLUSTER > 1
#define STORE "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes."
#define COUNTED ",[%1]"
#else
#define STORE "st.shared."
#define COUNTED ""
#endif
#define SEND(type, suffix, operands, ...)                                                                       \
  __device__ __forceinline__ void send(u32 at, type v, u32 bar) {                                               \
    asm volatile(STORE suffix " [%0]," operands COUNTED ";" ::"r"(at), "r"(bar), __VA_ARGS__ : "memory");       \
  }
SEND(float2, "v2.f32", "{%2,%3}", "f"(v.x), "f"(v.y))
SEND(u64, "b64", "%2", "l"(v))
SEND(uint4, "v4.b32", "{%2,%3,%4,%5}", "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w))
__device__ __forceinline__ void prepare_exchanges() {
#if CLUSTER > 1
  for (int i = 0; i < EXCHANGES; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared_address(arrivals + i)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void expected(int exchange, int bytes) {
#if CLUSTER > 1
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(arrivals + exchange)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void received(int exchange) {
#if CLUSTER > 1
  u32 done = 0;
  while (!done) {
    asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p,[%1],0;\n selp.u32 %0,1,0,p;}"
                 : "=r"(done) : "r"(shared_address(arrivals + exchange)) : "memory");
  }
#else
  __syncthreads();
#endif
}
// Order-preserving image of a float, never 0, and back.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
__device__ __forceinline__ int warp_scan(int v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int y = __shfl_up_sync(~0u, v, o);
    if (lane >= o) v += y;
  }
  return v;
}
__device__ __forceinline__ int warp_total(int v) { return __reduce_add_sync(~0u, v); }
// Inclusive prefix sum over the block; the two halves of warp_counts are used in turn, so that one barrier is enough.
__device__ __forceinline__ int block_scan(int v, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  v = warp_scan(v);
  int* sums = warp_counts + turn * 32;
  turn ^= 1;
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  return v + warp_total(lane < warp ? sums[lane] : 0);
}
#if RAW
// Maximum and minimum of a warp's pooled scores.
__device__ __forceinline__ void keep_limits(float high, float low) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o)), low = fminf(low, __shfl_xor_sync(~0u, low, o));
  if ((threadIdx.x & 31) == 0) warp_ref[threadIdx.x >> 5][0] = high, warp_sum[threadIdx.x >> 5][0] = low;
}
#else
// Reference and sum of a warp's exponentials for its lanes' heads, summed over the lanes of a column; false where a sum left the range.
__device__ __forceinline__ bool keep_sums(float ref0, float ref1, float sum0, float sum1) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) sum0 += __shfl_xor_sync(~0u, sum0, o), sum1 += __shfl_xor_sync(~0u, sum1, o);
  if (gid == 0) {
    warp_ref[warp][2 * tig] = ref0, warp_ref[warp][2 * tig + 1] = ref1;
    warp_sum[warp][2 * tig] = sum0, warp_sum[warp][2 * tig + 1] = sum1;
  }
  return __all_sync(~0u, sum0 < 1e18f && sum1 < 1e18f);
}
#endif
#if POOL == 1
#define JOIN(a, b) ((a) + (b))
#else
#define JOIN(a, b) fmaxf(a, b)
#endif

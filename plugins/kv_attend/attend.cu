// Decode attention over a list of tokens or pages, or over everything stored: one thread-block cluster a key-value head, split over its blocks.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G <= 16), -DCLUSTER, -DUNIT (tokens a list entry) and -DBF16.
//
// Every warp takes blocks of 16 tokens. Scores are K [16, D] times the heads' queries, outputs V transposed times the heads' weights, so that
// the query heads of the group fill the narrow side of mma.m16n8k16. Warps are merged through shared memory, blocks through the cluster's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifdef TRACE
extern "C" __device__ long long trace[64 * 32];
#define MARK(i) if (threadIdx.x == 0 && blockIdx.x + gridDim.x * blockIdx.y < 64) trace[(blockIdx.x + gridDim.x * blockIdx.y) * 32 + i] = clock64();
#else
#define MARK(i)
#endif
#define TILE 16
#define TILES ((GROUP_HEADS + 7) / 8) // columns of eight heads
#define ROW (2 * D)                   // bytes of a key
#define CHUNKS (ROW / 16)
#define STAGE_BYTES (2 * TILE * ROW)
#define HEADS8 (8 * TILES)

#ifdef BF16
typedef __nv_bfloat16 real;
#define MMA_TYPE "bf16"
__device__ __forceinline__ u32 pack2(float x, float y) {
  __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
__device__ __forceinline__ real to_real(float x) { return __float2bfloat16_rn(x); }
#else
typedef __half real;
#define MMA_TYPE "f16"
__device__ __forceinline__ u32 pack2(float x, float y) {
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<u32*>(&h);
}
__device__ __forceinline__ real to_real(float x) { return __float2half_rn(x); }
#endif

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
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
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
// Wait for the kernels before this one, then let the one behind start its preamble: it may read what was written before the kernel before it.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
template <typename T> __device__ __forceinline__ T* peer(T* p, int rank) {
#if CLUSTER > 1
  T* there;
  asm("mapa.u64 %0,%1,%2;" : "=l"(there) : "l"(p), "r"(rank));
  return there;
#else
  return p;
#endif
}
// Where 16-byte chunk c of row r lies, so that ldmatrix meets every bank once.
__device__ __forceinline__ u32 place(u32 r, u32 c) { return r * ROW + (CHUNKS % 8 == 0 ? c ^ (r & 7) : c ^ ((r >> 1) & 3)) * 16; }

// q [B, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride]; lens [B]; chosen [B, Hk, chosen_stride] int32, the entries and
// last their count, -1 for everything stored, or null. Writes out [B, out_stride].
extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_list(const real* q, const char* keys, const char* values, const int* table, const int* lens,
    const int* chosen, real* out, int q_stride, int out_stride, int table_stride, int page_size, int chosen_stride, float scale_log2) {
  extern __shared__ __align__(128) char ring[];
  __shared__ float warp_top[WARPS][HEADS8], warp_sum[WARPS][HEADS8];
  __shared__ float block_top[HEADS8], block_sum[HEADS8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const int stored = lens[b];
  const int* pages = table + (long long)b * table_stride;
  const int* list = chosen ? chosen + ((long long)b * heads + head) * chosen_stride : 0;
  const int room = chosen_stride - 1;
  const int workers = CLUSTER * WARPS, worker = rank * WARPS + warp;
  int total = list ? room * UNIT : stored, blocks = (total + TILE - 1) / TILE;
  int begin = worker * (blocks / workers) + min(worker, blocks % workers), mine = blocks / workers + (worker < blocks % workers); // contiguous
  MARK(0)
  dependency_wait();
  MARK(1)
  // The count and the first entries come together: that the list is one is nearly always true.
  const int count = list ? list[room] : -1, first_entry = list ? list[min((begin * TILE + lane) / UNIT, room - 1)] : 0;
  u32 qr[TILES][D / 8];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const bool real_head = t * 8 + gid < GROUP_HEADS;
    const u32* from = reinterpret_cast<const u32*>(q + (long long)b * q_stride + (long long)(head * GROUP_HEADS + t * 8 + gid) * D) + tig;
#pragma unroll
    for (int k = 0; k < D / 8; k++) qr[t][k] = real_head ? from[k * 4] : 0u;
  }
  const bool sparse = count >= 0;
  if (list && !sparse) {
    total = stored, blocks = (total + TILE - 1) / TILE;
    begin = worker * (blocks / workers) + min(worker, blocks % workers), mine = blocks / workers + (worker < blocks % workers);
  }

  // Lane l looks up the row of token l of the next two blocks; -1 behind the end.
  auto lookup = [&](int j) {
    const int i = (begin + j) * TILE + lane;
    if (i >= total || i / TILE >= begin + mine) return -1;
    int token = i;
    if (sparse) {
      const int entry = j == 0 ? first_entry : list[i / UNIT];
      if (entry < 0) return -1; // behind the last entry
      token = entry * UNIT + i % UNIT;
    }
    if (token >= stored) return -1;
    const int page = token / page_size;
    return (pages[page] * heads + head) * page_size + token - page * page_size;
  };
  const u32 ring_at = (u32)__cvta_generic_to_shared(ring) + warp * STAGES * STAGE_BYTES;
  int rows = lookup(0), rows_ahead = mine > 2 ? lookup(2) : -1;
  u32 held[STAGES]; // bits of the tokens that exist in the fetched blocks
  auto fetch = [&](int j) {
    if (j < mine) {
      if (j > 0 && (j & 1) == 0) {
        rows = rows_ahead;
        if (j + 2 < mine) rows_ahead = lookup(j + 2);
      }
      const u32 to = ring_at + (j % STAGES) * STAGE_BYTES;
#pragma unroll
      for (int i = lane; i < TILE * CHUNKS; i += 32) {
        const int r = i / CHUNKS, c = i % CHUNKS;
        const int row = __shfl_sync(~0u, rows, (j & 1) * 16 + r);
        const long long at = (long long)max(row, 0) * ROW + c * 16; // rows behind the end are masked: any memory of the pool will do
        if (row >= 0) {
          copy16(to + place(r, c), keys + at);
          copy16(to + TILE * ROW + place(r, c), values + at);
        } else { // zeros, because 0 times NaN is NaN
          *reinterpret_cast<uint4*>(ring + (to - (u32)__cvta_generic_to_shared(ring)) + TILE * ROW + place(r, c)) = make_uint4(0, 0, 0, 0);
        }
      }
      const u32 ok = __ballot_sync(~0u, rows >= 0);
      const u32 bits16 = (j & 1) ? ok >> 16 : ok & 0xffffu;
#pragma unroll
      for (int s = 0; s < STAGES; s++) {
        if (j % STAGES == s) held[s] = bits16;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int j = 0; j < STAGES - 1; j++) fetch(j);

  float acc[TILES][D / 16][4];
  float top[TILES][2], sum[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    top[t][0] = top[t][1] = -1e30f, sum[t][0] = sum[t][1] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) acc[t][k][0] = acc[t][k][1] = acc[t][k][2] = acc[t][k][3] = 0.f;
  }
  MARK(2)
  for (int j = 0; j < mine; j++) {
    fetch(j + STAGES - 1);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
    const u32 stage = ring_at + (j % STAGES) * STAGE_BYTES;
    u32 ok = held[0];
#pragma unroll
    for (int s = 1; s < STAGES; s++) {
      if (j % STAGES == s) ok = held[s];
    }
    float s[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4];
      read4(a, stage + place(lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
      for (int t = 0; t < TILES; t++) mma(s[t], a[0], a[1], a[2], a[3], qr[t][2 * k], qr[t][2 * k + 1]);
    }
    const bool ok0 = ok >> gid & 1, ok1 = ok >> (gid + 8) & 1;
    u32 p[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float x0 = ok0 ? s[t][0] * scale_log2 : -1e30f, y0 = ok0 ? s[t][1] * scale_log2 : -1e30f;
      float x1 = ok1 ? s[t][2] * scale_log2 : -1e30f, y1 = ok1 ? s[t][3] * scale_log2 : -1e30f;
      float mx = fmaxf(x0, x1), my = fmaxf(y0, y1);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, o)), my = fmaxf(my, __shfl_xor_sync(~0u, my, o));
      mx = fmaxf(mx, top[t][0]), my = fmaxf(my, top[t][1]);
      const float fx = exp2_fast(top[t][0] - mx), fy = exp2_fast(top[t][1] - my);
      top[t][0] = mx, top[t][1] = my;
      x0 = ok0 ? exp2_fast(x0 - mx) : 0.f, x1 = ok1 ? exp2_fast(x1 - mx) : 0.f;
      y0 = ok0 ? exp2_fast(y0 - my) : 0.f, y1 = ok1 ? exp2_fast(y1 - my) : 0.f;
      sum[t][0] = sum[t][0] * fx + x0 + x1, sum[t][1] = sum[t][1] * fy + y0 + y1;
#pragma unroll
      for (int k = 0; k < D / 16; k++) acc[t][k][0] *= fx, acc[t][k][1] *= fy, acc[t][k][2] *= fx, acc[t][k][3] *= fy;
      p[t][0] = transpose8(pack2(x0, y0)), p[t][1] = transpose8(pack2(x1, y1));
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4]; // 8 x 8 blocks of V: tokens 0-7 and 8-15, channels 16 k and 16 k + 8; transposed they are rows of channels
      read4_transposed(a, stage + TILE * ROW + place((lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
#pragma unroll
      for (int t = 0; t < TILES; t++) mma(acc[t][k], a[0], a[1], a[2], a[3], p[t][0], p[t][1]);
    }
    __syncwarp();
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) sum[t][0] += __shfl_xor_sync(~0u, sum[t][0], o), sum[t][1] += __shfl_xor_sync(~0u, sum[t][1], o);
    if (gid == 0) {
      const int h = t * 8 + 2 * tig;
      warp_top[warp][h] = top[t][0], warp_top[warp][h + 1] = top[t][1], warp_sum[warp][h] = sum[t][0], warp_sum[warp][h + 1] = sum[t][1];
    }
  }
  MARK(3)
  __syncthreads(); // the ring is free now
  MARK(4)
  // Warps of a block: each lays its share of the output down, scaled to the block's maximum. Heads are columns, padded against bank conflicts.
  float* laid = reinterpret_cast<float*>(ring); // [WARPS, HEADS8, D + 4]
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int h = t * 8 + 2 * tig;
    float m0 = warp_top[0][h], m1 = warp_top[0][h + 1];
#pragma unroll
    for (int w = 1; w < WARPS; w++) m0 = fmaxf(m0, warp_top[w][h]), m1 = fmaxf(m1, warp_top[w][h + 1]);
    const float f0 = exp2_fast(top[t][0] - m0), f1 = exp2_fast(top[t][1] - m1);
    float* to = laid + (warp * HEADS8 + h) * (D + 4);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      to[k * 16 + gid] = acc[t][k][0] * f0, to[D + 4 + k * 16 + gid] = acc[t][k][1] * f1;
      to[k * 16 + gid + 8] = acc[t][k][2] * f0, to[D + 4 + k * 16 + gid + 8] = acc[t][k][3] * f1;
    }
  }
  if (threadIdx.x < HEADS8) {
    const int h = threadIdx.x;
    float m = warp_top[0][h], l = 0.f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) m = fmaxf(m, warp_top[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) l += warp_sum[w][h] * exp2_fast(warp_top[w][h] - m);
    block_top[h] = m, block_sum[h] = l;
  }
  __syncthreads();
#if CLUSTER > 1
  for (int i = threadIdx.x; i < GROUP_HEADS * D; i += WARPS * 32) {
    float* at = laid + (i / D) * (D + 4) + i % D;
    float x = at[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) x += at[w * HEADS8 * (D + 4)];
    at[0] = x;
  }
  MARK(5)
  cluster_sync();
  MARK(6)
#endif
  real* to = out + (long long)b * out_stride + (long long)head * GROUP_HEADS * D;
  for (int i = rank * (WARPS * 32) + threadIdx.x; i < GROUP_HEADS * D; i += CLUSTER * WARPS * 32) {
    const int h = i / D;
    float* at = laid + h * (D + 4) + i % D;
    float x = 0.f, l = 0.f;
#if CLUSTER > 1
    float m = -1e30f, tops[CLUSTER];
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) tops[c] = *peer(&block_top[h], c), m = fmaxf(m, tops[c]);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const float f = exp2_fast(tops[c] - m);
      x += *peer(at, c) * f, l += *peer(&block_sum[h], c) * f;
    }
#else
#pragma unroll
    for (int w = 0; w < WARPS; w++) x += at[w * HEADS8 * (D + 4)];
    l = block_sum[h];
#endif
    to[i] = to_real(x / l);
  }
  MARK(7)
  cluster_sync();
  MARK(8)
}

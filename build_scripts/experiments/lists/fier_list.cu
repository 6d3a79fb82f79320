// FIER retrieval of many rows: a scorer that keeps only what can be selected, and the selector of its lists. Exact and deterministic.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G, 3 to 8), -DMAXIMUM (pool the heads' softmaxes by maximum instead of mean),
// -DQ_BF16 and -DWORD_ORDER.
//
// A pair of 32-token groups is the sparse operand of mma.sp.m16n8k32: two values of every four are the ranges of two channels (the same in all rows),
// the metadata that says at which of two places a value stands are the bits, and the query stands at the second place, zero at the first. So a
// product costs no unpacking but one AND-OR for sixteen tokens and sixteen channels.
//
// Scores are probabilities under the normalizer of a sample (the first groups of the walk, spread over the row). Four tokens whose sum over the heads
// may reach the block's threshold are listed with all their heads; of the others the largest sum of every pair of groups is kept. Once the exact
// normalizers are known, the listed tokens are ranked; pairs whose bound still reaches the last one are scored again (few or none).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define WARPS 8
#define CHUNK 4                     // groups that are fetched at once; one chunk is read while the next is on its way
#define RESIDENT (D > 128 ? 1 : 2)  // blocks on a multiprocessor
#define WORDS (D / 32)
#define BIT_BYTES (4 * D)
#define META_BYTES (4 * D)
#define STAGE_BYTES (6 * D)         // bits and ranges
#define LOW_ROW (2 * D + 16)        // an odd number of 16 bytes: eight rows are read without conflicts
#define BULK (__CUDA_ARCH__ >= 900)
#ifndef RATIO
#define RATIO 1.4f // of the sample, how much more than the share that is selected is listed
#define EXTRA 12   // and so many more
#endif
#define LOW_BATCH 8                 // lows of so many groups are the rows of one product
#define MERGED (GROUP_HEADS <= 4)   // the columns hold the heads twice: lanes with tig < 2 keep the first group of a pair, the others the second
#define SETS (MERGED ? 1 : 2)       // groups that a lane keeps of a pair
#define LANES (MERGED ? 2 : 4)      // lanes that share four tokens
#define SAMPLE_PAIRS (MERGED ? 4 : 2)
#define SAMPLE_BYTES 4096
#define RING_BYTES (2 * CHUNK * STAGE_BYTES)
#define WARP_BYTES (RING_BYTES + LOW_BATCH * LOW_ROW + SAMPLE_BYTES)
#define ENTRY_BYTES (16 * LANES)    // probabilities bf16 of four tokens and the heads of LANES lanes
#define ENTRY_HEADS (2 * LANES)
#define THREADS 1024                // of the selector
#define BINS 4096

#ifdef Q_BF16
typedef __nv_bfloat16 qtype;
__device__ __forceinline__ float to_float(qtype x) { return __bfloat162float(x); }
#else
typedef __half qtype;
__device__ __forceinline__ float to_float(qtype x) { return __half2float(x); }
#endif
#if MAXIMUM
#define JOIN(a, b) fmaxf(a, b)
#else
#define JOIN(a, b) ((a) + (b))
#endif

template <int HALF> __device__ __forceinline__ void mma(float (&d)[4], const float (&c)[4], const u32 (&a)[4], const u32* b, u32 chosen) {
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9,%10,%11},{%12,%13,%14,%15},%16,%17;"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "r"(chosen),
        "n"(HALF));
}
__device__ __forceinline__ void shared_units(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
#if BULK
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(to), "l"(from), "r"(bytes),
      "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @p bra done; bra again; done: }" ::"r"(barrier), "r"(parity)
      : "memory");
}
#else
__device__ __forceinline__ void copy16(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
#endif
// Wait for the kernels before this one, then let the one behind start its preamble: it may read what was written before the kernel before it.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
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
__device__ __forceinline__ u32 pack_bf16(float x, float y) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(y), "f"(x));
  return d;
}
__device__ __forceinline__ u32 redux_max(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0,%1,0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// How a row is walked: stream s of all warps of all blocks takes groups s, s + streams, ...; of these first every step-th (the sample), then those
// behind, and so on. Slot i is group (i % sample step + i / sample) streams + s; sample is 2, 4 or 8, so that pairs of slots stay together.
struct Walk {
  int groups, streams, shift, sample, step;
  __device__ __forceinline__ Walk(int stored, int parts) {
    groups = stored >> 5, streams = parts * WARPS;
    const int each = (groups + streams - 1) / streams;
    shift = each >= 96 && SAMPLE_PAIRS >= 4 ? 3 : each >= 32 ? 2 : 1, sample = 1 << shift;
    step = (each + sample - 1) / sample;
  }
  __device__ __forceinline__ int slots() const { return sample * step; }
  __device__ __forceinline__ int group(int slot, int stream) const { return ((slot & (sample - 1)) * step + (slot >> shift)) * streams + stream; }
};
// A warp's list: the count, then bounds [slots / 2], tokens [room], entries [room]; all within `bytes`.
struct List {
  int* count;
  float* bounds;
  int* tokens;
  char* entries;
  int room;
  __device__ __forceinline__ List(char* at, long long bytes, int slots) {
    const int head = (16 + 2 * slots + 15) & ~15;
    room = ((int)bytes - head - 32) / (ENTRY_BYTES + 4);
    count = reinterpret_cast<int*>(at), bounds = reinterpret_cast<float*>(at + 16);
    tokens = reinterpret_cast<int*>(at + head), entries = at + head + ((room * 4 + 15) & ~15);
  }
};

// The query in registers and the products of two groups.
struct Query {
  u32 mask, ones; // 0x55555555 and 0x88888888, in registers: one LOP3 takes one constant
  u32 q[D / 4];   // the p-th holds channel 4 p + tig in its upper half
  float k0, k1; // factors of this lane's two heads from products to log2 units; 0 for a head that does not exist
  __device__ __forceinline__ u32 metadata(u32 x) const { // bits 0, 2, 4, ... of x as places 0 or 1 and 2 or 3 of every four
    u32 y;
    asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(ones));
    return y;
  }
  __device__ __forceinline__ void load(const qtype* from, int lane, float scale_log2) { // of the key-value head
    asm volatile("mov.u32 %0,0x55555555;" : "=r"(mask));
    asm volatile("mov.u32 %0,0x88888888;" : "=r"(ones));
    const int gid = lane >> 2, tig = lane & 3, own = MERGED ? gid & 3 : gid, pair = MERGED ? tig & 1 : tig;
    float x[D / 4], top = 0.f;
#pragma unroll
    for (int p = 0; p < D / 4; p++) {
      x[p] = own < GROUP_HEADS ? to_float(from[own * D + 4 * p + tig]) : 0.f;
      top = fmaxf(top, fabsf(x[p]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const int exponent = min(max((int)(__float_as_uint(top) >> 23) - 127 - 10, -100), 100); // top / 2^exponent lies in [2^10, 2^11)
    const float down = __uint_as_float((u32)(127 - exponent) << 23);
#pragma unroll
    for (int p = 0; p < D / 4; p++) {
      const __half2 h = __floats2half2_rn(0.f, x[p] * down);
      q[p] = *reinterpret_cast<const u32*>(&h);
    }
    const float up = own < GROUP_HEADS ? __uint_as_float((u32)(127 + exponent) << 23) * scale_log2 : 0.f;
    k0 = __shfl_sync(~0u, up, (2 * pair) * 4);
    k1 = __shfl_sync(~0u, up, (2 * pair + 1) * 4);
  }
  // Bits times ranges times query: rows 0 to 7 of tile v are tokens 4 gid + v of the first group, rows 8 to 15 of the second. words_at: this lane's
  // words of the first group; units_at: this lane's row address of its ranges; the second group lies `stage` bytes behind the first.
  __device__ __forceinline__ void product(u32 words_at, u32 units_at, u32 stage, float (&c)[4][4]) const {
    u32 word[2][WORDS];
#pragma unroll
    for (int g = 0; g < 2; g++) {
      if (WORDS % 4 == 0) {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
          const uint4 v = shared16(words_at + g * stage + w * 4);
          word[g][w] = v.x, word[g][(w + 1) % WORDS] = v.y, word[g][(w + 2) % WORDS] = v.z, word[g][(w + 3) % WORDS] = v.w;
        }
      } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) word[g][w] = shared4(words_at + g * stage + w * 4);
      }
    }
#pragma unroll
    for (int v = 0; v < 4; v++) c[v][0] = c[v][1] = c[v][2] = c[v][3] = 0.f;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const u32 lower = __byte_perm(word[0][w], word[1][w], 0x5410), upper = __byte_perm(word[0][w], word[1][w], 0x7632);
      const u32 chosen[4] = {metadata(lower), metadata(lower >> 1), metadata(upper), metadata(upper >> 1)};
      u32 unit[4];
      shared_units(unit, units_at + w * 64);
#pragma unroll
      for (int v = 0; v < 4; v++) mma<0>(c[v], c[v], unit, q + 8 * w, chosen[v]);
      shared_units(unit, units_at + w * 64 + 32);
#pragma unroll
      for (int v = 0; v < 4; v++) mma<1>(c[v], c[v], unit, q + 8 * w + 4, chosen[v]);
    }
  }
};

// q [B, q_stride] the rotated queries; bits, meta the pool of one layer: BIT_BYTES and META_BYTES a group, [P, Hk, N / 32] groups; table
// [B, table_stride] page numbers; lens [B] stored tokens. Writes lists [R, gridDim.x, WARPS] of list_bytes each and parts [R, gridDim.x, GROUP_HEADS]:
// reference, log2 of the sum of exponentials, the threshold below which tokens are not listed.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) fier_list(const qtype* q, const char* bits, const char* meta, const int* table,
    const int* lens, char* lists, float4* parts, int q_stride, int table_stride, int page_groups, long long list_bytes, int budget, int width,
    float scale_log2) {
  extern __shared__ __align__(512) char smem[];
  __shared__ float shared_top[WARPS][8], shared_sum[WARPS][8];
  __shared__ int hist[256];
  __shared__ float shared_tau;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int pair = MERGED ? tig & 1 : tig, second = MERGED ? tig >> 1 : 0;
  const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z, stream = blockIdx.x * WARPS + warp;
  const long long row = (long long)b * heads + head;
  dependency_wait();
  const int stored = lens[b];
  if (stored <= budget) return;
  const Walk walk(stored, gridDim.x);
  const int slots = walk.slots();
  const List list(lists + ((row * gridDim.x + blockIdx.x) * WARPS + warp) * list_bytes, list_bytes, slots);
  if ((int)blockIdx.x * WARPS >= walk.groups) { // nothing to do: no entries, no weight
    if (lane == 0) *list.count = 0;
    if (threadIdx.x < GROUP_HEADS) parts[(row * gridDim.x + blockIdx.x) * GROUP_HEADS + threadIdx.x] = make_float4(-3e38f, -3e38f, 0.f, 0.f);
    return;
  }
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  char* own = smem + warp * WARP_BYTES;
  for (int i = lane * 16; i < RING_BYTES + LOW_BATCH * LOW_ROW; i += 512) *reinterpret_cast<uint4*>(own + i) = make_uint4(0, 0, 0, 0); // no NaNs
  const u32 ring = (u32)__cvta_generic_to_shared(own), lows = ring + RING_BYTES;
  float4* sample = reinterpret_cast<float4*>(own + RING_BYTES + LOW_BATCH * LOW_ROW) + lane;
  const u32 words_at = ring + lane * WORDS * 4, units_at = ring + BIT_BYTES + (lane >> 3 & 1) * STAGE_BYTES + (lane >> 4) * 16;
  const u32 lows_at = lows + (lane & 7) * LOW_ROW + (lane >> 4) * 16; // the eight rows twice
#if BULK
  __shared__ u64 barriers[WARPS][3]; // two chunks, lows
  const u32 barrier = (u32)__cvta_generic_to_shared(barriers[warp]);
#endif

  // Where the groups of 64 slots lie: lane l knows slot l of either half; -1 where there is none.
  auto locate = [&](int from) {
    const int slot = from + lane, g = walk.group(slot, stream);
    if (slot >= slots || g >= walk.groups) return -1;
    const int page = g / page_groups;
    return (table[(long long)b * table_stride + page] * heads + head) * page_groups + g - page * page_groups;
  };
  int here = locate(0), there = locate(32);
  auto place = [&](int i, int slot) { return __shfl_sync(~0u, (slot ^ i) & 32 ? there : here, slot & 31); }; // of up to 32 slots behind slot i
  auto fetch = [&](int i, int from) { // bits and ranges of a chunk
    const u32 chunk = from / CHUNK & 1;
#if BULK
    const int at = place(i, from + (lane & (CHUNK - 1)));
    const bool take = lane < CHUNK && at >= 0;
    const u32 taken = __popc(__ballot_sync(~0u, take));
    if (lane == 0) expect(barrier + chunk * 8, taken * STAGE_BYTES);
    if (take) {
      const u32 to = ring + (chunk * CHUNK + lane) * STAGE_BYTES;
      copy(to, bits + (long long)at * BIT_BYTES, BIT_BYTES, barrier + chunk * 8, policy);
      copy(to + BIT_BYTES, meta + (long long)at * META_BYTES + 2 * D, 2 * D, barrier + chunk * 8, policy);
    }
#else
#pragma unroll
    for (int g = 0; g < CHUNK; g++) {
      const int at = place(i, from + g);
      const u32 to = ring + (chunk * CHUNK + g) * STAGE_BYTES;
      if (at < 0) continue;
      for (int c = lane * 16; c < BIT_BYTES; c += 512) copy16(to + c, bits + (long long)at * BIT_BYTES + c, policy);
      if (lane * 16 < 2 * D) copy16(to + BIT_BYTES + lane * 16, meta + (long long)at * META_BYTES + 2 * D + lane * 16, policy);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  };
  auto fetch_lows = [&](int i, int from) {
#if BULK
    const int at = place(i, from + (lane & (LOW_BATCH - 1)));
    const bool take = lane < LOW_BATCH && at >= 0;
    const u32 taken = __popc(__ballot_sync(~0u, take));
    if (lane == 0) expect(barrier + 16, taken * 2 * D);
    if (take) copy(lows + lane * LOW_ROW, meta + (long long)at * META_BYTES, 2 * D, barrier + 16, policy);
#else
#pragma unroll
    for (int c = 0; c < LOW_BATCH * D / 256; c++) {
      const int n = c * 32 + lane, g = n / (D / 8), unit = n % (D / 8), at = place(i, from + g);
      if (at >= 0) copy16(lows + g * LOW_ROW + unit * 16, meta + (long long)at * META_BYTES + unit * 16, policy);
    }
#endif
  };
  auto start = [&]() {
#if BULK
    if (lane < 3) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(barrier + lane * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncwarp();
    fetch_lows(0, 0);
    fetch(0, 0);
  };
  start();
  Query query;
  query.load(q + (long long)b * q_stride + (long long)(head * GROUP_HEADS) * D, lane, scale_log2);
  const float infinity = __uint_as_float(0x7f800000u);

  float base[4];
  // Scores of slots i and i + 1 in log2 units minus the references; -infinity for groups that do not exist.
  auto scores = [&](int i, float ref0, float ref1, float (&t)[SETS][2][4], int (&group)[SETS]) {
    if ((i & 31) == 0 && i > 0) here = there, there = locate(i + 32);
    if (i % CHUNK == 0) {
      fetch(i, i + CHUNK); // into the place of the chunk before
#if BULK
      await(barrier + (i / CHUNK & 1) * 8, i / CHUNK >> 1 & 1);
      if (i % LOW_BATCH == 0) await(barrier + 16, i / LOW_BATCH & 1);
#else
      asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
      __syncwarp();
    }
    if (i % LOW_BATCH == 0) {
      base[0] = base[1] = base[2] = base[3] = 0.f;
#pragma unroll
      for (int w = 0; w < 2 * WORDS; w++) {
        u32 unit[4];
        shared_units(unit, lows_at + w * 32);
        if (w & 1) mma<1>(base, base, unit, query.q + 4 * w, 0xddddddddu);
        else mma<0>(base, base, unit, query.q + 4 * w, 0xddddddddu);
      }
      __syncwarp();
      fetch_lows(i, i + LOW_BATCH);
    }
    float c[4][4];
    const u32 stage = (i & (2 * CHUNK - 1)) * STAGE_BYTES;
    query.product(words_at + stage, units_at + stage, STAGE_BYTES, c);
    __syncwarp(); // the next round overwrites these places
#pragma unroll
    for (int g = 0; g < SETS; g++) {
      group[g] = walk.group(i + second + g, stream);
      const int from = ((i & 7) + second + g) * 4 + tig;
      float z0 = __shfl_sync(~0u, base[0], from) * query.k0 - ref0, z1 = __shfl_sync(~0u, base[1], from) * query.k1 - ref1;
      if (group[g] >= walk.groups) z0 = z1 = -infinity;
#pragma unroll
      for (int v = 0; v < 4; v++) {
        t[g][0][v] = (MERGED && second ? c[v][2] : c[v][2 * g]) * query.k0 + z0;
        t[g][1][v] = (MERGED && second ? c[v][3] : c[v][2 * g + 1]) * query.k1 + z1;
      }
    }
  };
  auto across = [&](float x, bool sum) { // over the lanes that hold the same heads
#pragma unroll
    for (int o = MERGED ? 2 : 4; o < 32; o <<= 1) {
      const float y = __shfl_xor_sync(~0u, x, o);
      x = sum ? x + y : fmaxf(x, y);
    }
    return x;
  };
  auto whole_block = [&](float& x0, float& x1, float (*shared)[8], bool sum) { // of this lane's two heads
    x0 = across(x0, sum), x1 = across(x1, sum);
    if (gid == 0 && second == 0) shared[warp][2 * pair] = x0, shared[warp][2 * pair + 1] = x1;
    __syncthreads();
    x0 = shared[0][2 * pair], x1 = shared[0][2 * pair + 1];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      const float y0 = shared[w][2 * pair], y1 = shared[w][2 * pair + 1];
      x0 = sum ? x0 + y0 : fmaxf(x0, y0), x1 = sum ? x1 + y1 : fmaxf(x1, y1);
    }
  };

  // The sample: its scores stay in shared memory, its normalizers become the references.
  float ref0 = -1e30f, ref1 = -1e30f;
  for (int i = 0; i < walk.sample; i += 2) {
    float t[SETS][2][4];
    int group[SETS];
    scores(i, 0.f, 0.f, t, group);
#pragma unroll
    for (int g = 0; g < SETS; g++) {
#pragma unroll
      for (int h = 0; h < 2; h++) sample[((i / 2 * SETS + g) * 2 + h) * 32] = make_float4(t[g][h][0], t[g][h][1], t[g][h][2], t[g][h][3]);
#pragma unroll
      for (int v = 0; v < 4; v++) ref0 = fmaxf(ref0, t[g][0][v]), ref1 = fmaxf(ref1, t[g][1][v]);
    }
  }
  for (int i = threadIdx.x; i < 256; i += WARPS * 32) hist[i] = 0;
  whole_block(ref0, ref1, shared_top, false);
  float sum0 = 0.f, sum1 = 0.f;
  for (int i = 0; i < walk.sample / 2 * SETS; i++) {
    const float4 x = sample[2 * i * 32], y = sample[(2 * i + 1) * 32];
    sum0 += (exp2_fast(x.x - ref0) + exp2_fast(x.y - ref0)) + (exp2_fast(x.z - ref0) + exp2_fast(x.w - ref0));
    sum1 += (exp2_fast(y.x - ref1) + exp2_fast(y.y - ref1)) + (exp2_fast(y.z - ref1) + exp2_fast(y.w - ref1));
  }
  whole_block(sum0, sum1, shared_sum, true);
  ref0 = 2 * pair < GROUP_HEADS ? ref0 + log2f(sum0) : infinity; // a head that does not exist: exponentials of zero
  ref1 = 2 * pair + 1 < GROUP_HEADS ? ref1 + log2f(sum1) : infinity;

  // The threshold: bins of an eighth of an octave from 8 down, zeros in the last.
  for (int i = 0; i < walk.sample / 2 * SETS; i++) {
    const float4 x = sample[2 * i * 32], y = sample[(2 * i + 1) * 32];
    const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    const bool exists = walk.group((i / SETS) * 2 + (MERGED ? second : i % SETS), stream) < walk.groups;
#pragma unroll
    for (int v = 0; v < 4; v++) {
      float p = JOIN(exp2_fast(xs[v] - ref0), exp2_fast(ys[v] - ref1));
      p = JOIN(p, __shfl_xor_sync(~0u, p, 1));
      if (!MERGED) p = JOIN(p, __shfl_xor_sync(~0u, p, 2));
      if (exists && (v & (LANES - 1)) == pair) atomicAdd(&hist[min(255, max(0, 1040 - (int)(__float_as_uint(p) >> 20)))], 1);
    }
  }
  __syncthreads();
  if (warp == 0) {
    int mine = 0, all;
#pragma unroll
    for (int i = 0; i < 8; i++) mine += hist[lane * 8 + i];
    int seen = mine;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int y = __shfl_up_sync(~0u, seen, o);
      if (lane >= o) seen += y;
    }
    all = __shfl_sync(~0u, seen, 31);
    const int enough = (int)(RATIO * all * (float)width / (32.f * walk.groups)) + EXTRA;
    if (lane == 31) shared_tau = 0.f;
    __syncwarp();
    seen -= mine;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int n = hist[lane * 8 + i];
      if (seen < enough && seen + n >= enough && lane * 8 + i < 255) shared_tau = __uint_as_float((u32)(1040 - lane * 8 - i) << 20);
      seen += n;
    }
  }
  __syncthreads();
  const float tau = shared_tau;

  u64 to_entries = reinterpret_cast<u64>(list.entries + pair * 16), to_tokens = reinterpret_cast<u64>(list.tokens), to_bounds = reinterpret_cast<u64>(list.bounds);
  asm volatile("" : "+l"(to_entries), "+l"(to_tokens), "+l"(to_bounds)); // kept in registers, not computed again
  const u32 before = (1u << (lane & ~(LANES - 1))) - 1;
  int count;
  auto keep = [&](int i, const float (&t)[SETS][2][4], const int (&group)[SETS]) {
    u32 left_out = 0;
#pragma unroll
    for (int g = 0; g < SETS; g++) {
      float e[2][4], bound = 0.f;
#pragma unroll
      for (int v = 0; v < 4; v++) e[0][v] = exp2_fast(t[g][0][v]), e[1][v] = exp2_fast(t[g][1][v]), bound = fmaxf(bound, JOIN(e[0][v], e[1][v]));
      sum0 += (e[0][0] + e[0][1]) + (e[0][2] + e[0][3]), sum1 += (e[1][0] + e[1][1]) + (e[1][2] + e[1][3]);
      bound = JOIN(bound, __shfl_xor_sync(~0u, bound, 1)); // of four tokens: at least the sum of any
      if (!MERGED) bound = JOIN(bound, __shfl_xor_sync(~0u, bound, 2));
      bool hit = bound >= tau && group[g] < walk.groups;
      const u32 hits = __ballot_sync(~0u, hit);
      const int at = count + __popc(hits & before) / LANES;
      count += __popc(hits) / LANES;
      hit = hit && at < list.room;
      if (hit) {
        *reinterpret_cast<uint4*>(to_entries + (u64)(u32)at * ENTRY_BYTES) =
            make_uint4(pack_bf16(e[0][0], e[1][0]), pack_bf16(e[0][1], e[1][1]), pack_bf16(e[0][2], e[1][2]), pack_bf16(e[0][3], e[1][3]));
        if (pair == 0) *reinterpret_cast<int*>(to_tokens + (u64)(u32)at * 4) = group[g] * 32 + gid * 4;
      } else {
        left_out = max(left_out, __float_as_uint(bound));
      }
    }
    left_out = redux_max(left_out);
    if (lane == 0) *reinterpret_cast<u32*>(to_bounds + i * 2) = left_out;
  };

  int from = walk.sample;
  int tries = 0;
  bool again;
  do {
    count = 0, sum0 = sum1 = 0.f;
    if (from > 0) {
      for (int i = 0; i < walk.sample; i += 2) {
        float t[SETS][2][4];
        int group[SETS];
#pragma unroll
        for (int g = 0; g < SETS; g++) {
          group[g] = walk.group(i + second + g, stream);
          const float4 x = sample[((i / 2 * SETS + g) * 2) * 32], y = sample[((i / 2 * SETS + g) * 2 + 1) * 32];
          t[g][0][0] = x.x - ref0, t[g][0][1] = x.y - ref0, t[g][0][2] = x.z - ref0, t[g][0][3] = x.w - ref0;
          t[g][1][0] = y.x - ref1, t[g][1][1] = y.y - ref1, t[g][1][2] = y.z - ref1, t[g][1][3] = y.w - ref1;
        }
        keep(i, t, group);
      }
    } else { // walk again from the start
      here = locate(0), there = locate(32);
      start();
    }
    for (int i = from; i < slots; i += 2) {
      float t[SETS][2][4];
      int group[SETS];
      scores(i, ref0, ref1, t, group);
      keep(i, t, group);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    whole_block(sum0, sum1, shared_sum, true);
    // A score 2^127 times heavier than the whole sample: with a higher reference once more.
    const bool over0 = !(sum0 < infinity), over1 = !(sum1 < infinity);
    again = __syncthreads_or(over0 || over1);
    if (over0) ref0 += 120.f;
    if (over1) ref1 += 120.f;
    from = 0;
  } while (again && ++tries < 64); // NaNs do not end it
  if (lane == 0) *list.count = min(count, list.room);
  if (warp == 0 && gid == 0 && second == 0) {
    float4* to = parts + (row * gridDim.x + blockIdx.x) * GROUP_HEADS + 2 * pair;
    if (2 * pair < GROUP_HEADS) to[0] = make_float4(ref0, ref0 + log2f(sum0), tau, 0.f);
    if (2 * pair + 1 < GROUP_HEADS) to[1] = make_float4(ref1, ref1 + log2f(sum1), tau, 0.f);
  }
}

__device__ __forceinline__ int warp_scan(int v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int y = __shfl_up_sync(~0u, v, o);
    if (lane >= o) v += y;
  }
  return v;
}
// Inclusive prefix sum over the block; begins and ends with a barrier.
__device__ __forceinline__ int block_scan(int v, int* warp_sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  v = warp_scan(v);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = v;
  __syncthreads();
  const int own = warp_sums[lane];
  return v + __shfl_sync(~0u, warp_scan(own) - own, warp);
}

// What the selector holds of a row in shared memory: ranked units as probability bits and inverted index, so that larger is better.
struct Ranking {
  u64* entries;
  int capacity, wanted;
};
struct Cut {
  u64 low, high; // where the wanted-th entry lies
  int need, crowd;
};
struct Shared {
  alignas(16) int bins[BINS]; // read by fours
  int warp_sums[32];
  int held; // entries, or how many were offered where they do not fit
  u64 crowd[128];
  u64 best[32], least[32], floor;
  Cut cut;
  int crowded, queued;
};

// The wanted-th largest of the entries, found by bins of twelve bits, then by comparing the last few; all threads get it.
__device__ __noinline__ u64 find_floor(const Ranking ranking, Shared& shared) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, held = shared.held;
  u64 least = ~0ull, best = 0;
  for (int i = tid; i < held; i += THREADS) least = min(least, ranking.entries[i]), best = max(best, ranking.entries[i]);
#pragma unroll
  for (int o = 16; o; o >>= 1) least = min(least, __shfl_xor_sync(~0u, least, o)), best = max(best, __shfl_xor_sync(~0u, best, o));
  if (lane == 0) shared.least[warp] = least, shared.best[warp] = best;
  for (int i = tid; i < BINS; i += THREADS) shared.bins[i] = 0;
  __syncthreads();
  least = shared.least[lane], best = shared.best[lane];
#pragma unroll
  for (int o = 16; o; o >>= 1) least = min(least, __shfl_xor_sync(~0u, least, o)), best = max(best, __shfl_xor_sync(~0u, best, o));
  Cut cut = {least, best, ranking.wanted, held};
  while (cut.low < cut.high && cut.crowd != cut.need) {
    const u64 low = cut.low, high = cut.high;
    if (cut.crowd <= 128) {
      if (tid == 0) shared.crowded = 0;
      __syncthreads();
      for (int i = tid; i < held; i += THREADS) {
        const u64 v = ranking.entries[i];
        if (v >= low && v <= high) shared.crowd[atomicAdd(&shared.crowded, 1)] = v;
      }
      __syncthreads();
      for (int i = warp; i < cut.crowd; i += THREADS / 32) {
        int better = 0;
        for (int k = lane; k < cut.crowd; k += 32) better += shared.crowd[k] > shared.crowd[i];
        better = __reduce_add_sync(~0u, better);
        if (better == cut.need - 1 && lane == 0) shared.floor = shared.crowd[i];
      }
      __syncthreads();
      return shared.floor;
    }
    const int shift = max(0, 64 - __clzll(high - low) - 12);
    for (int i = tid; i < held; i += THREADS) {
      const u64 v = ranking.entries[i];
      if (v >= low && v <= high) atomicAdd(&shared.bins[(int)((v - low) >> shift)], 1);
    }
    __syncthreads();
    const int top = BINS - 4 - tid * 4;
    const int4 n = *reinterpret_cast<const int4*>(shared.bins + top);
    const int each[4] = {n.x, n.y, n.z, n.w}, mine = n.x + n.y + n.z + n.w;
    int seen = block_scan(mine, shared.warp_sums) - mine;
    *reinterpret_cast<int4*>(shared.bins + top) = make_int4(0, 0, 0, 0);
#pragma unroll
    for (int i = 3; i >= 0; i--) {
      if (seen < cut.need && seen + each[i] >= cut.need) {
        const u64 from = low + ((u64)(top + i) << shift);
        shared.cut = {from, min(high, from + ((1ull << shift) - 1)), cut.need - seen, each[i]};
      }
      seen += each[i];
    }
    __syncthreads();
    cut = shared.cut;
    __syncthreads();
  }
  return cut.low; // everything from here on belongs to it
}
// Keep the wanted best entries, in their order.
__device__ __noinline__ u64 shrink(const Ranking ranking, Shared& shared) {
  __syncthreads();
  const int held = shared.held;
  if (held <= ranking.wanted) return 0;
  const u64 floor = find_floor(ranking, shared);
  int kept = 0;
  for (int i = 0; i < held; i += THREADS) {
    const u64 v = i + (int)threadIdx.x < held ? ranking.entries[i + threadIdx.x] : 0;
    const bool stays = i + (int)threadIdx.x < held && v >= floor;
    const int end = block_scan(stays, shared.warp_sums);
    if (stays) ranking.entries[kept + end - 1] = v; // not behind where it was read, and all have read
    __syncthreads();
    if (threadIdx.x == THREADS - 1) shared.held = kept + end;
    __syncthreads();
    kept = shared.held;
  }
  return floor;
}

struct Choice { // what may be chosen
  int first, last;
  u64 floor; // entries below are of no use
};
__device__ __forceinline__ void offer(const Ranking& ranking, Shared& shared, const Choice& choice, int token, float p) {
  const u64 v = (u64)__float_as_uint(p) << 32 | (u32)~token;
  if (token < choice.first || token >= choice.last || v < choice.floor) return;
  const int at = atomicAdd(&shared.held, 1);
  if (at < ranking.capacity) ranking.entries[at] = v;
}
// Pooled probabilities of the four tokens of an entry. roots: square roots of its block's weights a head, which may be far below the smallest float
// where the entry is far above one.
__device__ __forceinline__ void pool(const uint4 (&entry)[LANES], const float* roots, float (&p)[4]) {
#pragma unroll
  for (int i = 0; i < LANES; i++) {
    const u32 w[4] = {entry[i].x, entry[i].y, entry[i].z, entry[i].w};
#pragma unroll
    for (int v = 0; v < 4; v++) {
      const float x = JOIN(__uint_as_float(w[v] << 16) * roots[2 * i] * roots[2 * i], __uint_as_float(w[v] & 0xffff0000u) * roots[2 * i + 1] * roots[2 * i + 1]);
      p[v] = i == 0 ? x : JOIN(p[v], x);
    }
  }
}

struct Index {
  const qtype* q; // of the key-value head
  const char *bits, *meta;
  const int* pages; // of the sequence
  int head, heads, page_groups;
  float scale_log2;
};
// Score the groups of two slots of a stream again and offer what was not listed; one warp, with 16 D + 16 ENTRY_BYTES of shared memory.
__device__ __noinline__ void score_again(const Index index, const Walk walk, int slot, int stream, const float4* part, const float* roots,
    const u32* listed, char* space, const Ranking ranking, Shared& shared, const Choice choice) {
  const int lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3, pair = MERGED ? tig & 1 : tig, second = MERGED ? tig >> 1 : 0;
  for (int g = 0; g < 2; g++) {
    const int group = min(walk.group(slot + g, stream), walk.groups - 1), page = group / index.page_groups;
    const long long at = ((long long)index.pages[page] * index.heads + index.head) * index.page_groups + group - page * index.page_groups;
    for (int i = lane * 16; i < 4 * D; i += 512) {
      *reinterpret_cast<uint4*>(space + g * 8 * D + i) = *reinterpret_cast<const uint4*>(index.bits + at * BIT_BYTES + i);
      *reinterpret_cast<uint4*>(space + g * 8 * D + 4 * D + i) = *reinterpret_cast<const uint4*>(index.meta + at * META_BYTES + i);
    }
  }
  __syncwarp();
  Query query;
  query.load(index.q, lane, index.scale_log2);
  const u32 at = (u32)__cvta_generic_to_shared(space), lows_at = at + 4 * D + (lane >> 3 & 1) * 8 * D + (lane >> 4) * 16;
  float base[4] = {0.f, 0.f, 0.f, 0.f}, c[4][4];
#pragma unroll
  for (int w = 0; w < 2 * WORDS; w++) {
    u32 unit[4];
    shared_units(unit, lows_at + w * 32);
    if (w & 1) mma<1>(base, base, unit, query.q + 4 * w, 0xddddddddu);
    else mma<0>(base, base, unit, query.q + 4 * w, 0xddddddddu);
  }
  query.product(at + lane * WORDS * 4, lows_at + 2 * D, 8 * D, c);
  const float infinity = __uint_as_float(0x7f800000u);
  const float ref0 = 2 * pair < GROUP_HEADS ? part[min(2 * pair, GROUP_HEADS - 1)].x : infinity;
  const float ref1 = 2 * pair + 1 < GROUP_HEADS ? part[min(2 * pair + 1, GROUP_HEADS - 1)].x : infinity;
  char* entries = space + 16 * D;
#pragma unroll
  for (int g = 0; g < SETS; g++) {
    const bool odd = MERGED ? second : g;
    const float z0 = (odd ? base[2] : base[0]) * query.k0 - ref0, z1 = (odd ? base[3] : base[1]) * query.k1 - ref1;
    u32 e[4];
#pragma unroll
    for (int v = 0; v < 4; v++) e[v] = pack_bf16(exp2_fast((odd ? c[v][2] : c[v][0]) * query.k0 + z0), exp2_fast((odd ? c[v][3] : c[v][1]) * query.k1 + z1));
    *reinterpret_cast<uint4*>(entries + ((odd ? 8 : 0) + gid) * ENTRY_BYTES + pair * 16) = make_uint4(e[0], e[1], e[2], e[3]);
  }
  __syncwarp();
  if (lane < 16) {
    const int group = walk.group(slot + (lane >> 3), stream), token = group * 32 + (lane & 7) * 4;
    if (group < walk.groups && !(listed[token >> 7] >> (token >> 2 & 31) & 1)) {
      uint4 entry[LANES];
      float p[4];
#pragma unroll
      for (int i = 0; i < LANES; i++) entry[i] = reinterpret_cast<const uint4*>(entries + lane * ENTRY_BYTES)[i];
      pool(entry, roots, p);
#pragma unroll
      for (int v = 0; v < 4; v++) offer(ranking, shared, choice, token + v, p[v]);
    }
  }
  __syncwarp();
}

// Dynamic shared memory: entries [capacity], weights [num_parts, 8] and bounds [num_parts], a bit a token of the longest row, a bit four tokens, eight
// spaces of score_again. lists and parts as fier_list leaves them. Writes out [R, width + 1]: ascending units, then their count; -1 everywhere where the
// sequence is read whole. Grid (1, Hk, B).
extern "C" __global__ void __launch_bounds__(THREADS, 1) fier_pick(const qtype* q, const char* bits, const char* meta, const int* table, const int* lens,
    const char* lists, const float4* parts, int* out, int q_stride, int table_stride, int page_groups, long long list_bytes, int budget, int width,
    int sink, int window, int num_parts, int capacity, int longest, float scale_log2) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Shared shared;
  __shared__ float shared_floor;
  __shared__ int queue[THREADS];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, head = blockIdx.y, b = blockIdx.z;
  const long long row = (long long)b * gridDim.y + head;
  dependency_wait();
  const int stored = lens[b];
  out += row * (width + 1);
  if (stored <= budget) {
    for (int i = tid; i <= width; i += THREADS) out[i] = -1;
    return;
  }
  const int closed = stored / 32 * 32, first = sink, last = max(first, min(closed, stored - window)), wanted = width - first - (stored - last);
  if (wanted >= last - first || wanted <= 0) { // every unit, or nothing but the forced ones
    const int gap = wanted <= 0 ? last - first : 0, count = min(stored - gap, width);
    for (int i = tid; i <= width; i += THREADS) out[i] = i == width ? count : i >= count ? -1 : i < first ? i : i + gap;
    return;
  }
  const Walk walk(stored, num_parts);
  const int streams = num_parts * WARPS, slots = walk.slots();
  const Ranking ranking = {reinterpret_cast<u64*>(smem), capacity, wanted};
  float* roots = reinterpret_cast<float*>(smem + (long long)capacity * 8); // [num_parts, 8]: of the weights
  float* bounds = roots + num_parts * 8;                                   // [num_parts]: of the largest weight
  u32* chosen = reinterpret_cast<u32*>(bounds + ((num_parts + 3) & ~3));      // [longest / 32]
  u32* listed = chosen + (longest + 31) / 32;                                 // [longest / 128]
  char* spaces = reinterpret_cast<char*>(listed) + (((longest + 127) / 128 * 4 + 15) & ~15);
  spaces = smem + ((spaces - smem + 127) & ~127);
  parts += row * num_parts * GROUP_HEADS;
  lists += row * streams * list_bytes;

  if (tid == 0) shared.held = 0, shared_floor = 0.f;
  for (int i = tid; i < (last + 31) / 32; i += THREADS) chosen[i] = 0;
  if (warp < 8) { // the normalizers of a head over all parts
    float top = -3e38f, total = 0.f;
    if (warp < GROUP_HEADS) {
      for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, parts[p * GROUP_HEADS + warp].y);
#pragma unroll
      for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      for (int p = lane; p < num_parts; p += 32) total += exp2_fast(parts[p * GROUP_HEADS + warp].y - top);
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      top += log2f(total);
    }
    for (int p = lane; p < num_parts; p += 32) roots[p * 8 + warp] = warp < GROUP_HEADS ? exp2f((parts[p * GROUP_HEADS + warp].x - top) * 0.5f) : 0.f;
  }
  __syncthreads();
  for (int p = tid; p < num_parts; p += THREADS) {
    float most = 0.f;
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; h++) most = fmaxf(most, roots[p * 8 + h]);
    bounds[p] = most * 1.005f; // entries are rounded to eight bits
    atomicMax(reinterpret_cast<int*>(&shared_floor), __float_as_int(parts[p * GROUP_HEADS].z * bounds[p] * bounds[p]));
  }
  __syncthreads();

  // Nothing that was left out reaches this floor. Usually enough of what is listed does.
  Choice choice = {first, last, (u64)__float_as_uint(shared_floor) << 32};
  int full = 0;
  auto take = [&](const List& list, int k, uint4 (&entry)[LANES], int& token) {
#pragma unroll
    for (int i = 0; i < LANES; i++) entry[i] = __ldg(reinterpret_cast<const uint4*>(list.entries + (long long)k * ENTRY_BYTES) + i);
    token = __ldg(list.tokens + k);
  };
  for (int s = warp; s < streams; s += THREADS / 32) {
    const List list(const_cast<char*>(lists) + s * list_bytes, list_bytes, slots);
    const int count = *list.count;
    full |= count >= list.room;
    const float* w = roots + s / WARPS * 8;
    for (int k = lane; k < count; k += 64) {
      uint4 entry[2][LANES];
      int token[2];
      take(list, k, entry[0], token[0]);
      if (k + 32 < count) take(list, k + 32, entry[1], token[1]);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        if (k + n * 32 < count) {
          float p[4];
          pool(entry[n], w, p);
#pragma unroll
          for (int v = 0; v < 4; v++) offer(ranking, shared, choice, token[n] + v, p[v]);
        }
      }
    }
  }
  full = __syncthreads_or(full);
  u64 floor;
  if (!full && shared.held >= wanted && shared.held <= capacity) {
    floor = find_floor(ranking, shared);
  } else {
    // Everything listed, then the pairs whose bound reaches the last of what is held.
    choice.floor = 0;
    if (tid == 0) shared.held = 0;
    for (int i = tid; i < (longest + 127) / 128; i += THREADS) listed[i] = 0;
    __syncthreads();
    for (int s = 0; s < streams; s++) {
      const List list(const_cast<char*>(lists) + s * list_bytes, list_bytes, slots);
      const int count = *list.count;
      for (int k = 0; k < count; k += THREADS) {
        if (shared.held > capacity - 4 * THREADS) choice.floor = max(choice.floor, shrink(ranking, shared));
        __syncthreads();
        if (k + tid < count) {
          uint4 entry[LANES];
          int token;
          float p[4];
          take(list, k + tid, entry, token);
          pool(entry, roots + s / WARPS * 8, p);
          atomicOr(&listed[token >> 7], 1u << (token >> 2 & 31));
#pragma unroll
          for (int v = 0; v < 4; v++) offer(ranking, shared, choice, token + v, p[v]);
        }
        __syncthreads();
      }
    }
    choice.floor = max(choice.floor, shrink(ranking, shared));
    const Index index = {q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, bits, meta, table + (long long)b * table_stride, head, (int)gridDim.y,
        page_groups, scale_log2};
    const int pairs = streams * slots / 2;
    for (int from = 0; from < pairs; from += THREADS) {
      __syncthreads();
      if (tid == 0) shared.queued = 0;
      __syncthreads();
      if (from + tid < pairs) {
        const int s = (from + tid) / (slots / 2), i = (from + tid) % (slots / 2);
        const List list(const_cast<char*>(lists) + s * list_bytes, list_bytes, slots);
        const bool exists = walk.group(2 * i, s) < walk.groups || walk.group(2 * i + 1, s) < walk.groups;
        if (exists && list.bounds[i] * bounds[s / WARPS] * bounds[s / WARPS] >= __uint_as_float((u32)(choice.floor >> 32))) queue[atomicAdd(&shared.queued, 1)] = from + tid;
      }
      __syncthreads();
      const int queued = shared.queued;
      for (int k = 0; k < queued; k += 8) {
        __syncthreads();
        if (shared.held > capacity - 512) choice.floor = max(choice.floor, shrink(ranking, shared));
        __syncthreads();
        if (warp < 8 && k + warp < queued) {
          const int n = queue[k + warp], s = n / (slots / 2), i = n % (slots / 2);
          score_again(index, walk, 2 * i, s, parts + s / WARPS * GROUP_HEADS, roots + s / WARPS * 8, listed, spaces + warp * (16 * D + 16 * ENTRY_BYTES), ranking,
              shared, choice);
        }
      }
    }
    floor = shrink(ranking, shared);
  }
  __syncthreads();

  // Ascending output.
  const int held = min(shared.held, capacity);
  for (int i = tid; i < held; i += THREADS) {
    const u64 v = ranking.entries[i];
    const int token = (int)~(u32)v;
    if (v >= floor) atomicOr(&chosen[token >> 5], 1u << (token & 31));
  }
  __syncthreads();
  const int words = (last + 31) / 32, each = (words + THREADS - 1) / THREADS, begin = min(words, tid * each), end = min(words, begin + each);
  int mine = 0;
  for (int i = begin; i < end; i++) mine += __popc(chosen[i]);
  int at = first + block_scan(mine, shared.warp_sums) - mine;
  for (int i = begin; i < end; i++) {
    u32 flags = chosen[i];
    while (flags) {
      out[at++] = i * 32 + __ffs(flags) - 1;
      flags &= flags - 1;
    }
  }
  for (int i = tid; i < first; i += THREADS) out[i] = i;
  for (int i = first + wanted + tid; i < width; i += THREADS) out[i] = last + i - first - wanted;
  if (held < wanted) { // only NaNs among the scores leave too few
    for (int i = tid; i < wanted; i += THREADS) out[first + i] = first + i;
  }
  if (tid == 0) out[width] = width;
}

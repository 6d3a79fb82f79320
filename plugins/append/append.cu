// KvAppend of a decode step: every thread takes eight channels of one head of one sequence's newest token, and what `kernel.py` writes it writes, bit for bit.
//
// Built with -DD, -DHEADS_Q, -DHEADS_KV, -DTHREADS, -DSUMMARY (0 none, 1 one-bit keys, 2 minima and maxima), -DGROUP (tokens of a summary), -DNORM and,
// for bfloat16, -DBF16. D is a multiple of 16, of 32 for one-bit keys.
#include "query.cuh"

#define HALF (D / 2)
#define LANES (D > 128 ? 32 : D > 64 ? 16 : 8) // threads of a head: a power of two, because a norm adds up over them
#define UNITS (HEADS_Q + 2 * HEADS_KV)
#define UNROLL (SUMMARY == 1 ? 8 : 4) // tokens of a closing group that are asked for at once; code that runs seldom is fetched from memory

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// As Triton divides and takes roots.
__device__ __forceinline__ float divide_fast(float x, float y) {
  float z;
  asm("div.full.f32 %0,%1,%2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float root_fast(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

struct __align__(16) Eight {
  real x[8];
  __device__ __forceinline__ void load(const real* p) { *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(p); }
  __device__ __forceinline__ void load_new(const real* p) { *reinterpret_cast<uint4*>(x) = __ldcg(reinterpret_cast<const uint4*>(p)); }
  __device__ __forceinline__ void store(real* p) const { *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(x); }
};

// A head's channels over their root mean square, times the weights of those channels: the sum is added up in the order of `kernel.py`.
__device__ __forceinline__ void normalize(Eight& own, Eight& other, const Eight& weight, const Eight& other_weight, float eps) {
  float four[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float a = to_float(own.x[2 * e]), c = to_float(own.x[2 * e + 1]);
    four[e] = fmaf(a, a, __fmul_rn(c, c));
  }
  float sum = __fadd_rn(__fadd_rn(four[0], four[1]), __fadd_rn(four[2], four[3]));
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, o));
  const float root = root_fast((D & (D - 1)) == 0 ? fmaf(sum, 1.f / D, eps) : __fadd_rn(divide_fast(sum, D), eps));
#pragma unroll
  for (int e = 0; e < 8; e++) {
    own.x[e] = to_real(__fmul_rn(to_float(to_real(divide_fast(to_float(own.x[e]), root))), to_float(weight.x[e])));
    other.x[e] = to_real(__fmul_rn(to_float(to_real(divide_fast(to_float(other.x[e]), root))), to_float(other_weight.x[e])));
  }
}

// qkv [T, qkv_stride]; positions [T], starts [B + 1], lens [B] stored tokens behind the append, table and homes [B, table_stride]; rope [X, D] fp32;
// weights [D]; out [T, HEADS_Q D]; keys, values [P, Hk, page_size, D]; bits and meta as `kernel.py` says. A sequence has one new token or none.
// settled: all of that but qkv was there before the kernel in front of this one began, whatever that one and those before it let begin early, so that it
// is read before the wait. early lets the kernel behind this one begin before the wait. published [B, HEADS_Q, 4 HEAD_WORDS], of one-bit keys, is where the
// rotated queries are published as query.cuh says, null: nowhere.
extern "C" __global__ void __launch_bounds__(THREADS) append_token(const real* qkv, const int* positions, const int* starts, const int* lens,
    const int* table, const int* homes, const float* rope, const real* q_weight, const real* k_weight, real* out, real* keys, real* values, u32* bits,
    void* meta, u32* published, int qkv_stride, int table_stride, int page_size, int settled, int early, float eps) {
  const int b = blockIdx.y, thread = blockIdx.x * THREADS + threadIdx.x, unit = thread / LANES, d = thread % LANES * 8;
  const int head = unit - HEADS_Q, mirror = d < HALF ? d + HALF : d - HALF;
  MARK(0)
  if (early) start_next();
  if (!settled) wait_for_input();
  // Lengths and page numbers are looked up by all threads, so that nothing waits for a branch: places, then positions and what they lead to.
  const int row = starts[b], end = starts[b + 1], token = max(lens[b] - 1, 0), page = (u32)token / (u32)page_size, inside = token - page * page_size;
  const bool has = end > row && unit < UNITS && d < D, turns = has && head < HEADS_KV, stores = has && head >= 0;
  const int place = table[(long long)b * table_stride + page], position = turns ? positions[row] : 0;
  const long long slot = (((long long)place * HEADS_KV + (u32)unit % HEADS_KV) * page_size + inside) * D + d;
  if (stores) prefetch((turns ? keys : values) + slot);
  float4 cosines[2] = {}, sines[2] = {};
  if (turns) {
    const float4* angles = reinterpret_cast<const float4*>(rope + (long long)position * D + d % HALF);
    cosines[0] = angles[0], cosines[1] = angles[1], sines[0] = angles[HALF / 4], sines[1] = angles[HALF / 4 + 1];
  }
#if NORM
  Eight weight = {}, other_weight = {};
  if (turns) {
    const real* weights = head < 0 ? q_weight : k_weight;
#pragma unroll
    for (int e = 0; e < 8; e++) weight.x[e] = weights[d + e], other_weight.x[e] = weights[mirror + e];
  }
#endif
#if SUMMARY
  const bool closes = turns && stores && (token + 1) % GROUP == 0;
  const real* first = keys + slot - (GROUP - 1) * D;
  float low[8], high[8];
  long long summary = 0;
  if (__builtin_expect(closes, 0)) {
    summary = ((long long)homes[(long long)b * table_stride + page] * HEADS_KV + head) * (page_size / GROUP) + inside / GROUP;
#pragma unroll
    for (int e = 0; e < 8; e++) low[e] = __int_as_float(0x7f800000), high[e] = -low[e];
#pragma unroll UNROLL
    for (int t = 0; t < GROUP; t++) {
      Eight old;
      old.load(first + min(t, GROUP - 2) * D);
#pragma unroll
      for (int e = 0; e < 8; e++) low[e] = fminf(low[e], to_float(old.x[e])), high[e] = fmaxf(high[e], to_float(old.x[e]));
    }
  }
#endif
  MARK(1)
  if (settled) wait_for_input();
  MARK(2)
  if (!early) start_next();
  Eight own = {}, other = {};
  if (has) own.load_new(qkv + (long long)row * qkv_stride + unit * D + d);
  if (turns) other.load_new(qkv + (long long)row * qkv_stride + unit * D + mirror);
#if NORM
  Eight normed = own;
  normalize(normed, other, weight, other_weight, eps);
  if (turns) own = normed;
#endif
  if (turns) {
    const float* cosine = reinterpret_cast<const float*>(cosines);
    const float* sine = reinterpret_cast<const float*>(sines);
    const float sign = d < HALF ? -1.f : 1.f;
#pragma unroll
    for (int e = 0; e < 8; e++) own.x[e] = to_real(fmaf(to_float(own.x[e]), cosine[e], sign * __fmul_rn(to_float(other.x[e]), sine[e])));
  }
#if SUMMARY == 1
  if (published) publish_query<LANES>(published + ((long long)b * HEADS_Q + unit) * (4 * HEAD_WORDS), own.x, d, has && head < 0);
#endif
  if (has) own.store(!stores ? out + (long long)row * (HEADS_Q * D) + unit * D + d : (turns ? keys : values) + slot);
  MARK(3)
#if SUMMARY
  if (__builtin_expect(!closes, 1)) return;
#pragma unroll
  for (int e = 0; e < 8; e++) low[e] = fminf(low[e], to_float(own.x[e])), high[e] = fmaxf(high[e], to_float(own.x[e]));
#if SUMMARY == 1
  __half* ranges = static_cast<__half*>(meta) + summary * 2 * D + d;
  u32 lows[4], widths[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    lows[e] = pack_halves(low[2 * e], low[2 * e + 1]);
    widths[e] = pack_halves(fminf(high[2 * e] - low[2 * e], 16000.f), fminf(high[2 * e + 1] - low[2 * e + 1], 16000.f));
  }
  *reinterpret_cast<uint4*>(ranges) = make_uint4(lows[0], lows[1], lows[2], lows[3]);
  *reinterpret_cast<uint4*>(ranges + D) = make_uint4(widths[0], widths[1], widths[2], widths[3]);
  float middle[8];
  u32 raised[8];
#pragma unroll
  for (int e = 0; e < 8; e++) middle[e] = (low[e] + high[e]) / 2, raised[e] = 0;
#pragma unroll UNROLL
  for (int t = 0; t < GROUP; t++) {
    Eight each; // the last is what this thread has just stored
    each.load(first + t * D);
#pragma unroll
    for (int e = 0; e < 8; e++) raised[e] |= (u32)(to_float(each.x[e]) >= middle[e]) << t;
  }
  // Words of the group, as `fier_layout.py` lays them out: of eight neighbouring channels and four tokens each.
  const int piece = d / 8;
  u32* words = bits + summary * D + piece % 4 * (D / 32) + piece / 4;
#pragma unroll 1
  for (int j = 0; j < 8; j++) {
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const u32 four = raised[e] >> 4 * j & 15;
      word |= ((four & 3) | (four & 12) << 14) << 2 * e;
    }
    words[4 * j * (D / 32)] = word;
  }
#else
  Eight least, most;
#pragma unroll
  for (int e = 0; e < 8; e++) least.x[e] = to_real(low[e]), most.x[e] = to_real(high[e]);
  real* bounds = static_cast<real*>(meta) + summary * 2 * D + d;
  least.store(bounds), most.store(bounds + D);
#endif
#endif
}

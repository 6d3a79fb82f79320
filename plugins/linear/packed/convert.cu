// Weights from codes, and codes from tokens, for products that a library multiplies.
//
// `widen` is built as `codes.cuh` says, and with -DBF16 or not; `narrow` with -DBF16 or not, for sm_89 on.
#include "codes.cuh"

#define THREADS 256

__device__ __forceinline__ float number_of(const uint4& v, int i) {
  const u32 word = i * BITS / 32 == 0 ? v.x : i * BITS / 32 == 1 ? v.y : i * BITS / 32 == 2 ? v.z : v.w;
  const u32 code = word >> i * BITS % 32 & ((1u << BITS) - 1);
#if BITS == 4
  return (float)code;
#elif SIGNED
  return (float)(signed char)code;
#else
  return __half2float(__ushort_as_half((u16)((code & 0x80) << 8 | (code & 0x7f) << 7))) * 256.f;
#endif
}

// out [rows, k]; a thread's 16 bytes of codes share a scale. k is a multiple of WEIGHTS.
extern "C" __global__ void __launch_bounds__(THREADS) widen(const unsigned char* codes, const scale_type* scales, const unsigned char* zeros, const scale_type* minima,
    const __half* scale_blocks, const __half* minimum_blocks, real* out, int rows, int k) {
  const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
  const int of_row = k / WEIGHTS, row = (int)(index / of_row), at = (int)(index % of_row) * WEIGHTS;
  start_next();
  wait_for_input();
  if (row >= rows) return;
  const int group = GROUP ? at / max(GROUP, 1) : 0;
  const uint4 v = *reinterpret_cast<const uint4*>(codes + index * 16);
  const float scale = shared_of(scales, scale_blocks, row_of(row, k), group), minimum = MINIMA ? shared_of(minima, minimum_blocks, row_of(row, k), group) : 0.f;
  const float zero = BITS == 8 ? 0.f : zero_of(zeros, row_of(row, k), group);
  auto weight_of = [&](int i) { return fmaf(number_of(v, i) - zero, scale, minimum); };
  uint4* to = reinterpret_cast<uint4*>(out + (long long)row * k + at);
#pragma unroll
  for (int i = 0; i < WEIGHTS; i += 8) {
    u32 made[4];
#pragma unroll
    for (int j = 0; j < 4; j++) made[j] = pack_real(weight_of(i + 2 * j), weight_of(i + 2 * j + 1));
    to[i / 8] = make_uint4(made[0], made[1], made[2], made[3]);
  }
}

__device__ __forceinline__ u32 narrow_pair(float low, float high) { // to e4m3, rounded to nearest
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%2,%1;" : "=h"(pair) : "f"(low), "f"(high));
  return pair;
#else
  return 0;
#endif
}

// One token a block: its largest magnitude becomes 448. x [tokens, k], codes [tokens, k], scales [tokens]; k is a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS) narrow(const real* x, unsigned char* codes, float* scales, int k) {
  __shared__ float most[THREADS / 32];
  const long long token = (long long)blockIdx.x * k;
  start_next();
  wait_for_input();
  float top = 0.f;
  for (int at = threadIdx.x * 8; at < k; at += THREADS * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(x + token + at);
    const real* own = reinterpret_cast<const real*>(&v);
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(to_float(own[i])));
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if ((threadIdx.x & 31) == 0) most[threadIdx.x >> 5] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) top = fmaxf(top, most[i]);
  const float scale = top > 0.f ? top / 448.f : 1.f, factor = 1.f / scale;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int at = threadIdx.x * 8; at < k; at += THREADS * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(x + token + at);
    const real* own = reinterpret_cast<const real*>(&v);
    u32 made[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      made[i] = narrow_pair(to_float(own[4 * i]) * factor, to_float(own[4 * i + 1]) * factor) |
                narrow_pair(to_float(own[4 * i + 2]) * factor, to_float(own[4 * i + 3]) * factor) << 16;
    *reinterpret_cast<uint2*>(codes + token + at) = make_uint2(made[0], made[1]);
  }
}

// Codes beside tokens in full precision, of blocks of sixteen tokens, brought to shared memory as they are stored: eight-bit floats (e4m3) with a scale
// a token, or with -DNIBBLES four bits with a scale and an integer zero point a token.
#pragma once
#include "tile.cuh"

#ifdef NIBBLES
#define FOLD 1 // codes have pages of their own
#define CODES (D / 2) // bytes of a token's codes
#else
#define FOLD 2 // codes where one number in full precision lies
#define CODES D
#endif

#ifdef NIBBLES
// Codes less their zero points are small integers, so exact; as for bytes below. Behind the scales lie the zero points.
__device__ __forceinline__ u32 pair_of_codes(u32 word, int i, float zero) {
  return pack_real((float)(word >> (4 * i) & 15) - zero, (float)(word >> (4 * i + 4) & 15) - zero);
}
__device__ __forceinline__ uint4 eight_codes(u32 word, float zero) {
  return make_uint4(pair_of_codes(word, 0, zero), pair_of_codes(word, 2, zero), pair_of_codes(word, 4, zero), pair_of_codes(word, 6, zero));
}
__device__ __forceinline__ float2 expand(char* half) {
  const int lane = threadIdx.x & 31, gid = lane >> 2;
  const real *scales = reinterpret_cast<const real*>(half + TILE * CODES), *zeros = scales + TILE;
  const float2 own = make_float2(to_float(scales[gid]), to_float(scales[gid + 8]));
  uint2 raw[D / 32];
  float zero[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    raw[i] = *reinterpret_cast<const uint2*>(half + (i * 32 + lane) * 8);
    zero[i] = to_float(zeros[(i * 32 + lane) / (D / 16)]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const int r = (i * 32 + lane) / (D / 16), c = (i * 32 + lane) % (D / 16) * 2;
    *reinterpret_cast<uint4*>(half + place(r, c)) = eight_codes(raw[i].x, zero[i]);
    *reinterpret_cast<uint4*>(half + place(r, c + 1)) = eight_codes(raw[i].y, zero[i]);
  }
  __syncwarp();
  return own;
}
#else
__device__ __forceinline__ float number_of_code(u32 word, int i) { // half precision has the same sign and mantissa, and an exponent that is 8 less
  const u32 byte = word >> (8 * i) & 0xff;
  return __half2float(__ushort_as_half((u16)((byte & 0x80) << 8 | (byte & 0x7f) << 7))) * 256.f;
}
__device__ __forceinline__ u32 pair_of_codes(u32 word, int i) { return pack_real(number_of_code(word, i), number_of_code(word, i + 1)); }

// Let the codes [TILE, D] at the beginning of a stage's half, with the tokens' scales behind them, become numbers where `take` looks for them, exactly.
// Returns the scales of the lane's two tokens; every lane of the warp calls it.
__device__ __forceinline__ float2 expand(char* half) {
  const int lane = threadIdx.x & 31, gid = lane >> 2;
  const real* scales = reinterpret_cast<const real*>(half + TILE * CODES);
  const float2 own = make_float2(to_float(scales[gid]), to_float(scales[gid + 8]));
  uint4 raw[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; i++) raw[i] = *reinterpret_cast<const uint4*>(half + (i * 32 + lane) * 16);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const int r = (i * 32 + lane) / (D / 16), c = (i * 32 + lane) % (D / 16) * 2;
    const uint4 x = raw[i];
    *reinterpret_cast<uint4*>(half + place(r, c)) = make_uint4(pair_of_codes(x.x, 0), pair_of_codes(x.x, 2), pair_of_codes(x.y, 0), pair_of_codes(x.y, 2));
    *reinterpret_cast<uint4*>(half + place(r, c + 1)) =
        make_uint4(pair_of_codes(x.z, 0), pair_of_codes(x.z, 2), pair_of_codes(x.w, 0), pair_of_codes(x.w, 2));
  }
  __syncwarp();
  return own;
}
#endif

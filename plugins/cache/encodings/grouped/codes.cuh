// Codes of keys and values: how they lie in pages and in shared memory, and how they become numbers.
//
// Built with -DD, -DBITS, -DINTEGERS, -DKEY_GROUP, -DVALUE_GROUP and -DBF16, as `attend.cu` is, and -DLISTED=1 where the two tiles of a step need not be
// neighbours.
// How codes lie in a tile: `layout.py`.
#pragma once
#include "common.cuh"

#ifndef LISTED
#define LISTED 0
#endif
#ifndef SINK
#define SINK 0
#endif
#ifndef INTEGERS
#define INTEGERS 0
#endif
#define STEP 32
#define WORDS (D * BITS / 64)                             // of a lane, of 16 tokens
#define VECTOR (WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1) // consecutive words of a lane
#define HALF_CODES (16 / BITS)                            // codes in half a word
#define TILE_BYTES (2 * D * BITS)                         // codes of 16 tokens
#define SHARE (D / VALUE_GROUP)
#define KEY_GROUPS (KEY_GROUP < STEP ? STEP / KEY_GROUP : LISTED ? 2 : 1) // of a step
#define TOKEN_SCALES (BITS == 8) // no minima
#define FLOATING (BITS == 8 && !INTEGERS)
#define KEY_META (TOKEN_SCALES ? 2 * STEP : KEY_GROUPS * 2 * D)
#define VALUE_META (TOKEN_SCALES ? 2 * STEP : STEP * 2 * SHARE)
#define META (TOKEN_SCALES ? 1 : 2) // scale, minimum
#define KEYS_AT 0
#define VALUES_AT (2 * TILE_BYTES)
#define KEY_META_AT (4 * TILE_BYTES)
#define VALUE_META_AT (KEY_META_AT + META * KEY_META)
#define STEP_BYTES (VALUE_META_AT + META * VALUE_META)
#define RAW_KEY_META (TOKEN_SCALES ? 32 : 2 * D) // of a tile
#define RAW_VALUE_META (TOKEN_SCALES ? 32 : 32 * SHARE)
#define RAW_KEYS (TILE_BYTES + META * RAW_KEY_META)
#define RAW_VALUES (TILE_BYTES + META * RAW_VALUE_META)

#ifdef BF16
#define MAGIC 0x43004300u // 128, with seven bits behind it
#define MAGIC_VALUE 128
#define BYTE_UNIT 1.f // by which `numbers` divides integers of eight bits
#define FIT (BITS == 2 ? 3 : 1) // codes whose bits lie within the mantissa
typedef __nv_bfloat162 real2;
__device__ __forceinline__ real2 both(float x) { return __float2bfloat162_rn(x); }
#else
#define MAGIC 0x64006400u // 1024
#define MAGIC_VALUE 1024
#define BYTE_UNIT 128.f // products with small scales stay within half precision
#define FIT (BITS == 8 ? 1 : BITS == 2 ? 5 : 2)
typedef __half2 real2;
__device__ __forceinline__ real2 both(float x) { return __float2half2_rn(x); }
#endif
__device__ __forceinline__ real2 as_pair(u32 x) { return *reinterpret_cast<real2*>(&x); }
__device__ __forceinline__ u32 bits_of(real2 x) { return *reinterpret_cast<u32*>(&x); }
__device__ __forceinline__ u32 times(u32 x, u32 y) { return bits_of(__hmul2(as_pair(x), as_pair(y))); }

// Codes go to the products less CENTRE, and minima as the number that it stands for: what is rounded on the way is then as small as keys and values are.
#define CENTRE (1 << (BITS - 1))
__device__ __forceinline__ u32 centred(u32 minimum, u32 scale) { return bits_of(__hfma2(as_pair(scale), both(CENTRE), as_pair(minimum))); }

// Code i of the word's two halves as two numbers, less CENTRE where codes are integers, and of eight bits over BYTE_UNIT; i is a constant after
// unrolling. magic is MAGIC, but not as a constant: an instruction takes one, the mask.
__device__ __forceinline__ u32 numbers(u32 word, int i, u32 magic) {
#if FLOATING
  const u32 x = i ? word : word << 8;
#ifdef BF16
  return (x & 0x80008000u) | ((x & 0x7f007f00u) >> 4);
#else
  return (x & 0x80008000u) | ((x & 0x7f007f00u) >> 1);
#endif
#elif BITS == 8 && defined(BF16) // seven bits fit behind 128; the eighth says whether 128 or 256 is subtracted
  const u32 x = i ? word >> 8 : word;
  return bits_of(__hfma2(as_pair((x & 0x007f007fu) | magic), both(1.f), as_pair((x & 0x00800080u) ^ 0xc380c380u)));
#else
  const int place = i % FIT * BITS;
  const u32 x = ((word >> (i / FIT * FIT * BITS)) & (((1u << BITS) - 1) * 0x00010001u << place)) | magic;
  const float unit = 1.f / (BITS == 8 ? BYTE_UNIT : 1 << place);
  return bits_of(__hfma2(as_pair(x), both(unit), both(-MAGIC_VALUE * unit - (BITS == 8 ? 1 : CENTRE))));
#endif
}
// The number of code i of half a word, for the few tokens between codes and residual.
__device__ __forceinline__ float number(u32 half, int i) {
#if FLOATING
  const u32 byte = half >> (8 * i) & 0xff;
  return __half2float(__ushort_as_half((u16)((byte & 0x80) << 8 | (byte & 0x7f) << 7))) * 256.f;
#else
  return (float)(half >> (BITS * i) & ((1 << BITS) - 1)) - (BITS == 8 ? CENTRE : 0);
#endif
}
__device__ __forceinline__ int word_at(int word, int lane) { return (word / VECTOR * 32 + lane) * VECTOR + word % VECTOR; }

__device__ __forceinline__ void read_words(u32 (&w)[WORDS], const char* tile) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < WORDS; i += VECTOR) {
    const char* at = tile + 4 * word_at(i, lane);
#if WORDS % 4 == 0
    const uint4 v = *reinterpret_cast<const uint4*>(at);
    w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
#elif WORDS % 2 == 0
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    w[i] = v.x, w[i + 1] = v.y;
#else
    w[i] = *reinterpret_cast<const u32*>(at);
#endif
  }
}

// The encoded pages of a key-value head; row is the place of a token among the rows of the pool.
struct Codes {
  const char *key_codes, *key_scale, *key_minimum, *value_codes, *value_scale, *value_minimum;

  static __device__ __forceinline__ void copy(u32 to, const char* from, int bytes, int lane) {
#pragma unroll
    for (int i = lane * 16; i < bytes; i += 512) copy16(to + i, from + i);
  }
  static __device__ __forceinline__ void copy_two(u32 to, const char* first, const char* second, int bytes, int lane) {
#pragma unroll
    for (int i = lane * 16; i < 2 * bytes; i += 512) copy16(to + i, i < bytes ? first + i : second + i - bytes);
  }
  __device__ __forceinline__ void fetch(u32 to, long long row) const {
    const int lane = threadIdx.x & 31;
    copy(to + KEYS_AT, key_codes + row * (D * BITS / 8), 2 * TILE_BYTES, lane);
    copy(to + VALUES_AT, value_codes + row * (D * BITS / 8), 2 * TILE_BYTES, lane);
#if TOKEN_SCALES
    copy_two(to + KEY_META_AT, key_scale + row * 2, value_scale + row * 2, KEY_META, lane);
#else
    const long long group = row / KEY_GROUP * (2 * D), token = row * (2 * SHARE);
    copy_two(to + KEY_META_AT, key_scale + group, key_minimum + group, KEY_META, lane);
    copy_two(to + VALUE_META_AT, value_scale + token, value_minimum + token, VALUE_META, lane);
#endif
  }
  // The two tiles of a step that need not be neighbours; each has a place of its own for what its group of keys shares.
  __device__ __forceinline__ void fetch_tiles(u32 to, long long first, long long second) const {
    const int lane = threadIdx.x & 31;
    const long long bytes = D * BITS / 8;
    copy_two(to + KEYS_AT, key_codes + first * bytes, key_codes + second * bytes, TILE_BYTES, lane);
    copy_two(to + VALUES_AT, value_codes + first * bytes, value_codes + second * bytes, TILE_BYTES, lane);
#if TOKEN_SCALES
    copy_two(to + KEY_META_AT, key_scale + first * 2, key_scale + second * 2, STEP, lane);
    copy_two(to + VALUE_META_AT, value_scale + first * 2, value_scale + second * 2, STEP, lane);
#else
    const long long own = first / KEY_GROUP * (2 * D), other = second / KEY_GROUP * (2 * D);
    copy_two(to + KEY_META_AT, key_scale + own, key_scale + other, 2 * D, lane);
    copy_two(to + KEY_META_AT + KEY_META, key_minimum + own, key_minimum + other, 2 * D, lane);
    copy_two(to + VALUE_META_AT, value_scale + first * (2 * SHARE), value_scale + second * (2 * SHARE), STEP * SHARE, lane);
    copy_two(to + VALUE_META_AT + VALUE_META, value_minimum + first * (2 * SHARE), value_minimum + second * (2 * SHARE), STEP * SHARE, lane);
#endif
  }
  // Channels 8 chunk to 8 chunk + 7 of a token's key and value; here all pointers are to shared memory.
  __device__ __forceinline__ uint4 key(long long row, int chunk) const {
    const u32* words = reinterpret_cast<const u32*>(key_codes + row / 16 * TILE_BYTES);
    const int token = row & 15, i = (chunk >> 1) * 4 + (chunk & 1) * 2 + (token >> 3);
    u32 word[4], made[4];
#pragma unroll
    for (int tig = 0; tig < 4; tig++) word[tig] = words[word_at(i / HALF_CODES, (token & 7) * 4 + tig)];
#if TOKEN_SCALES
    const float scale = to_float(reinterpret_cast<const real*>(key_scale)[row]);
#pragma unroll
    for (int tig = 0; tig < 4; tig++)
      made[tig] = pack_real(number(word[tig], i % HALF_CODES) * scale, number(word[tig] >> 16, i % HALF_CODES) * scale);
#else
    const long long group = row / KEY_GROUP * D;
    const u32* scales = reinterpret_cast<const u32*>(key_scale + 2 * (group + (chunk >> 2) * 32 + (chunk & 3) * 2));
    const uint4 low = *reinterpret_cast<const uint4*>(key_minimum + 2 * (group + chunk * 8));
    u32 scale[4];
    const u32 lows[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int tig = 0; tig < 4; tig++) scale[tig] = scales[4 * tig];
#pragma unroll
    for (int tig = 0; tig < 4; tig++) {
      const real2 by = as_pair(scale[tig]), from = as_pair(lows[tig]);
      made[tig] = pack_real(number(word[tig], i % HALF_CODES) * to_float(by.x) + to_float(from.x),
                            number(word[tig] >> 16, i % HALF_CODES) * to_float(by.y) + to_float(from.y));
    }
#endif
    return make_uint4(made[0], made[1], made[2], made[3]);
  }
  __device__ __forceinline__ uint4 value(long long row, int chunk) const {
    const u32* words = reinterpret_cast<const u32*>(value_codes + row / 16 * TILE_BYTES);
    const int token = row & 15, tig = (token & 7) >> 1, shift = 16 * (token & 1), i = ((token >> 3) * (D / 16) + (chunk >> 1)) * 2 + (chunk & 1);
    u32 word[8];
#pragma unroll
    for (int gid = 0; gid < 8; gid++) word[gid] = words[word_at(i / HALF_CODES, gid * 4 + tig)];
#if TOKEN_SCALES
    const float scale = to_float(reinterpret_cast<const real*>(value_scale)[row]), low = 0.f;
#else
    const long long tile = row / 16 * (16 * SHARE);
    const int group = chunk * 8 / VALUE_GROUP;
    const float scale = to_float(reinterpret_cast<const real*>(value_scale)[tile + (group * 4 + tig) * 4 + (token >> 3) * 2 + (token & 1)]);
    const float low = to_float(reinterpret_cast<const real*>(value_minimum)[tile + group * 16 + token]);
#endif
    u32 made[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      made[k] = pack_real(number(word[2 * k] >> shift, i % HALF_CODES) * scale + low, number(word[2 * k + 1] >> shift, i % HALF_CODES) * scale + low);
    return make_uint4(made[0], made[1], made[2], made[3]);
  }
};

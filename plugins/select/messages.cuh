// What the blocks of a row send each other through global memory.
//
// A word is twelve bytes and the launch's stamp, written and read as one: who sees the stamp has the bytes, so there is no barrier, no fence and nothing
// to clear. Every block of the grid must be resident (a cooperative launch). Built as pooling.cuh says.
#pragma once
#include "common.cuh"

#define BINS 256                        // of the first count
#define DIGIT 64                        // bins of every further one
#define WORDS_OF(bins) (((bins) + 5) / 6) // words of six counts
#define ROUNDS 11                       // further counts: six bits of the key, then sixty of score and unit
#define MOST_TIED 512                       // candidates that blocks send each other
#define COMPARED 96                     // candidates of which each is compared with all
#define MESSAGE_WORDS (HEADS + WORDS_OF(BINS) + WORDS_OF(DIGIT) * ROUNDS) // a block of a row; MOST_TIED words a row beside

__device__ __forceinline__ void send(uint4* to, u32 a, u32 b, u32 c, u32 stamp) {
  const u64 low = (u64)b << 32 | a, high = (u64)stamp << 32 | c;
  asm volatile("{.reg .b128 v;\n mov.b128 v,{%1,%2};\n st.relaxed.gpu.global.b128 [%0],v;}" ::"l"(to), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ uint4 poll(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v;\n ld.relaxed.gpu.global.b128 v,[%2];\n mov.b128 {%0,%1},v;}" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ __forceinline__ uint4 receive(const uint4* from, u32 stamp) {
  uint4 v = poll(from);
  while (v.w != stamp) v = poll(from);
  return v;
}

// Messages of a row with `blocks` blocks; every part is [blocks, words].
struct Messages {
  uint4* words;
  int blocks, rank;
  u32 stamp;
  __device__ __forceinline__ uint4* part(int head, int block) const { return words + head * blocks + block; }
  __device__ __forceinline__ uint4* bins() const { return words + HEADS * blocks; }
  __device__ __forceinline__ uint4* round(int i) const { return bins() + (WORDS_OF(BINS) + i * WORDS_OF(DIGIT)) * blocks; }
  __device__ __forceinline__ uint4* list() const { return round(ROUNDS); } // [MOST_TIED]
};

// What a block tells about its share goes out at once, from one thread a head.
__device__ __forceinline__ void send_part(const Messages& messages, int head, float4 part) {
  send(messages.part(head, messages.rank), __float_as_uint(part.y), __float_as_uint(part.z), __float_as_uint(part.x), messages.stamp);
}

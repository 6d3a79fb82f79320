// Bytes that a later kernel will read, brought into the second-level cache while the memory would idle. A hint: nothing waits for it.
#pragma once

__device__ __forceinline__ void ask_for(const char* span, unsigned int bytes) { // both multiples of 16
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(span), "r"(bytes) : "memory");
#endif
}
// The share of `part` among `parts` of a span; one thread calls it.
__device__ __forceinline__ void fetch_ahead(const char* span, unsigned int bytes, unsigned int part, unsigned int parts) {
  const unsigned int share = ((bytes + parts - 1) / parts + 15) / 16 * 16, from = part * share;
  if (from < bytes) ask_for(span + from, min(share, bytes - from));
}

// What a captured step needs from the host, from the block that the host has staged for it. Built with -DTHREADS.
#include "common.cuh"

// One block: what the host has staged for this step, to its addresses. staged [blocks, words] may be pinned host memory, which is read past the caches;
// turn [1] says which block is next and is counted on. Words ids_at to ids_at + batch are ids, where negative what the slot chose last; slots stand at
// slots_at, and at grown_at columns of the page table [batch, width], or -1, with the pages that stand there from now on behind them.
extern "C" __global__ void __launch_bounds__(THREADS) fetch(const volatile int* staged, int* block, int* turn, const int* last, int* table, int blocks,
    int words, int ids_at, int slots_at, int grown_at, int batch, int width) {
  constexpr int AT_ONCE = 4; // a read takes more than a microsecond
  wait_for_input();
  const int now = *turn;
  const volatile int* from = staged + (long long)now * words;
  for (int base = threadIdx.x; base < words; base += AT_ONCE * THREADS) {
    int values[AT_ONCE], beside[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = base + k * THREADS, id = i - ids_at, gain = i - grown_at;
      if (i >= words) continue;
      values[k] = from[i];
      if (id >= 0 && id < batch) beside[k] = from[slots_at + id];
      if (gain >= 0 && gain < batch) beside[k] = from[i + batch];
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = base + k * THREADS, id = i - ids_at, gain = i - grown_at;
      if (i >= words) continue;
      if (last && id >= 0 && id < batch && values[k] < 0) values[k] = last[beside[k]];
      block[i] = values[k];
      if (gain >= 0 && gain < batch && values[k] >= 0) table[(long long)gain * width + values[k]] = beside[k];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *turn = now + 1 == blocks ? 0 : now + 1;
}

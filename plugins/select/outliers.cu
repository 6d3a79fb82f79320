// ShadowKV's outliers: of every key-value head, the likeness up to which a page is among the least alike, and the highest index that still belongs.
//
// Built with -DPER_PAGE (summaries in a page of the cache). One block a head. The exact cut (likeness ascending, index ascending on ties): even bins
// of the likeness, then the pages of the bin that holds the cut are ranked. Where they are too many, three more looks at eleven, eleven and ten bits
// of the order-preserving image find the cut in the bin.
typedef unsigned int u32;

#define THREADS 1024
#define BINS 2048
#define CANDIDATES 1024
#define HELD 16 // pages a thread keeps in registers; more are read again in every look

__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Order-preserving image of a float; pages.cu compares with the same.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ int even_bin(float likeness) { return min(BINS - 1, max(0, (int)((likeness + 1.f) * (BINS / 2)))); }

// Inclusive prefix sum over the block.
__device__ __forceinline__ int block_scan(int v, int* warp_sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto scan = [lane](int x) {
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int y = __shfl_up_sync(~0u, x, o);
      if (lane >= o) x += y;
    }
    return x;
  };
  v = scan(v);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = v;
  __syncthreads();
  const int own = warp_sums[lane];
  return v + __shfl_sync(~0u, scan(own) - own, warp);
}

// likeness [P, Hk, PER_PAGE] fp32; table [B, table_stride]; lens [B]; grid [Hk, B]. Writes cut [B, Hk]: order-preserving image, index.
extern "C" __global__ void __launch_bounds__(THREADS) outlier_cut(const float* likeness, const int* table, const int* lens, uint2* cut, int table_stride,
    int unit, int outliers, int budget) {
  __shared__ int hist[BINS];
  __shared__ int warp_sums[32];
  __shared__ int3 found; // bin, pages below it, pages in it
  __shared__ uint2 list[CANDIDATES];
  __shared__ int listed;
  const int tid = threadIdx.x, head = blockIdx.x, heads = gridDim.x, b = blockIdx.y;
  const int stored = lens[b], pages = stored / unit;
  const int* own = table + (long long)b * table_stride;
  dependency_wait();
  if (stored <= budget) return;
  uint2* to = cut + (long long)b * heads + head;
  if (pages <= outliers) {
    if (tid == 0) *to = make_uint2(~0u, 0x7fffffffu);
    return;
  }
  auto read = [&](int u) { return likeness[((long long)own[u / PER_PAGE] * heads + head) * PER_PAGE + u % PER_PAGE]; };
  float held[HELD];
  {
    int page[HELD]; // all numbers, then all likenesses are under way at once; behind the end those of the last page
#pragma unroll
    for (int i = 0; i < HELD; i++) page[i] = own[(u32)min(i * THREADS + tid, pages - 1) / PER_PAGE];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      held[i] = likeness[((long long)page[i] * heads + head) * PER_PAGE + (u32)min(i * THREADS + tid, pages - 1) % PER_PAGE];
    }
  }

  if (tid == 0) listed = 0;
  int wanted = outliers, even = 0;
  u32 prefix = 0;
  for (int look = 0; look < 4; look++) {
    const int bits = look == 3 ? 10 : 11, shift = look == 1 ? 21 : look == 2 ? 10 : 0;
    for (int i = tid; i < BINS; i += THREADS) hist[i] = 0;
    __syncthreads();
    auto count = [&](float x) {
      if (look == 0) {
        atomicAdd(&hist[even_bin(x)], 1);
      } else if (even_bin(x) == even) {
        const u32 key = ordered(x);
        if (look == 1 || key >> ((shift + bits) & 31) == prefix) atomicAdd(&hist[(key >> shift) & ((1 << bits) - 1)], 1);
      }
    };
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if (i * THREADS + tid < pages) count(held[i]);
    }
    for (int u = HELD * THREADS + tid; u < pages; u += THREADS) count(read(u));
    __syncthreads();
    const int a = hist[2 * tid], c = hist[2 * tid + 1], before = block_scan(a + c, warp_sums) - a - c;
    if (before < wanted && before + a >= wanted) found = make_int3(2 * tid, before, a);
    else if (before + a < wanted && before + a + c >= wanted) found = make_int3(2 * tid + 1, before + a, c);
    __syncthreads();
    wanted -= found.y;
    if (look > 0) {
      prefix = look == 1 ? found.x : prefix << bits | found.x;
      continue;
    }
    even = found.x;
    if (found.z > CANDIDATES) continue;
    auto collect = [&](float x, int u) {
      if (even_bin(x) == even) list[atomicAdd(&listed, 1)] = make_uint2(ordered(x), u);
    };
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if (i * THREADS + tid < pages) collect(held[i], i * THREADS + tid);
    }
    for (int u = HELD * THREADS + tid; u < pages; u += THREADS) collect(read(u), u);
    __syncthreads();
    if (tid >= found.z) return;
    const uint2 mine = list[tid];
    int better = 0;
    for (int i = 0; i < found.z; i++) better += list[i].x < mine.x || (list[i].x == mine.x && list[i].y < mine.y);
    if (better == wanted - 1) *to = mine;
    return;
  }
  if (found.z == wanted) { // all of this likeness
    if (tid == 0) *to = make_uint2(prefix, 0x7fffffffu);
    return;
  }
  const int each = (pages + THREADS - 1) / THREADS, from = min(pages, tid * each), until = min(pages, from + each);
  int mine = 0;
  for (int u = from; u < until; u++) mine += ordered(read(u)) == prefix;
  int before = block_scan(mine, warp_sums) - mine;
  if (before >= wanted || before + mine < wanted) return;
  for (int u = from; u < until; u++) {
    if (ordered(read(u)) == prefix && ++before == wanted) {
      *to = make_uint2(prefix, u);
      return;
    }
  }
}

// Scores and exact top-k in one launch for few rows: one thread-block cluster a key-value head, scores never leave its shared memory.
//
// Built with -DD (head dimension, multiple of 32), -DGROUP_HEADS (G <= 8), -DPOOL (0: mean of softmaxes, 1: mean, 2: maximum, 3: maximum of
// softmaxes), -DCLUSTER (1 to 16), -DPAGE (0: FIER's one-bit keys in the order of fier.cu, otherwise bounds of pages of so many tokens) and -DBF16.
//
// Every block scores a contiguous share of the units. Softmaxes: exponentials over the warp's reference stay as bf16, the cluster exchanges the
// normalizers, and a unit is ranked by the fp32 sum over its heads. Then every block's histogram of 1024 bins goes to all; the bin with the last
// wanted unit is ranked by score and index, after further digits where it is crowded. Blocks only write into each other, by stores that the
// receiver's mbarrier counts: three exchanges, nothing is read back over the cluster.
#if PAGE == 0
#include "fused_fier.cuh"
#else
#include "fused_pages.cuh"
#endif
#include "fused_rank.cuh"

// q [B, q_stride] the rotated queries; index the bits [P, Hk, N / 32, D] and meta fp16 [P, Hk, N / 32, 2, D], or the bounds [P, Hk, N / PAGE, 2, D]
// and null; per_page their number a page of the table; table [B, table_stride]; lens [B] stored tokens. Writes out [B, Hk, width + 1]: ascending
// units, then their count, -1 everywhere where the sequence is read whole; and the pooled scores [B, Hk, pooled_stride] fp32 unless pooled is null.
// room: units of a block that shared memory holds. pool_keys, pool_values [P, Hk, N, D]: what will be attended to, or null.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fused_select(const qtype* q, const char* index, const char* meta, const int* table,
    const int* lens, int* out, float* pooled, const char* pool_keys, const char* pool_values, int q_stride, int table_stride, int per_page,
    int pooled_stride, int budget, int width, int sink, int window, int room, float scale_log2) {
  extern __shared__ __align__(128) char dynamic[];
  const int rank = CLUSTER > 1 ? blockIdx.x : 0, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z, tid = threadIdx.x;
  if (tid == 0) {
    prepare_exchanges();
    expected(0, CLUSTER * (RAW ? 1 : GROUP_HEADS) * 8);
    expected(1, CLUSTER * BINS * 2);
  }
  __syncwarp();
  cluster_begin(); // others may write here once every block has begun
  MARK(0)
  const long long line = (long long)b * heads + head;
  out += line * (width + 1);
  const int first = (sink + UNIT - 1) / UNIT;
  int last, wanted, units;
  Row row = {table + (long long)b * table_stride, lens + b, head, heads, rank, 0, per_page, 0, 0, 0, first, 0, reinterpret_cast<int*>(dynamic)};
  // Values: exponentials of G heads, or the keys themselves. Behind them the ring, later keys and histograms.
  const int stride = room + 16;
  char* values = dynamic + (PAGE ? room * 4 : room / 8); // behind the places
  char* ring = values + (RAW ? 0 : (2 * GROUP_HEADS * stride + 127) / 128 * 128);
  u32* keys = reinterpret_cast<u32*>(ring);
  if (RAW) ring += room * 4;
  uint4* slots = reinterpret_cast<uint4*>(RAW ? ring : ring + room * 4);
  for (int i = tid; i < BINS; i += THREADS) hist[i] = 0;
  if (tid == 0) before = 0, own_count = 0;
  do {
    const int stored = row.stored = load_fresh(row.length), closed = stored / GROUP * GROUP;
    row.usable = closed / UNIT, units = (stored + UNIT - 1) / UNIT;
    last = row.last = max(first, min(closed, stored - window) / UNIT);
    wanted = width - first - (units - last);
    if (stored <= budget || wanted >= last - first || wanted <= 0) { // everything, every unit, or nothing but the forced ones
      dependency_wait();
      if (!unchanged(row, load_fresh(row.length))) continue;
      const int gap = wanted <= 0 ? last - first : 0, count = stored <= budget ? -1 : min(units - gap, width);
      for (int i = rank * THREADS + tid; i <= width; i += CLUSTER * THREADS) out[i] = i == width ? count : i >= count ? -1 : i < first ? i : i + gap;
      cluster_wait();
      return;
    }
    const int chunks = (row.usable + 31) >> 5, per = (chunks + CLUSTER - 1) / CLUSTER * 32;
    row.begin = rank * per, row.units = max(0, min(per, row.usable - row.begin));
    if (score(row, q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, index, meta, ring, values, stride, scale_log2)) break;
  } while (true);
  MARK(4)
  cluster_wait();
  normalize(rank);
  MARK(5)
  Binning binning = {limits.x, limits.y, 0};
  binning.offset = (int)(__float_as_uint((POOL == 3 ? (float)GROUP_HEADS : 1.f) / (float)wanted) >> 18) - (BINS - 2);
  int turn = 0;
  count(row, values, stride, keys, binning, pooled ? pooled + line * pooled_stride : nullptr);
  const Cut found = rank_units(row, keys, slots, binning, wanted, turn);
  MARK(9)
  emit(row, keys, binning, found.bin, out + first, pool_keys, pool_values, turn);
  for (int i = rank * THREADS + tid; i < first; i += CLUSTER * THREADS) out[i] = i;
  for (int i = rank * THREADS + tid; i < units - last; i += CLUSTER * THREADS) out[first + wanted + i] = last + i;
  if (rank == 0 && tid == 0) out[width] = first + wanted + units - last;
  MARK(10)
}

// Exact top-k of pooled scores, one thread-block cluster a key-value head: score descending, index ascending on ties, ascending output.
//
// Built with -DCLUSTER (1 to 16), -DHEADS (scored heads a row: 1 ranks raw scores, more pool their softmaxes), -DMAXIMUM (pool by maximum
// instead of mean), -DUNIT (tokens of a unit) and -DGROUP (tokens that are summarized together).
//
// Every block keeps a 16-bit monotone key of its share of the units in shared memory. One histogram of the upper 12 bits, summed over the
// cluster, leaves a bin of candidates; a second of the lower 4 bits splits it where it is crowded. The candidates' exact scores are computed
// again and ranked. Should more than CANDIDATES still share a 16-bit key, the cut is found by bisection over score and index.
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;

#ifndef THREADS
#define THREADS 1024
#endif
#define EACH (BINS / THREADS) // bins a thread looks through
#define BINS 4096
#define CANDIDATES 1024
#define CROWD 192

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// Wait for the kernels before this one, then let the one behind start its preamble: it may read what was written before the kernel before it.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// The same shared variable of another block of the cluster.
template <typename T> __device__ __forceinline__ T* peer(T* p, int rank) {
#if CLUSTER > 1
  T* there;
  asm("mapa.u64 %0,%1,%2;" : "=l"(there) : "l"(p), "r"(rank));
  return there;
#else
  return p;
#endif
}
__device__ __forceinline__ void load_halves(u32 (&v)[4], const __half* p) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_halves(u32 (&v)[1], const __half* p) {
  asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(v[0]) : "l"(p) : "memory");
}
// Order-preserving image of a float.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Scale {
  float low, factor;
};

// Pooled score of 2 N units: h their halves minus the part's reference, c what is added to it.
template <int N> __device__ __forceinline__ void pool(const u32 (&h)[HEADS][N], const float* c, float (&out)[2 * N]) {
#pragma unroll
  for (int j = 0; j < HEADS; j++) {
    const float add = c[j];
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&h[j][k]));
      float x = f.x + add, y = f.y + add;
      if (HEADS > 1) {
        x = exp2_fast(x), y = exp2_fast(y);
        if (j > 0) {
          x = MAXIMUM ? fmaxf(out[2 * k], x) : out[2 * k] + x;
          y = MAXIMUM ? fmaxf(out[2 * k + 1], y) : out[2 * k + 1] + y;
        }
      }
      out[2 * k] = x, out[2 * k + 1] = y;
    }
  }
}
__device__ __forceinline__ float pool1(const __half* scores, long long stride, const float* c) {
  float out = 0.f;
#pragma unroll
  for (int j = 0; j < HEADS; j++) {
    float x = __half2float(scores[j * stride]) + c[j];
    if (HEADS > 1) x = exp2_fast(x);
    out = j == 0 ? x : MAXIMUM ? fmaxf(out, x) : out + x;
  }
  return out;
}
__device__ __forceinline__ u32 key_of(float score, Scale scale) {
  if (HEADS > 1) return min(__float_as_uint(score) >> 14, 65534u) + 1; // a pooled softmax is in [0, 1]: nine bits of mantissa
  return (u32)fminf(fmaxf((score - scale.low) * scale.factor, 0.f), 65534.f) + 1;
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
// Inclusive prefix sum over the block; the two halves of warp_sums [64] are used in turn, so that one barrier is enough.
__device__ __forceinline__ int block_scan(int v, int* warp_sums, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  v = warp_scan(v);
  int* sums = warp_sums + turn * 32;
  turn ^= 1;
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  const int own = lane < THREADS / 32 ? sums[lane] : 0;
  return v + __shfl_sync(~0u, warp_scan(own) - own, warp);
}
struct Cut {
  int bin, above, count; // bin of the wanted-th unit, units in higher bins, units in it
};
// Look through the bins from the top for the one with the wanted-th unit; bin -1 where there are fewer.
__device__ __forceinline__ void find_cut(const int* bins, int wanted, Cut* found, int* warp_sums, int& turn) {
  const int top = BINS - EACH - threadIdx.x * EACH;
  int each[EACH], mine = 0;
#pragma unroll
  for (int i = 0; i < EACH; i += 4) *reinterpret_cast<int4*>(each + i) = *reinterpret_cast<const int4*>(bins + top + i);
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += each[i];
  int seen = block_scan(mine, warp_sums, turn) - mine;
  if (seen < wanted && seen + mine >= wanted) {
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
      if (seen < wanted && seen + each[i] >= wanted) *found = {top + i, seen, each[i]};
      seen += each[i];
    }
  }
  __syncthreads();
}
#ifdef TRACE
extern "C" __device__ long long trace[64 * 32];
#define MARK(i) if (threadIdx.x == 0 && blockIdx.x < 64) trace[blockIdx.x * 32 + i] = clock64();
#else
#define MARK(i)
#endif

// What a block knows of its row.
struct Share {
  const __half* scores; // of the row
  long long stride;     // between heads
  int begin, units;     // first unit of this block and their number, multiples of 32
  int usable, first, last, wanted;
  int part_units;       // units of a part
  u16* keys;            // [units]
  u32* exact;           // [units] order-preserving scores, or null: then they are computed again
  float* add;           // [parts, HEADS]
};
__device__ __forceinline__ u32 exact_score(const Share& share, int u) {
  if (share.exact) return share.exact[u - share.begin];
  return ordered(pool1(share.scores + u, share.stride, share.add + u / share.part_units * HEADS));
}

// Loads packets of 2 N units a thread: the first while the normalizers are summed, the next while the last is counted.
template <int N> struct Packets {
  u32 h[HEADS][N];
  __device__ __forceinline__ void load(const Share& share, int at) {
    const int u = share.begin + at;
    if (at < share.units && u < share.usable) {
#pragma unroll
      for (int j = 0; j < HEADS; j++) load_halves(h[j], share.scores + j * share.stride + u);
    }
  }
  // Keys of all units of the block, and how many have which upper bits.
  __device__ __forceinline__ void count(const Share& share, Scale scale, int* hist) {
    int part = (share.begin + (int)threadIdx.x * 2 * N) / share.part_units;
    for (int at = threadIdx.x * 2 * N; at < share.units; at += THREADS * 2 * N) {
      const int u = share.begin + at;
      u32 key[2 * N];
#pragma unroll
      for (int k = 0; k < 2 * N; k++) key[k] = 0;
      if (u < share.usable) {
        while (u >= (part + 1) * share.part_units) part++;
        float pooled[2 * N];
        pool<N>(h, share.add + part * HEADS, pooled);
        load(share, at + THREADS * 2 * N);
#pragma unroll
        for (int k = 0; k < 2 * N; k++) {
          if (u + k >= share.first && u + k < share.last) {
            key[k] = key_of(pooled[k], scale);
            atomicAdd(&hist[key[k] >> 4], 1);
          }
          if (share.exact) share.exact[at + k] = ordered(pooled[k]);
        }
      }
      u32* to = reinterpret_cast<u32*>(share.keys + at);
      if (N == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(key[0] | key[1] << 16, key[2 % (2 * N)] | key[3 % (2 * N)] << 16,
            key[4 % (2 * N)] | key[5 % (2 * N)] << 16, key[6 % (2 * N)] | key[7 % (2 * N)] << 16);
      } else {
        to[0] = key[0] | key[1] << 16;
      }
    }
  }
};

__device__ __forceinline__ void run(const __half* scores, const float4* parts, int* out, int stored,
    long long score_stride, int num_parts, int width, int sink, int window, bool exact_units, char* dynamic) {
  __shared__ int hist[BINS];
#if CLUSTER > 1
  __shared__ __align__(16) int totals[BINS];
  uint2* all = reinterpret_cast<uint2*>(totals); // once the bins have been looked through
#else
  int* totals = hist;
#endif
  __shared__ int fine[16], warp_sums[64];
  __shared__ float row_low, lows[32];
  __shared__ uint2 own[CANDIDATES];
  __shared__ int2 counts; // of this block: candidates, units above them
  __shared__ int starts[CLUSTER + 1], before_all, lower, round_count[2];
  __shared__ Cut cut;
  __shared__ u32 cut_key, cut_index;
  int turn = 0;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const long long row = blockIdx.x / CLUSTER;

  const int closed = stored / GROUP * GROUP, usable = closed / UNIT, units = (stored + UNIT - 1) / UNIT;
  const int first = (sink + UNIT - 1) / UNIT;
  const int last = max(first, min(closed, stored - window) / UNIT);
  const int wanted = width - first - (units - last);
  if (wanted >= last - first || wanted <= 0) { // every unit, or nothing but the forced ones
    const int gap = wanted <= 0 ? last - first : 0, count = min(units - gap, width);
    for (int i = rank * THREADS + tid; i <= width; i += CLUSTER * THREADS) out[i] = i == width ? count : i >= count ? -1 : i < first ? i : i + gap;
    return;
  }

  const int packets = (usable + 7) >> 3, share = ((packets + CLUSTER * 4 - 1) / (CLUSTER * 4)) * 4; // packets of eight units, four a word of flags
  const int begin = rank * share;
  uint4* keys = reinterpret_cast<uint4*>(dynamic);                                        // [share] eight keys each
  u32* bitmap = reinterpret_cast<u32*>(keys + share);                                     // [share / 4]
  unsigned char* bytes = reinterpret_cast<unsigned char*>(bitmap);                        // [share]
  float* add = reinterpret_cast<float*>(bitmap + ((share / 4 + 3) & ~3));                 // [num_parts, HEADS]
  float* sums = add + num_parts * HEADS;                                                  // [num_parts, HEADS]
  u32* exact = exact_units ? reinterpret_cast<u32*>(sums + num_parts * HEADS) : nullptr; // [8 share]
  const Share mine_of = {scores + row * HEADS * score_stride, score_stride, begin * 8, share * 8, usable, first, last, wanted,
      (((usable + 31) >> 5) + num_parts - 1) / num_parts * 32, reinterpret_cast<u16*>(keys), exact, add};
  for (int i = tid; i < BINS; i += THREADS) hist[i] = 0;
  if (tid < 16) fine[tid] = 0;
  if (tid == 0) counts = make_int2(0, 0), lower = 0;

  parts += row * num_parts * HEADS;
  const bool narrow = share * 8 <= 4 * THREADS;
  Packets<4> wide_packets;
  Packets<1> narrow_packets;
  if (narrow) narrow_packets.load(mine_of, tid * 2);
  else wide_packets.load(mine_of, tid * 8);
  Scale scale = {0.f, 0.f};
  float lowest_part = 3e38f;
  for (int i = tid; i < num_parts * HEADS; i += THREADS) {
    const float4 v = parts[i];
    add[i] = v.x, sums[i] = v.y;
    lowest_part = fminf(lowest_part, v.z);
  }
  if (HEADS == 1) {
#pragma unroll
    for (int o = 16; o; o >>= 1) lowest_part = fminf(lowest_part, __shfl_xor_sync(~0u, lowest_part, o));
    if (lane == 0) lows[warp] = lowest_part;
  }
  __syncthreads();
  if (warp < HEADS) {
    float top = -3e38f, total = 0.f;
    for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, sums[p * HEADS + warp]);
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float zero = top; // raw scores: differences count at the top
    if (HEADS > 1) {
      for (int p = lane; p < num_parts; p += 32) total += exp2_fast(sums[p * HEADS + warp] - top);
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      zero += log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS));
    }
    for (int p = lane; p < num_parts; p += 32) add[p * HEADS + warp] -= zero;
    if (HEADS == 1) {
      float low = lane < THREADS / 32 ? lows[lane] : 3e38f;
#pragma unroll
      for (int o = 16; o; o >>= 1) low = fminf(low, __shfl_xor_sync(~0u, low, o));
      if (lane == 0) row_low = low - top;
    }
  }
  __syncthreads();
  if (HEADS == 1) scale.low = row_low, scale.factor = 65534.f / fmaxf(-row_low, 1e-30f);
  MARK(2)

  if (narrow) narrow_packets.count(mine_of, scale, hist);
  else wide_packets.count(mine_of, scale, hist);
  MARK(3)
  cluster_sync();
#if CLUSTER > 1
  // Every block sums its slice of the bins over the cluster and tells all.
  const int slice = (BINS + CLUSTER - 1) / CLUSTER;
  for (int bin = rank * slice + tid; bin < min(BINS, (rank + 1) * slice); bin += THREADS) {
    int sum = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += peer(hist, c)[bin];
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) peer(totals, c)[bin] = sum;
  }
  cluster_sync();
#endif
  MARK(4)
  find_cut(totals, wanted, &cut, warp_sums, turn);
  MARK(5)
  u32 from = max((u32)cut.bin << 4, 1u), to = (u32)cut.bin << 4 | 15; // candidates' keys; 0 is none
  int need = wanted - cut.above, crowd = cut.count;
  if (crowd > CROWD && crowd != need) {
    for (int p = tid; p < share; p += THREADS) {
      const uint4 v = keys[p];
      const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const u32 key = (w[k >> 1] >> ((k & 1) * 16)) & 0xffffu;
        if (key >= from && key <= to) atomicAdd(&fine[key & 15], 1);
      }
    }
    cluster_sync();
    if (warp == 0) {
      int sum = 0;
      if (lane < 16) {
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) sum += peer(fine, c)[15 - lane];
      }
      const int seen = warp_scan(sum) - sum;
      if (seen < need && seen + sum >= need) cut = {(int)((from & ~15u) | (15 - lane)), wanted - need + seen, sum};
    }
    __syncthreads();
    from = to = cut.bin, need = wanted - cut.above, crowd = cut.count;
  }

  // Mark what is above, collect candidates with their exact scores.
  const bool few = crowd <= CANDIDATES, whole = crowd == need;
  int above = 0;
  for (int p = tid; p < share; p += THREADS) {
    const uint4 v = keys[p];
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    u32 flags = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const u32 key = (w[k >> 1] >> ((k & 1) * 16)) & 0xffffu;
      if (key > to || (whole && key >= from)) {
        flags |= 1u << k;
      } else if (key >= from && few) {
        const int u = (begin + p) * 8 + k;
        own[atomicAdd(&counts.x, 1)] = make_uint2(exact_score(mine_of, u), u);
      }
    }
    bytes[p] = flags;
    above += __popc(flags);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) above += __shfl_xor_sync(~0u, above, o);
  if (lane == 0 && above) atomicAdd(&counts.y, above);
  MARK(6)
  cluster_sync();
  MARK(7)
  if (warp == 0) { // where everybody's candidates begin, and what lower blocks selected
    const int2 theirs = lane < CLUSTER ? *peer(&counts, lane) : make_int2(0, 0);
    const int end = warp_scan(theirs.x);
    int lower_above = lane < rank ? theirs.y : 0;
#pragma unroll
    for (int o = 16; o; o >>= 1) lower_above += __shfl_xor_sync(~0u, lower_above, o);
    if (lane <= CLUSTER) starts[lane] = end - theirs.x; // lane CLUSTER: all
    if (lane == 0) before_all = lower_above;
  }
  __syncthreads();
  int before = before_all; // selected units of lower blocks
  if (!whole && few) {
    const uint2* list = own;
#if CLUSTER > 1
    list = all;
    for (int i = tid; i < crowd; i += THREADS) {
      int c = 0;
#pragma unroll
      for (int k = 1; k < CLUSTER; k++) c += i >= starts[k];
      all[i] = peer(own, c)[i - starts[c]];
    }
    __syncthreads();
#endif
    MARK(8)
    // Eight lanes compare one candidate with all.
    for (int i = tid >> 3; i < ((crowd + 3) & ~3); i += THREADS / 8) {
      const uint2 a = i < crowd ? list[i] : make_uint2(0, 0);
      int better = 0;
      for (int k = tid & 7; k < crowd; k += 8) {
        const uint2 o = list[k];
        better += o.x > a.x || (o.x == a.x && o.y < a.y);
      }
      better += __shfl_xor_sync(~0u, better, 1), better += __shfl_xor_sync(~0u, better, 2), better += __shfl_xor_sync(~0u, better, 4);
      if (i < crowd && better == need - 1 && (tid & 7) == 0) cut_key = a.x, cut_index = a.y;
    }
    __syncthreads();
    const u32 lowest = (u32)begin * 8, behind = lowest + share * 8;
    int less = 0;
    for (int i = tid; i < crowd; i += THREADS) {
      const uint2 a = list[i];
      if (a.x > cut_key || (a.x == cut_key && a.y <= cut_index)) {
        if (a.y < lowest) less++;
        else if (a.y < behind) atomicOr(&bitmap[(a.y - lowest) >> 5], 1u << ((a.y - lowest) & 31));
      }
    }
    if (less) atomicAdd(&lower, less);
    __syncthreads();
    before += lower;
  } else if (!whole) {
    // Rare: bisect for the lowest score, then the highest index, that still belong; every round counts over the cluster.
    u32 key_from = 0, key_to = 0xffffffffu; // largest cut with count(score >= cut) >= need lies in [key_from, key_to]
    u32 index_from = 0, index_to = last;    // smallest bound with count(score == cut, index < bound) >= rest
    int rest = need;
    for (int round = 0; round < 64; round++) {
      const bool by_index = key_from == key_to;
      if (by_index && index_from == index_to) break;
      const u32 middle = by_index ? index_from + (index_to - index_from) / 2 : key_from + (key_to - key_from) / 2 + 1;
      int n = 0, over = 0;
      for (int p = tid; p < share; p += THREADS) {
        const uint4 v = keys[p];
        const u32 w[4] = {v.x, v.y, v.z, v.w};
        for (int k = 0; k < 8; k++) {
          const u32 key = (w[k >> 1] >> ((k & 1) * 16)) & 0xffffu;
          if (key < from || key > to) continue;
          const int u = (begin + p) * 8 + k;
          const u32 score = exact_score(mine_of, u);
          n += by_index ? score == key_from && u < middle : score >= middle;
          over += score > key_from;
        }
      }
      n = block_scan(n, warp_sums, turn);
      over = block_scan(over, warp_sums, turn);
      if (tid == THREADS - 1) round_count[0] = n, round_count[1] = over;
      cluster_sync();
      int sum = 0, sum_over = 0;
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) sum += peer(round_count, c)[0], sum_over += peer(round_count, c)[1];
      cluster_sync();
      if (!by_index) {
        if (sum >= need) key_from = middle;
        else key_to = middle - 1;
      } else {
        rest = need - sum_over;
        if (sum >= rest) index_to = middle;
        else index_from = middle + 1;
      }
    }
    int mine = 0;
    for (int p = tid; p < share; p += THREADS) {
      const uint4 v = keys[p];
      const u32 w[4] = {v.x, v.y, v.z, v.w};
      u32 flags = bytes[p];
      for (int k = 0; k < 8; k++) {
        const u32 key = (w[k >> 1] >> ((k & 1) * 16)) & 0xffffu;
        if (key < from || key > to) continue;
        const int u = (begin + p) * 8 + k;
        const u32 score = exact_score(mine_of, u);
        if (score > key_from || (score == key_from && u < index_to)) flags |= 1u << k, mine++;
      }
      bytes[p] = flags;
    }
    mine = block_scan(mine, warp_sums, turn);
    if (tid == THREADS - 1) round_count[0] = mine;
    cluster_sync();
    for (int c = 0; c < rank; c++) before += peer(round_count, c)[0];
  }
  MARK(9)
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); // nobody leaves while others read its memory
#endif

  const int each = (share + THREADS - 1) / THREADS, from_byte = min(share, tid * each), to_byte = min(share, from_byte + each);
  int mine = 0;
  for (int i = from_byte; i < to_byte; i++) mine += __popc(bytes[i]);
  int at = first + before + block_scan(mine, warp_sums, turn) - mine;
  for (int i = from_byte; i < to_byte; i++) {
    u32 flags = bytes[i];
    const int u = (begin + i) * 8;
    while (flags) {
      out[at++] = u + __ffs(flags) - 1;
      flags &= flags - 1;
    }
  }
  const int count = first + wanted + units - last; // == width
  for (int i = rank * THREADS + tid; i < first; i += CLUSTER * THREADS) out[i] = i;
  for (int i = first + wanted + rank * THREADS + tid; i < count; i += CLUSTER * THREADS) out[i] = last + i - first - wanted;
  if (rank == 0 && tid == 0) out[width] = count;
  MARK(10)
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Dynamic shared memory: 17 bytes a packet of eight units (share, of the longest row), 8 bytes a part and head, and with exact_units 32 a packet.
// scores [R, HEADS, score_stride] fp16 and parts [R, num_parts, HEADS] as a scorer leaves them, lens [B]. Writes out [R, width + 1]: ascending
// units, then their count; -1 everywhere where the sequence is read whole. Row r belongs to sequence r / rows_per_sequence.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) select_units(const __half* scores, const float4* parts, const int* lens,
    int* out, long long score_stride, int num_parts, int rows_per_sequence, int budget, int width, int sink, int window, int exact_units) {
  extern __shared__ __align__(16) char dynamic[];
  const int row = blockIdx.x / CLUSTER, stored = lens[row / rows_per_sequence];
  int* to = out + (long long)row * (width + 1);
  MARK(0)
  dependency_wait();
  MARK(1)
  if (stored <= budget) {
    for (int i = blockIdx.x % CLUSTER * THREADS + threadIdx.x; i <= width; i += CLUSTER * THREADS) to[i] = -1;
    return;
  }
  run(scores, parts, to, stored, score_stride, num_parts, width, sink, window, exact_units != 0, dynamic);
}

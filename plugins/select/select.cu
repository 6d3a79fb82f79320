// Exact top-k of pooled scores, one thread-block cluster a key-value head: score descending, index ascending on ties, ascending output.
//
// Where a block has many units, built with -DFILTER, filter.cuh leaves most of them out before they are counted; built with -DLISTED, a launch before has
// listed those that may be chosen (listed.cuh).
//
// Built as pooling.cuh says, with -DCLUSTER (1 to 16), -DUNIT (tokens of a unit) and -DGROUP (tokens that are summarized together).
//
// Every block keeps a 16-bit monotone key of its share of the units in shared memory. One histogram of the upper 12 bits, summed over the
// cluster, leaves a bin of candidates; a second of the lower 4 bits splits it where it has many ties. The candidates' exact scores are then
// ranked. Should more than CANDIDATES still share a 16-bit key, the cut is found by bisection over score and index.
#include "normalize.cuh"
#ifdef FILTER
#include "filter.cuh"
#endif
#ifdef LISTED
#include "listed.cuh"
#endif

#define BINS (4 * THREADS)
#define COARSE (BINS / 16)    // sums of sixteen bins: what the blocks of a cluster exchange
#define CANDIDATES 1024
#define MOST_TIED 192

struct Cut {
  int bin, above, count; // bin of the wanted-th unit, units in higher bins, units in it
};
struct Shared {
  __align__(16) int hist[BINS];
  __align__(16) u32 block_sums[COARSE]; // sums of bins of this block
  union {
    __align__(16) u32 coarse[16][COARSE]; // sums of bins of every block of the cluster, before
    struct {
      u32 all_scores[CANDIDATES], all_units[CANDIDATES]; // the candidates of the cluster
      uint2 own[CANDIDATES];                             // scores and units of this block's
    };
  };
  int fine[16], warp_sums[64];
  float row_low, lows[32];
  int2 counts; // of this block: candidates, units above them
  int starts[CLUSTER + 1], before, lower, round_count[2];
  Cut cut;
  u32 cut_score, cut_unit;
};

// Look through values [THREADS, N] of this thread, which stand for bins from `top` down, for the one with the wanted-th unit.
template <int N> __device__ __forceinline__ void find_cut(Shared& s, const int (&values)[N], int top, int wanted, int& turn) {
  int mine = 0;
#pragma unroll
  for (int i = 0; i < N; i++) mine += values[i];
  int seen = block_scan(mine, s.warp_sums, turn) - mine;
  if (seen < wanted && seen + mine >= wanted) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (seen < wanted && seen + values[i] >= wanted) s.cut = {top - i, seen, values[i]};
      seen += values[i];
    }
  }
  __syncthreads();
}

// The bin of the cluster's histograms with the wanted-th unit.
__device__ __forceinline__ void cut_cluster(Shared& s, int wanted, int rank, int& turn) {
  const int tid = threadIdx.x;
#if CLUSTER == 1
  __syncthreads();
  const int4 v = *reinterpret_cast<const int4*>(s.hist + BINS - 4 - tid * 4);
  const int values[4] = {v.w, v.z, v.y, v.x};
  find_cut<4>(s, values, BINS - 1 - tid * 4, wanted, turn);
#else
  __syncthreads();
  cluster_wait(); // every block has begun
  const int4 v = *reinterpret_cast<const int4*>(s.hist + tid * 4);
  int sum = v.x + v.y + v.z + v.w;
  sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
  if ((tid & 3) == 0) s.block_sums[tid >> 2] = sum;
  __syncthreads();
  constexpr int QUADS = COARSE / 4;
  const int quad = tid % QUADS, c = tid / QUADS; // two warps write to a block
  if (c < CLUSTER) *peer(reinterpret_cast<uint4*>(s.coarse[rank]) + quad, c) = *(reinterpret_cast<const uint4*>(s.block_sums) + quad);
  cluster_sync();
  int values[1] = {0};
  if (tid < COARSE) {
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) values[0] += s.coarse[c][COARSE - 1 - tid];
  }
  find_cut<1>(s, values, COARSE - 1 - tid, wanted, turn);
  if (tid < 32) { // the bins of that sum: two lanes a bin, from the highest on
    const int bin = s.cut.bin * 16 + 15 - (tid & 15), above = s.cut.above;
    int own = 0;
#pragma unroll
    for (int c = tid >> 4; c < CLUSTER; c += 2) own += peer(s.hist, c)[bin];
    own += __shfl_xor_sync(~0u, own, 16);
    const int seen = above + warp_scan(tid < 16 ? own : 0) - own;
    __syncwarp();
    if (tid < 16 && seen < wanted && seen + own >= wanted) s.cut = {bin, seen, own};
  }
  __syncthreads();
#endif
}

// Bring the candidates of all blocks together, and count what lower blocks have selected above them.
__device__ __forceinline__ void gather(Shared& s, int rank, bool listed) {
  const int tid = threadIdx.x, lane = tid & 31;
  if (CLUSTER == 1) return; // they are together
  constexpr int SLOTS = THREADS / CLUSTER; // candidates of a block that are fetched while their number is
  const int c = tid / SLOTS, slot = tid % SLOTS;
  uint2 first = make_uint2(0, 0);
  if (listed && c < CLUSTER) first = peer(s.own, c)[slot];
  if (tid < 32) {
    const int2 theirs = lane < CLUSTER ? *peer(&s.counts, lane) : make_int2(0, 0);
    const int end = warp_scan(theirs.x);
    int above = lane < rank ? theirs.y : 0;
#pragma unroll
    for (int o = 16; o; o >>= 1) above += __shfl_xor_sync(~0u, above, o);
    if (lane <= CLUSTER) s.starts[lane] = end - theirs.x; // lane CLUSTER: all
    if (lane == 0) s.before = above;
  }
  __syncthreads();
  if (!listed) return;
  if (c < CLUSTER) {
    const int start = s.starts[c], count = s.starts[c + 1] - start;
    for (int i = slot; i < count; i += SLOTS) {
      const uint2 v = i == slot ? first : peer(s.own, c)[i];
      s.all_scores[start + i] = v.x, s.all_units[start + i] = v.y;
    }
  }
  __syncthreads();
}

// Find the need-th best of the candidates: eight lanes compare one with all.
__device__ __forceinline__ void rank_candidates(Shared& s, int tied, int need) {
  const int tid = threadIdx.x;
  for (int i = tied + tid; i < ((tied + 31) & ~31); i += THREADS) s.all_scores[i] = 0; // below every score
  __syncthreads();
  for (int i = tid >> 3; i < ((tied + 3) & ~3); i += THREADS / 8) {
    const u32 own = i < tied ? s.all_scores[i] : 0;
    int better = 0, equal = 0;
    for (int k = (tid & 7) * 4; k < tied; k += 32) {
      const uint4 o = *reinterpret_cast<const uint4*>(s.all_scores + k);
      better += (o.x > own) + (o.y > own) + (o.z > own) + (o.w > own);
      equal += (o.x == own) + (o.y == own) + (o.z == own) + (o.w == own);
    }
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) better += __shfl_xor_sync(~0u, better, o), equal += __shfl_xor_sync(~0u, equal, o);
    if (i >= tied || (tid & 7) || better >= need || better + equal < need) continue;
    const u32 unit = s.all_units[i];
    for (int k = 0; equal > 1 && k < tied; k++) better += s.all_scores[k] == own && s.all_units[k] < unit;
    if (better == need - 1) s.cut_score = own, s.cut_unit = unit;
  }
  __syncthreads();
}

#include "ties.cuh"

// Mark what is chosen in bytes, a bit a unit; returns how much of it lies in lower blocks.
__device__ __forceinline__ int choose(Shared& s, const Share& share, int packets, int rank, u32* bitmap, int& turn) {
  const int tid = threadIdx.x, lane = tid & 31;
  unsigned char* bytes = reinterpret_cast<unsigned char*>(bitmap);
  u32 from = max((u32)s.cut.bin << 4, 1u), to = (u32)s.cut.bin << 4 | 15; // candidates' keys; 0 is none
  int need = share.wanted - s.cut.above, tied = s.cut.count;
  if (tied > MOST_TIED && tied != need) {
    split_bin(s, share, packets, from, share.wanted, need);
    from = to = s.cut.bin, need = share.wanted - s.cut.above, tied = s.cut.count;
  }
  const bool few = tied <= CANDIDATES, whole = tied == need;
  int above = 0;
  for (int p = tid; p < packets; p += THREADS) {
    u32 key[8], flags = 0;
    share.packet(p, key);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (key[k] > to || (whole && key[k] >= from)) {
        flags |= 1u << k;
      } else if (key[k] >= from && few) {
        const int u = share.begin + p * 8 + k, at = atomicAdd(&s.counts.x, 1);
        if (CLUSTER == 1) s.all_scores[at] = share.exact_score(u), s.all_units[at] = u;
        else s.own[at] = make_uint2(share.exact_score(u), u);
      }
    }
    bytes[p] = flags;
    above += __popc(flags);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) above += __shfl_xor_sync(~0u, above, o);
  if (lane == 0 && above) atomicAdd(&s.counts.y, above);
  MARK(6)
  cluster_sync();
  MARK(7)
  gather(s, rank, !whole && few);
  if (whole) return s.before;
  if (!few) return s.before + bisect(s, share, packets, from, to, need, rank, bytes, turn);
  rank_candidates(s, tied, need);
  MARK(8)
  const u32 lowest = share.begin, behind = lowest + share.units;
  int less = 0;
  for (int i = tid; i < tied; i += THREADS) {
    const u32 score = s.all_scores[i], unit = s.all_units[i];
    if (score > s.cut_score || (score == s.cut_score && unit <= s.cut_unit)) {
      if (unit < lowest) less++;
      else if (unit < behind) atomicOr(&bitmap[(unit - lowest) >> 5], 1u << ((unit - lowest) & 31));
    }
  }
  if (less) atomicAdd(&s.lower, less);
  __syncthreads();
  return s.before + s.lower;
}

// What is read in any case, and what is behind the list's last unit.
__device__ __forceinline__ void put_forced(int* out, int first, int wanted, int units, int last, int room, int rank) {
  const int tid = threadIdx.x;
  const int count = first + wanted + units - last; // == width
#pragma unroll 1
  for (int i = rank * THREADS + tid; i < first; i += CLUSTER * THREADS) out[i] = i;
#pragma unroll 1
  for (int i = first + wanted + rank * THREADS + tid; i < count; i += CLUSTER * THREADS) out[i] = last + i - first - wanted;
#pragma unroll 1
  for (int i = count + rank * THREADS + tid; i < room; i += CLUSTER * THREADS) out[i] = -1;
  if (rank == 0 && tid == 0) out[room] = count;
}

// Dynamic shared memory: 17 bytes a packet of eight units (share, of the longest row), 8 bytes a part and head, and 32 a packet where exact scores
// are kept; where STREAM only one byte a packet, and no scores; where FILTER room for the ring beside the bytes, and for a list of as many units as
// kept says; where LISTED, if that is more, for such a list and a bit a unit of the row. scores [R, HEADS, score_stride] fp16 and parts
// [R, num_parts, HEADS] as a scorer leaves them, lens [B]; where LISTED, entries [R, blocks, capacity] and heads [R, blocks] as list_units.cu leaves
// them, up to 32 blocks. Writes out [R, width + 1]: ascending units, -1 behind them, then their count; -1 everywhere where the sequence is read whole.
// Row r belongs to sequence r / rows_per_sequence. budgets [Z] holds by slots [B] the smaller budgets that requests asked for, 0 for none; null: nobody
// did. Such a sequence is read whole up to its own budget or dense_below tokens. published [R, published_words] or null: the query's words, which are
// emptied for the next append (query.cuh).
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) select_units(const __half* scores, const float4* parts, const int* lens,
    int* out, const int* slots, const int* budgets, uint4* published, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below,
    int room, int sink, int window, int kept, int published_words, const uint2* entries, const uint2* heads, int blocks, int capacity) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x;
  const long long row = blockIdx.x / CLUSTER;
  const int sequence = (int)row / rows_per_sequence, stored = lens[sequence];
  const int own = budgets ? budgets[slots[sequence]] : 0, width = own ? min(room, (own + UNIT - 1) / UNIT) : room;
  const int whole_to = own ? max(min(own, budget), dense_below) : budget;
  int turn = 0;
  MARK(0)
#ifdef FILTER
  Filtered& filtered = *reinterpret_cast<Filtered*>(s.hist);
  if (CLUSTER > 1 && tid == 0) dsmem_init(&filtered.box[0]), dsmem_init(&filtered.box[1]), dsmem_init(&filtered.box[2]);
#endif
#ifndef LISTED
  cluster_arrive();
#endif
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
  if (tid < 16) s.fine[tid] = 0;
  if (tid == 0) s.counts = make_int2(0, 0), s.before = s.lower = 0;
#ifdef LISTED
  static_assert(sizeof(Marks) <= sizeof(s.hist), "it lies over the counts, which are cleared");
  uint2* list = reinterpret_cast<uint2*>(dynamic);
  Listed listed = {*reinterpret_cast<Marks*>(s.hist), list, reinterpret_cast<u32*>(list + kept), kept, (stored / GROUP * GROUP / UNIT + 31) / 32};
  listed.clear();
#endif
  dependency_wait();
  MARK(1)
  if (published && rank == 0) {
    for (int i = tid; i < published_words; i += THREADS) __stcg(published + row * published_words + i, make_uint4(~0u, ~0u, ~0u, ~0u));
  }
  scores += row * HEADS * score_stride, parts += row * num_parts * HEADS, out += row * (room + 1);
  const int closed = stored / GROUP * GROUP, usable = closed / UNIT, units = (stored + UNIT - 1) / UNIT;
  const int first = (sink + UNIT - 1) / UNIT, last = max(first, min(closed, stored - window) / UNIT), wanted = width - first - (units - last);
  if (stored <= whole_to || wanted >= last - first || wanted <= 0) { // all is read, every unit chosen, or nothing but the forced ones
    const int gap = wanted <= 0 ? last - first : 0, count = stored <= whole_to ? -1 : min(units - gap, width);
#pragma unroll 1
    for (int i = rank * THREADS + tid; i <= room; i += CLUSTER * THREADS) out[i] = i == room ? count : i >= count ? -1 : i < first ? i : i + gap;
    return;
  }

#ifdef LISTED
  listed.wanted = wanted;
  if (listed.gather(entries + row * blocks * capacity, heads + row * blocks, blocks, capacity) && listed.cut(s.warp_sums, turn)) {
    MARK(4)
    listed.choose();
    if (rank == 0) listed.put(out + first, s.warp_sums, turn);
    put_forced(out, first, wanted, units, last, room, rank);
    MARK(10)
    return;
  }
  MARK(30)
  __syncthreads(); // all have read the counts
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
  cluster_arrive(); // others write over the counts once all have come here
#endif
  const int packets = ((((usable + 7) >> 3) + CLUSTER * 4 - 1) / (CLUSTER * 4)) * 4, begin = rank * packets; // of eight units, four a word of flags
  uint4* keys = reinterpret_cast<uint4*>(dynamic);                    // [packets] eight keys each
#ifdef FILTER
  u32* bitmap = reinterpret_cast<u32*>(keys + max(packets, RING / 16)); // [packets / 4]
#else
  u32* bitmap = reinterpret_cast<u32*>(keys + (KEPT ? packets : 0));
#endif
  float* add = reinterpret_cast<float*>(bitmap + ((packets / 4 + 3) & ~3)); // [num_parts, HEADS], twice
#if defined(FILTER) || defined(LISTED)
  u32* exact = nullptr;
#else
  u32* exact = kept ? reinterpret_cast<u32*>(add + (2 * num_parts * HEADS + 3) / 4 * 4) : nullptr;
#endif
  Share share = {scores, score_stride, begin * 8, packets * 8, usable, first, last, wanted,
      (((usable + 31) >> 5) + num_parts - 1) / num_parts * 32, keys, exact, add};
#ifdef FILTER
  static_assert(sizeof(Filtered) <= sizeof(s.hist) + sizeof(s.block_sums) + sizeof(s.coarse), "it lies over the counts and what blocks exchange");
  static_assert(sizeof(filtered.sample) + sizeof(filtered.hist) + sizeof(filtered.tied) + sizeof(filtered.peer_sample) + sizeof(filtered.peer_hist) >= sizeof(s.hist),
      "boxes lie behind the counts, which are cleared");
  if (8ll * wanted <= last - first && REACH * wanted / 100 <= kept * CLUSTER / 8 * 5) {
    const u64 policy = read_once_policy();
    Filter filter = {filtered, share, dynamic + tid * 16, reinterpret_cast<u32*>(add + num_parts * HEADS),
        reinterpret_cast<uint2*>(add + (2 * num_parts * HEADS + 3) / 4 * 4), kept, bitmap, 0.f, 0.f};
    const float4 part = tid < num_parts * HEADS ? parts[tid] : make_float4(0.f, 0.f, 0.f, 0.f);
    filter.clear();
    __syncthreads(); // parts are asked for before scores
    filter.fetch_first(policy);
    normalize(s, share, parts, part, num_parts, add + num_parts * HEADS);
    MARK(2)
    cluster_wait(); // every block has begun
    filter.sample(rank, s.warp_sums, turn);
    MARK(3)
    filter.load(policy);
    MARK(4)
    if (filter.cut(rank, s.warp_sums, turn)) {
      MARK(6)
      const int before = filter.choose(rank);
      MARK(9)
      filter.put(out, first + before, s.warp_sums, turn);
      put_forced(out, first, wanted, units, last, room, rank);
      MARK(10)
      return;
    }
    MARK(30)
    __syncthreads(); // all have read the counts
    for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
    cluster_arrive();
  }
#endif
  const bool narrow = KEPT && packets * 8 <= 4 * THREADS;
  Packets<4> wide_packets;
  Packets<1> narrow_packets;
  if (narrow) narrow_packets.load(share, tid * 2);
  else wide_packets.load(share, tid * 8);
  normalize(s, share, parts, tid < num_parts * HEADS ? parts[tid] : make_float4(0.f, 0.f, 0.f, 0.f), num_parts, add + num_parts * HEADS);
  MARK(2)
  if (narrow) narrow_packets.count(share, s.hist);
  else wide_packets.count(share, s.hist);
  MARK(3)
  cut_cluster(s, wanted, rank, turn);
  MARK(5)
  const int before = choose(s, share, packets, rank, bitmap, turn);
  MARK(9)
  cluster_arrive(); // nobody leaves while others read its memory

  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(bitmap);
  const int each = (packets + THREADS - 1) / THREADS, from_byte = min(packets, tid * each), to_byte = min(packets, from_byte + each);
  int mine = 0;
  for (int i = from_byte; i < to_byte; i++) mine += __popc(bytes[i]);
  int at = first + before + block_scan(mine, s.warp_sums, turn) - mine;
  for (int i = from_byte; i < to_byte; i++) {
    u32 flags = bytes[i];
    const int u = (begin + i) * 8;
    while (flags) {
      out[at++] = u + __ffs(flags) - 1;
      flags &= flags - 1;
    }
  }
  put_forced(out, first, wanted, units, last, room, rank);
  MARK(10)
  cluster_wait();
}

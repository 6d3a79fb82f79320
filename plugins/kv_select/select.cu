// Exact top-k of pooled scores, one thread-block cluster a key-value head: score descending, index ascending on ties, ascending output.
//
// Built as pooling.cuh says, with -DCLUSTER (1 to 16), -DUNIT (tokens of a unit) and -DGROUP (tokens that are summarized together).
//
// Every block keeps a 16-bit monotone key of its share of the units in shared memory. One histogram of the upper 12 bits, summed over the
// cluster, leaves a bin of candidates; a second of the lower 4 bits splits it where it is crowded. The candidates' exact scores are then
// ranked. Should more than CANDIDATES still share a 16-bit key, the cut is found by bisection over score and index.
#include "ranking.cuh"

// Split a crowded bin by the lower four bits of its keys.
__device__ __forceinline__ void split_bin(Shared& s, const Share& share, int packets, u32 from, int wanted, int need) {
  const int tid = threadIdx.x;
  for (int p = tid; p < packets; p += THREADS) {
    u32 key[8];
    share.packet(p, key);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (key[k] >= from && key[k] <= (from | 15)) atomicAdd(&s.fine[key[k] & 15], 1);
    }
  }
  cut_fine(s, from, wanted, need);
}

// Rare: bisect for the lowest score, then the highest index, that still belong; every round counts over the cluster. Marks what belongs and returns
// how much of it lies in lower blocks.
__device__ __forceinline__ int bisect(Shared& s, const Share& share, int packets, u32 from, u32 to, int need, int rank, unsigned char* bytes, int& turn) {
  const int tid = threadIdx.x;
  u32 score_from = 0, score_to = 0xffffffffu; // largest cut with count(score >= cut) >= need lies in [score_from, score_to]
  u32 unit_from = 0, unit_to = share.last;    // smallest bound with count(score == cut, unit < bound) >= rest
  int rest = need;
  for (int round = 0; round < 64; round++) {
    const bool by_unit = score_from == score_to;
    if (by_unit && unit_from == unit_to) break;
    const u32 middle = by_unit ? unit_from + (unit_to - unit_from) / 2 : score_from + (score_to - score_from) / 2 + 1;
    int n = 0, over = 0;
    for (int p = tid; p < packets; p += THREADS) {
      u32 key[8];
      share.packet(p, key);
      for (int k = 0; k < 8; k++) {
        if (key[k] < from || key[k] > to) continue;
        const u32 u = share.begin + p * 8 + k, score = share.exact_score(u);
        n += by_unit ? score == score_from && u < middle : score >= middle;
        over += score > score_from;
      }
    }
    n = block_scan(n, s.warp_sums, turn);
    over = block_scan(over, s.warp_sums, turn);
    if (tid == THREADS - 1) s.round_count[0] = n, s.round_count[1] = over;
    cluster_sync();
    int sum = 0, sum_over = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += peer(s.round_count, c)[0], sum_over += peer(s.round_count, c)[1];
    cluster_sync();
    if (!by_unit) {
      if (sum >= need) score_from = middle;
      else score_to = middle - 1;
    } else {
      rest = need - sum_over;
      if (sum >= rest) unit_to = middle;
      else unit_from = middle + 1;
    }
  }
  int mine = 0;
  for (int p = tid; p < packets; p += THREADS) {
    u32 key[8], flags = bytes[p];
    share.packet(p, key);
    for (int k = 0; k < 8; k++) {
      if (key[k] < from || key[k] > to) continue;
      const u32 u = share.begin + p * 8 + k, score = share.exact_score(u);
      if (score > score_from || (score == score_from && u < unit_to)) flags |= 1u << k, mine++;
    }
    bytes[p] = flags;
  }
  mine = block_scan(mine, s.warp_sums, turn);
  if (tid == THREADS - 1) s.round_count[0] = mine;
  cluster_sync();
  int lower = 0;
  for (int c = 0; c < rank; c++) lower += peer(s.round_count, c)[0];
  return lower;
}

// Mark what is chosen in bytes, a bit a unit; returns how much of it lies in lower blocks.
__device__ __forceinline__ int choose(Shared& s, const Share& share, int packets, int rank, u32* bitmap, int& turn) {
  const int tid = threadIdx.x, lane = tid & 31;
  unsigned char* bytes = reinterpret_cast<unsigned char*>(bitmap);
  u32 from = max((u32)s.cut.bin << 4, 1u), to = (u32)s.cut.bin << 4 | 15; // candidates' keys; 0 is none
  int need = share.wanted - s.cut.above, crowd = s.cut.count;
  if (crowd > CROWD && crowd != need) {
    split_bin(s, share, packets, from, share.wanted, need);
    from = to = s.cut.bin, need = share.wanted - s.cut.above, crowd = s.cut.count;
  }
  const bool few = crowd <= CANDIDATES, whole = crowd == need;
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
  rank_candidates(s, crowd, need);
  MARK(8)
  return s.before + mark_candidates(s, crowd, share.begin, share.begin + share.units, bitmap);
}

// Dynamic shared memory: 17 bytes a packet of eight units (share, of the longest row), 8 bytes a part and head, and with exact_units 32 a packet; where
// STREAM only one byte a packet, and no exact_units. scores [R, HEADS, score_stride] fp16 and parts [R, num_parts, HEADS] as a scorer leaves them, lens
// [B]. Writes out [R, width + 1]: ascending units, -1 behind them, then their count; -1 everywhere where the sequence is read whole. Row r belongs to
// sequence r / rows_per_sequence. budgets [Z] holds by slots [B] the smaller budgets that requests asked for, 0 for none; null: nobody did. Such a
// sequence is read whole up to its own budget or dense_below tokens. Where redo [R] is given, only rows with 1 are written.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) select_units(const __half* scores, const float4* parts, const int* lens,
    int* out, const int* slots, const int* budgets, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below, int room,
    int sink, int window, int exact_units, const int* redo) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x;
  const long long row = blockIdx.x / CLUSTER;
  const int stored = lens[row / rows_per_sequence];
  const int own = budgets ? budgets[slots[row / rows_per_sequence]] : 0, width = own ? min(room, (own + UNIT - 1) / UNIT) : room;
  const int whole_to = own ? max(min(own, budget), dense_below) : budget;
  int turn = 0;
  MARK(0)
  cluster_arrive();
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
  if (tid < 16) s.fine[tid] = 0;
  if (tid == 0) s.counts = make_int2(0, 0), s.before = s.lower = 0;
  dependency_wait();
  MARK(1)
  if (redo && !redo[row]) return;
  scores += row * HEADS * score_stride, parts += row * num_parts * HEADS, out += row * (room + 1);
  const int closed = stored / GROUP * GROUP, usable = closed / UNIT, units = (stored + UNIT - 1) / UNIT;
  const int first = (sink + UNIT - 1) / UNIT, last = max(first, min(closed, stored - window) / UNIT), wanted = width - first - (units - last);
  if (stored <= whole_to || wanted >= last - first || wanted <= 0) { // all is read, every unit chosen, or nothing but the forced ones
    const int gap = wanted <= 0 ? last - first : 0, count = stored <= whole_to ? -1 : min(units - gap, width);
    for (int i = rank * THREADS + tid; i <= room; i += CLUSTER * THREADS) out[i] = i == room ? count : i >= count ? -1 : i < first ? i : i + gap;
    return;
  }

  const int packets = ((((usable + 7) >> 3) + CLUSTER * 4 - 1) / (CLUSTER * 4)) * 4, begin = rank * packets; // of eight units, four a word of flags
  uint4* keys = reinterpret_cast<uint4*>(dynamic);                    // [packets] eight keys each
  u32* bitmap = reinterpret_cast<u32*>(keys + (KEPT ? packets : 0));  // [packets / 4]
  float* add = reinterpret_cast<float*>(bitmap + ((packets / 4 + 3) & ~3)); // [num_parts, HEADS], twice
  u32* exact = exact_units ? reinterpret_cast<u32*>(add + (2 * num_parts * HEADS + 3) / 4 * 4) : nullptr;
  Share share = {scores, score_stride, begin * 8, packets * 8, usable, first, last, wanted,
      (((usable + 31) >> 5) + num_parts - 1) / num_parts * 32, keys, exact, add};
  const bool narrow = KEPT && packets * 8 <= 4 * THREADS;
  Packets<4> wide_packets;
  Packets<1> narrow_packets;
  if (narrow) narrow_packets.load(share, tid * 2);
  else wide_packets.load(share, tid * 8);
  normalize(s, share, parts, num_parts, add + num_parts * HEADS);
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
  const int count = first + wanted + units - last; // == width
  for (int i = rank * THREADS + tid; i < first; i += CLUSTER * THREADS) out[i] = i;
  for (int i = first + wanted + rank * THREADS + tid; i < count; i += CLUSTER * THREADS) out[i] = last + i - first - wanted;
  for (int i = count + rank * THREADS + tid; i < room; i += CLUSTER * THREADS) out[i] = -1;
  if (rank == 0 && tid == 0) out[room] = count;
  MARK(10)
  cluster_wait();
}

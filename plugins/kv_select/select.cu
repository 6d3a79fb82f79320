// Exact top-k of pooled scores, one thread-block cluster a key-value head, as ranked.cuh says.
//
// Where a block has many units, built with -DSIEVE, sieve.cuh leaves most of them out before they are counted.
//
// Built as ranked.cuh says, with -DUNIT (tokens of a unit) and -DGROUP (tokens that are summarized together).
#include "ranked.cuh"
#ifdef SIEVE
#include "sieve.cuh"
#endif

// Dynamic shared memory: 17 bytes a packet of eight units (share, of the longest row), 8 bytes a part and head, and 32 a packet where exact scores
// are kept; where STREAM only one byte a packet, and no scores; where SIEVE room for the ring beside the bytes, and for a list of as many units as
// kept says. scores [R, HEADS, score_stride] fp16 and parts [R, num_parts, HEADS] as a scorer leaves them, lens [B]. Writes out [R, width + 1]:
// ascending units, -1 behind them, then their count; -1 everywhere where the sequence is read whole. Row r belongs to sequence r /
// rows_per_sequence. budgets [Z] holds by slots [B] the smaller budgets that requests asked for, 0 for none; null: nobody did. Such a sequence is
// read whole up to its own budget or dense_below tokens. told [R, told_words] or null: the query's words, which are emptied for the next append (query.cuh).
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) select_units(const __half* scores, const float4* parts, const int* lens,
    int* out, const int* slots, const int* budgets, uint4* told, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below,
    int room, int sink, int window, int kept, int told_words) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x;
  const long long row = blockIdx.x / CLUSTER;
  const int sequence = (int)row / rows_per_sequence, stored = lens[sequence];
  const int own = budgets ? budgets[slots[sequence]] : 0, width = own ? min(room, (own + UNIT - 1) / UNIT) : room;
  const int whole_to = own ? max(min(own, budget), dense_below) : budget;
  int turn = 0;
  MARK(0)
#ifdef SIEVE
  Sieved& sieved = *reinterpret_cast<Sieved*>(s.hist);
  if (CLUSTER > 1 && tid == 0) inbox_open(&sieved.box[0]), inbox_open(&sieved.box[1]), inbox_open(&sieved.box[2]);
#endif
  cluster_arrive();
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
  if (tid < 16) s.fine[tid] = 0;
  if (tid == 0) s.counts = make_int2(0, 0), s.before = s.lower = 0;
  dependency_wait();
  MARK(1)
  if (told && rank == 0) empty_told(told + row * told_words, told_words);
  scores += row * HEADS * score_stride, parts += row * num_parts * HEADS, out += row * (room + 1);
  const int closed = stored / GROUP * GROUP, usable = closed / UNIT, units = (stored + UNIT - 1) / UNIT;
  const int first = (sink + UNIT - 1) / UNIT, last = max(first, min(closed, stored - window) / UNIT), wanted = width - first - (units - last);
  if (stored <= whole_to || wanted >= last - first || wanted <= 0) { // all is read, every unit chosen, or nothing but the forced ones
    const int gap = wanted <= 0 ? last - first : 0, count = stored <= whole_to ? -1 : min(units - gap, width);
#pragma unroll 1
    for (int i = rank * THREADS + tid; i <= room; i += CLUSTER * THREADS) out[i] = i == room ? count : i >= count ? -1 : i < first ? i : i + gap;
    return;
  }

  const int packets = ((((usable + 7) >> 3) + CLUSTER * 4 - 1) / (CLUSTER * 4)) * 4, begin = rank * packets; // of eight units, four a word of flags
  uint4* keys = reinterpret_cast<uint4*>(dynamic);                    // [packets] eight keys each
#ifdef SIEVE
  u32* bitmap = reinterpret_cast<u32*>(keys + max(packets, RING / 16)); // [packets / 4]
#else
  u32* bitmap = reinterpret_cast<u32*>(keys + (KEPT ? packets : 0));
#endif
  float* add = reinterpret_cast<float*>(bitmap + ((packets / 4 + 3) & ~3)); // [num_parts, HEADS], twice
#ifdef SIEVE
  u32* exact = nullptr;
#else
  u32* exact = kept ? reinterpret_cast<u32*>(add + (2 * num_parts * HEADS + 3) / 4 * 4) : nullptr;
#endif
  Share share = {scores, score_stride, begin * 8, packets * 8, usable, first, last, wanted,
      (((usable + 31) >> 5) + num_parts - 1) / num_parts * 32, keys, exact, add};
#ifdef SIEVE
  static_assert(sizeof(Sieved) <= __builtin_offsetof(Shared, fine), "it lies over the counts and what blocks tell each other");
  static_assert(sizeof(sieved.sample) + sizeof(sieved.hist) + sizeof(sieved.crowd) + sizeof(sieved.told_sample) + sizeof(sieved.told) >= sizeof(s.hist),
      "boxes lie behind the counts, which are cleared");
  if (8ll * wanted <= last - first && REACH * wanted / 100 <= kept * CLUSTER / 8 * 5) {
    const u64 policy = read_once_policy();
    Sieve sieve = {{0.f, 0.f}, sieved, share, dynamic + tid * 16, reinterpret_cast<u32*>(add + num_parts * HEADS),
        reinterpret_cast<uint2*>(add + (2 * num_parts * HEADS + 3) / 4 * 4), kept, bitmap};
    const float4 part = tid < num_parts * HEADS ? parts[tid] : make_float4(0.f, 0.f, 0.f, 0.f);
    sieve.clear();
    __syncthreads(); // parts are asked for before scores
    sieve.fetch_first(policy);
    normalize(s, share, parts, part, num_parts, add + num_parts * HEADS);
    MARK(2)
    cluster_wait(); // every block has begun
    sieve.sample(rank, s.warp_sums, turn);
    MARK(3)
    sieve.load(policy);
    MARK(4)
    if (sieve.cut(rank, s.warp_sums, turn)) {
      MARK(6)
      const int before = sieve.choose(rank);
      MARK(9)
      sieve.put(out, first + before, s.warp_sums, turn);
      put_forced(out, first, wanted, units, last, room, rank, CLUSTER);
      MARK(10)
      return;
    }
    MARK(30)
    __syncthreads(); // all have read the counts
    for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
    cluster_arrive();
  }
#endif
  choose_all(s, share, parts, num_parts, add + num_parts * HEADS, rank, bitmap, out + first, turn);
  put_forced(out, first, wanted, units, last, room, rank, CLUSTER);
  MARK(10)
  cluster_wait();
}

// Exact top-k of pooled scores where rows are long: several blocks a row, which leave most units out before they are counted (lists.cuh).
//
// Built as ranked.cuh says, with -DUNIT (tokens of a unit) and -DGROUP (tokens that are summarized together), without clusters.
#define KEPT_IF_FIT
#ifndef THREADS
#define THREADS 1024
#endif
#include "reading.cuh"
#include "lists.cuh"

// Arguments as of select.cu. mail [R, blocks, listed / 2 + 1] words of sixteen bytes and tickets [R], zero before the first launch; launches that share
// them must follow each other. The grid has `blocks` blocks a row; listed: units of a block's list, even. Dynamic shared memory: the ring, a bit a unit of a
// block, 8 bytes a part and head, 8 a unit of the list.
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_many(const __half* scores, const float4* parts, const int* lens, int* out, const int* slots,
    const int* budgets, uint4* mail_words, u64* tickets, uint4* told, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below,
    int room, int sink, int window, int listed, int blocks, int told_words) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  const int rank = blockIdx.x % blocks, tid = threadIdx.x;
  const long long row = blockIdx.x / blocks;
  const int sequence = (int)row / rows_per_sequence, stored = lens[sequence];
  const Reading reading(stored, stored / GROUP * GROUP, UNIT, Budget(budgets ? budgets[slots[sequence]] : 0, budget, dense_below, room, UNIT), sink, window);
  Sieved& sieved = *reinterpret_cast<Sieved*>(s.hist);
  static_assert(sizeof(Sieved) <= __builtin_offsetof(Shared, fine), "it lies over what is not needed beside it");
  static_assert(sizeof(sieved.sample) + sizeof(sieved.hist) <= sizeof(s.hist), "counts are cleared");
  int turn = 0;
  MARK(0)
  const auto clear = [&] {
    for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
    if (tid < 16) s.fine[tid] = 0;
    if (tid == 0) s.counts = make_int2(0, 0), s.before = s.lower = 0;
  };
  clear();
  if (tid == 0) {
    for (int i = 0; i < DEPTH; i++) barrier_init(&sieved.full[i]);
    barriers_ready();
  }
  out += row * (room + 1), scores += row * HEADS * score_stride, parts += row * num_parts * HEADS;
  const int usable = stored / GROUP * GROUP / UNIT, wanted = reading.wanted, first = reading.first, last = reading.last;
  const int all = ((usable + 31) >> 5) * 4, packets = (all / 4 + blocks - 1) / blocks * 4; // of eight units: of the row, of a block
  u32* bitmap = reinterpret_cast<u32*>(dynamic + RING);
  float* add = reinterpret_cast<float*>(dynamic + RING + ((packets + 15) & ~15)); // [num_parts, HEADS], twice
  const int part_units = max(1, (((usable + 31) >> 5) + num_parts - 1) / num_parts) * 32;
  const u64 policy = read_once_policy();
  uint2 *list = reinterpret_cast<uint2*>(add + (2 * num_parts * HEADS + 3) / 4 * 4), *lists = reinterpret_cast<uint2*>(dynamic);
  dependency_wait();
  MARK(1)
  if (told && rank == 0) empty_told(told + row * told_words, told_words);
  if (reading.plain) {
    reading.put_plain(out, rank, blocks);
    return;
  }
  if (8ll * wanted <= last - first && REACH * wanted / 100 <= listed * blocks / 8 * 5) {
    Share share = {scores, score_stride, rank * packets * 8, packets * 8, usable, first, last, wanted, part_units, nullptr, nullptr, add};
    const Letters mail = {mail_words + row * blocks * (listed / 2 + 1), listed / 2 + 1, rank, blocks};
    Sieve sieve = {{0.f, 0.f}, sieved, share, mail, dynamic, reinterpret_cast<u32*>(add + num_parts * HEADS), list, listed, bitmap};
    const float4 part = tid < num_parts * HEADS ? parts[tid] : make_float4(0.f, 0.f, 0.f, 0.f);
    u64 ticket = 0;
    if (tid == THREADS - 1 && blocks > 1) ticket = atomicAdd(tickets + row, 1ull);
    u32 sample[HEADS][1];
    sieve.ask(sample);
    sieve.clear();
    __syncthreads(); // parts and the sample are asked for before all else; barriers are ready
    const int stage = (tid - THREADS + 32 * DEPTH) / 32; // of the last warps, one each
    if (tid >= THREADS - 32 * DEPTH && stage < EARLY) sieve.fetch(stage, policy);
    normalize(s, share, parts, part, num_parts, add + num_parts * HEADS);
    MARK(2)
    if (tid == THREADS - 1) sieved.stamp = (u32)(ticket / blocks) + 1; // every launch takes as many tickets as a row has blocks
    sieve.sample(sample, s.warp_sums, turn);
    if (tid >= THREADS - 32 * DEPTH && stage >= EARLY) sieve.fetch(stage, policy); // the warps wait until copies are on their way, so no barrier may follow
    MARK(3)
    sieve.load(policy);
    MARK(4)
    const int total = sieve.gather(lists, RING / 8);
    MARK(5)
    if (total >= 0 && sieve.cut(s.warp_sums, turn)) {
      MARK(6)
      const int before = sieve.choose(lists, total);
      MARK(9)
      sieve.put(out, first + before, s.warp_sums, turn);
      put_forced(out, first, wanted, reading.units, last, room, rank, blocks);
      MARK(10)
      return;
    }
    MARK(30)
    __syncthreads(); // all have read the counts
    clear();
  } else if (rank > 0) {
    return;
  }
  // Rare: from the whole row, as every other block does that has to.
  const bool kept = all * 17 <= RING;
  Share share = {scores, score_stride, 0, all * 8, usable, first, last, wanted, part_units, kept ? reinterpret_cast<uint4*>(dynamic) : nullptr, nullptr, add};
  __syncthreads();
  choose_all(s, share, parts, num_parts, add + num_parts * HEADS, 0, reinterpret_cast<u32*>(dynamic + (kept ? all * 16 : 0)), out + first, turn);
  put_forced(out, first, wanted, reading.units, last, room, 0, 1);
}

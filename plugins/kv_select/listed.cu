// Exact top-k of pooled scores among the units that a scorer listed, one thread-block cluster a key-value head: score descending, index ascending on
// ties, ascending output. Rows where the lists do not hold the choice are left to others, and said to be.
//
// Built with -DCLUSTER (1 to 16), -DHEADS (2 to 8), -DMAXIMUM, -DUNIT and -DGROUP as select.cu is, and for sm_90 on.
#include "listed.cuh"

// What is added to every part's scores, so that heads are normalized over the row, as select.cu does it; by one warp a head. No unit that a part left
// out reaches s.bound. Returns false where a sum is no number. first: what this lane has read.
__device__ __forceinline__ bool normalize(Desk& s, float* add, const float4* parts, float4 first, int num_parts) {
  const int lane = threadIdx.x & 31, head = threadIdx.x >> 5;
  float top = lane < num_parts ? first.y : -3e38f, beta = lane < num_parts ? first.z : -3e38f, total = 0.f;
  bool good = beta < 3e38f; // and a number
#pragma unroll 1
  for (int p = lane + 32; p < num_parts; p += 32) {
    const float4 v = parts[p * HEADS + head];
    top = fmaxf(top, v.y), beta = fmaxf(beta, v.z), good &= v.z < 3e38f;
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o)), beta = fmaxf(beta, __shfl_xor_sync(~0u, beta, o));
  if (lane < num_parts) total = exp2_fast(first.y - top);
#pragma unroll 1
  for (int p = lane + 32; p < num_parts; p += 32) total += exp2_fast(parts[p * HEADS + head].y - top);
#pragma unroll
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  const float zero = top + (log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS)));
  if (lane < num_parts) add[lane * HEADS + head] = first.x - zero;
#pragma unroll 1
  for (int p = lane + 32; p < num_parts; p += 32) add[p * HEADS + head] = parts[p * HEADS + head].x - zero;
  if (lane == 0) s.bound[head] = beta - zero;
  return good && fabsf(zero) < 1e30f;
}

// Dynamic shared memory: 20 bytes a packet of a round (rounds of THREADS packets), a bit a unit of the row, twice but for a block's own, 4 bytes a part
// and head, see launch_listed.py. scores: lists of packets [R, parts, 8], row_bytes a row and region_bytes a list, as fier_list.cu leaves them; parts
// [R, num_parts, HEADS]: reference, log2 of the sum of exponentials, log2 of what no unlisted unit's exponentials reach by head; counts [R, num_parts, 8].
// Writes out as select_units does and failed [R] = 0; or failed = 1 alone.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) choose_listed(const char* scores, const float4* parts, const int* counts,
    const int* lens, int* out, int* failed, const int* slots, const int* budgets, uint4* told, long long row_bytes, int region_bytes, int capacity,
    int num_parts, int rows_per_sequence, int budget, int dense_below, int room, int sink, int window, int rounds, int told_words) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Desk s;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const long long row = blockIdx.x / CLUSTER;
  const int sequence = (int)row / rows_per_sequence, stored = lens[sequence], regions = num_parts * SCORER_WARPS;
  const int own = budgets ? budgets[slots[sequence]] : 0, width = own ? min(room, (own + UNIT - 1) / UNIT) : room;
  const int whole_to = own ? max(min(own, budget), dense_below) : budget;
  const Bounds bounds(stored, width, sink, window);
  const Lists lists = {scores + row * row_bytes, counts + row * regions, region_bytes, capacity, regions, WARPS * CLUSTER % regions,
      WARPS * CLUSTER / regions};
  const int segments = max(1, (bounds.usable + SEGMENT * CLUSTER - 1) / (SEGMENT * CLUSTER));
  uint4* images = reinterpret_cast<uint4*>(dynamic);
  uint4 *bitmap = images + rounds * THREADS, *inbox = bitmap + CLUSTER * segments * 32;
  u32* units = reinterpret_cast<u32*>(inbox + (CLUSTER - 1) * segments * 32);
  u32* table = units + rounds * THREADS;
  float* add = reinterpret_cast<float*>(table + (CLUSTER - 1) * (CLUSTER - 1) * segments);
  Choice choice = {s, lists, bounds, add, images, units, bitmap, inbox, table, segments, rank, 0};
  Place at = lists.first(rank), later = lists.next(at);
  int turn = 0, wanted = bounds.wanted;
  MARK(0)
  choice.open();
  cluster_arrive();
  const bool whole = stored <= whole_to;
  if (!whole) choice.clear();
  dependency_wait();
  MARK(1)
  if (told && rank == 0) {
#pragma unroll 1
    for (int i = tid; i < told_words; i += THREADS) __stcg(told + row * told_words + i, make_uint4(~0u, ~0u, ~0u, ~0u));
  }
  out += row * (room + 1), parts += row * num_parts * HEADS;
  if (whole || bounds.plain()) {
    put_plain(out, bounds, width, room, rank, whole);
    if (rank == 0 && tid == 0) failed[row] = 0;
    return;
  }
  const float4 part = warp < HEADS && lane < num_parts ? parts[lane * HEADS + warp] : make_float4(0.f, 0.f, 0.f, 0.f);
  u32 most = tid < regions ? lists.counts[tid] : 0;
  Packet packet, next;
  packet.load(lists, at), next.load(lists, later);
#pragma unroll 1
  for (int i = tid + THREADS; i < regions; i += THREADS) most = max(most, (u32)lists.counts[i]);
  if (warp < HEADS && !normalize(s, add, parts, part, num_parts)) most = ~0u;
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) s.most[warp] = most;
  __syncthreads();
  MARK(2)
  most = __reduce_max_sync(~0u, lane < WARPS ? s.most[lane] : 0);
  float bound = s.bound[0];
#pragma unroll
  for (int j = 1; j < HEADS; j++) bound = fmaxf(bound, s.bound[j]);
  bool good = most <= capacity && (most + 31) / 32 * regions <= rounds * WARPS * CLUSTER;
  if (good) {
    const int chunks = choice.chunks = (most + 31) / 32 * regions;
    // Nothing unlisted reaches three percent more than the bound. Where all is listed, most is about the mean.
    const u32 low = __float_as_uint(exp2_fast(bound) * 1.03f) + 1, mean = __float_as_uint(1.f / 32 / bounds.usable);
    Images range = {low, 0x7f800002u, max(low, mean), FIRST_SHIFT};
#pragma unroll 1
    for (int round = 0; at.chunk < chunks; round++) {
      choice.take(packet, at, round, range);
      at = later, packet = next, later = lists.next(later);
      if (later.chunk < chunks) next.load(lists, later);
    }
    MARK(3)
    good = choice.cut(range, wanted, turn);
    if (good) {
      const bool all = s.count == wanted;
      choice.mark(range, all);
      __syncthreads();
      MARK(6)
      choice.send();
      MARK(7)
      put_forced(out, bounds.first, bounds.wanted, bounds.units, bounds.last, room, rank);
      if (CLUSTER > 1) inbox_wait(&s.boxes[LEVELS]);
      MARK(8)
      if (CLUSTER > 1) choice.add_lower();
      if (!all) choice.compare(s.count, wanted);
      __syncthreads();
      MARK(9)
      choice.put(out, bounds.first, turn);
      MARK(10)
    } else {
      MARK(30)
    }
  }
  if (rank == 0 && tid == 0) failed[row] = !good;
}

// Exact top-k of pooled scores among the units that a scorer listed, one thread-block cluster a key-value head: score descending, index ascending on
// ties, ascending output. Rows where the lists do not hold the choice are left to others, and said to be.
//
// Built with -DCLUSTER (1 to 16), -DHEADS (2 to 8), -DMAXIMUM, -DUNIT and -DGROUP as select.cu is, with -DPARTS of a row and its -DSTRIDE of scores,
// -DROUNDS of packets that a thread keeps, and for sm_90 on.
#include "listed.cuh"

#define MOST_PARTS ((PARTS + 31) / 32)                      // of a lane
#define MOST_REGIONS ((REGIONS + THREADS - 1) / THREADS) // of a thread

// What is added to every part's scores, so that heads are normalized over the row, as select.cu does it; by one warp a head, of what its lanes have
// read. No unit that a part left out reaches s.bound. Returns false where a sum is no number.
__device__ __forceinline__ bool normalize(Desk& s, Room& room, const float4 (&parts)[MOST_PARTS]) {
  const int lane = threadIdx.x & 31, head = threadIdx.x >> 5;
  float top = -3e38f, beta = -3e38f, total = 0.f;
  bool good = true;
#pragma unroll
  for (int i = 0; i < MOST_PARTS; i++) top = fmaxf(top, parts[i].y), beta = fmaxf(beta, parts[i].z), good &= parts[i].z < 3e38f; // and a number
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o)), beta = fmaxf(beta, __shfl_xor_sync(~0u, beta, o));
#pragma unroll
  for (int i = 0; i < MOST_PARTS; i++) total += lane + 32 * i < PARTS ? exp2_fast(parts[i].y - top) : 0.f;
#pragma unroll
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  const float zero = top + (log2f(total) + (MAXIMUM ? 0.f : log2f((float)HEADS)));
#pragma unroll
  for (int i = 0; i < MOST_PARTS; i++) {
    if (lane + 32 * i < PARTS) room.add[(lane + 32 * i) * HEADS + head] = parts[i].x - zero;
  }
  if (lane == 0) s.bound[head] = beta - zero;
  return good && fabsf(zero) < 1e30f;
}

// Dynamic shared memory: Room. scores: lists of packets [R, parts, 8] as fier_list.cu leaves them; parts [R, parts, HEADS]: reference, log2 of the sum of
// exponentials, log2 of what no unlisted unit's exponentials reach by head; counts [R, parts, 8]. Writes out as select_units does and failed [R] = 0; or
// failed = 1 alone.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) choose_listed(const char* scores, const float4* parts, const int* counts,
    const int* lens, int* out, int* failed, const int* slots, const int* budgets, uint4* told, int rows_per_sequence, int budget, int dense_below,
    int width_most, int sink, int window, int told_words) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Desk s;
  Room& room = *reinterpret_cast<Room*>(dynamic);
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const long long row = blockIdx.x / CLUSTER;
  const int sequence = (int)row / rows_per_sequence, stored = lens[sequence];
  const int own = budgets ? budgets[slots[sequence]] : 0, width = own ? min(width_most, (own + UNIT - 1) / UNIT) : width_most;
  const int whole_to = own ? max(min(own, budget), dense_below) : budget;
  const Bounds bounds(stored, width, sink, window);
  const Choice choice = {s, room, scores + row * ((long long)HEADS * STRIDE * 2), rank, bounds.first, bounds.last};
  int wanted = bounds.wanted, level;
  MARK(0)
  if (tid <= LEVELS) { // counts of others may come from now on
    if (CLUSTER > 1) inbox_open(&s.boxes[tid]);
    if (CLUSTER > 1 && tid < LEVELS) inbox_expect(&s.boxes[tid], (CLUSTER - 1) * BINS * 2);
    s.own_crowd = s.lower = 0, s.bin = -1;
  }
  cluster_arrive();
#pragma unroll 1
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
#pragma unroll 1
  for (int i = tid; i < CLUSTER * WORDS / 4; i += THREADS) room.bitmap[i] = make_uint4(0, 0, 0, 0);
  dependency_wait();
  MARK(1)
  if (told && rank == 0) {
#pragma unroll 1
    for (int i = tid; i < told_words; i += THREADS) __stcg(told + row * told_words + i, make_uint4(~0u, ~0u, ~0u, ~0u));
  }
  out += row * (width_most + 1);
  if (stored <= whole_to || bounds.plain()) {
    put_plain(out, bounds, width, width_most, rank, stored <= whole_to);
    if (rank == 0 && tid == 0) failed[row] = 0;
    return;
  }
  float4 part[MOST_PARTS];
#pragma unroll
  for (int i = 0; i < MOST_PARTS; i++) {
    part[i] = make_float4(0.f, -3e38f, -3e38f, 0.f);
    if (warp < HEADS && lane + 32 * i < PARTS) part[i] = parts[(row * PARTS + lane + 32 * i) * HEADS + warp];
  }
  u32 most = 0;
  int count[MOST_REGIONS];
#pragma unroll
  for (int i = 0; i < MOST_REGIONS; i++) count[i] = tid + i * THREADS < REGIONS ? counts[row * REGIONS + tid + i * THREADS] : 0;
  Packet packets[DEPTH]; // behind what is waited for first
#pragma unroll
  for (int i = 0; i < DEPTH; i++) packets[i].load(choice.lists, choice.first_chunk() + i * WARPS * CLUSTER);
#pragma unroll
  for (int i = 0; i < MOST_REGIONS; i++) {
    if (tid + i * THREADS < REGIONS) room.counts[tid + i * THREADS] = count[i];
    most = max(most, (u32)count[i]);
  }
  if (warp < HEADS && !normalize(s, room, part)) most = ~0u;
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) s.most[warp] = most;
  __syncthreads();
  MARK(2)
  most = __reduce_max_sync(~0u, lane < WARPS ? s.most[lane] : 0);
  const float bound = highest(s.bound[lane < HEADS ? lane : 0]);
  const int chunks = (int)((most + 31) / 32) * REGIONS;
  bool good = most <= min(CAPACITY, 65535 / 4 / REGIONS) && chunks <= ROUNDS * WARPS * CLUSTER;
  if (good) {
    // Nothing unlisted reaches three percent more than the bound. Where all is listed, most is about the mean.
    const u32 low = __float_as_uint(exp2_fast(bound) * 1.03f) + 1, mean = __float_as_uint(1.f / 32 / STRIDE);
    Images range = {low, 0x7f800002u, max(low, mean), FIRST_SHIFT};
    const int end = choice.take(packets, chunks, range);
    MARK(3)
    level = choice.cut(end, range, wanted);
    good = level >= 0;
    if (good) {
      const int bin = s.bin, count = s.count, crowd = count == wanted ? 0 : count, own_crowd = crowd ? s.hist[bin] : 0;
      const u32 pair = lane < rank ? s.told[level & 1][min(lane, PEERS - 1)][bin / 2] : 0;
      const int start = __reduce_add_sync(~0u, pair >> 16 * (bin & 1) & 0xffff);
      if (CLUSTER > 1 && tid == 0) inbox_expect(&s.boxes[LEVELS], (CLUSTER - 1) * SEGMENTS * (512 + rank * 4) + (crowd - own_crowd) * 8);
      choice.mark(end, range, crowd ? range.high : range.low, start);
      __syncthreads();
      MARK(6)
      if (CLUSTER > 1) choice.send(start, own_crowd);
      MARK(7)
      put_forced(out, bounds, width_most, rank);
      if (CLUSTER > 1) inbox_wait(&s.boxes[LEVELS]), choice.add_lower();
      MARK(8)
      choice.compare(crowd, wanted);
      __syncthreads();
      MARK(9)
      choice.put(out + bounds.first);
      MARK(10)
    } else {
      MARK(30)
    }
  }
  if (rank == 0 && tid == 0) failed[row] = !good;
}

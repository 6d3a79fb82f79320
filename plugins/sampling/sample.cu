// The next token of every sequence from its logits: greedy or drawn, with top-k, top-p, min-p, penalties and log probability.
//
// Built with -DCLUSTER (blocks of a row), -DTHREADS, -DSTAGED (whether a block's share of a row lies in shared memory) and -DCONSTRAINED (whether
// rows have biases and masks of what may be chosen). Every sum that decides is one of integers, so it does not depend on the order in which threads add;
// ties go to the lowest id. `reference.py` says the same in torch.
#include "common.cuh"

#define WARPS (THREADS / 32)
#define WAYS 4               // parts into which a round of bisection cuts its range
#define UNIT 1099511627776.f // integer weight of the likeliest token
enum { TEMPERATURE, MIN_P, TOP_P, REPETITION, PRESENCE, FREQUENCY, TOP_K, FLAGS, FIELDS };
enum { PENALIZED = 1, LOGPROB = 2, BIASED = 4, LATER = 8 };
#define ANSWERED 0x00ffffff // of a count: how often a token was answered; a bit above it says that it is in the prompt

// Order-preserving image of a float that is not NaN; both zeros are one.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Shared {
  u64 warps[WARPS][WAYS];
  u64 block[2][WAYS]; // of this block, in turns: the one before may still be read
  u64 all[WAYS];
  u64 before;         // sum of lower blocks
  u32 token;
  float logsum[WARPS];
};

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
__device__ __forceinline__ u64 warp_max(u64 x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const u64 y = __shfl_xor_sync(~0u, x, o);
    x = x > y ? x : y;
  }
  return x;
}

// A thread's numbers put together over the whole cluster; every thread gets all. MAX takes the largest instead of the sum.
template <int N, bool MAX> __device__ void combine(Shared& s, u64 (&x)[N], int rank, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const u64 y = MAX ? warp_max(x[n]) : warp_sum(x[n]);
    if (lane == 0) s.warps[warp][n] = y;
  }
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      u64 y = lane < WARPS ? s.warps[lane][n] : 0;
      y = MAX ? warp_max(y) : warp_sum(y);
      if (lane == 0) s.block[turn][n] = y;
    }
  }
  cluster_sync();
  if (threadIdx.x < N) {
    u64 y = 0, below = 0;
    for (int c = 0; c < CLUSTER; c++) {
      const u64 z = peer(&s.block[turn][threadIdx.x], c)[0];
      y = MAX ? (y > z ? y : z) : y + z;
      if (c < rank) below += z;
    }
    s.all[threadIdx.x] = y;
    if (threadIdx.x == 0) s.before = below;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; n++) x[n] = s.all[n];
  turn ^= 1;
  __syncthreads();
}

// A constrained row's mask (bit id % 32 of word id / 32 says whether id may be chosen) and biases, null where it has none.
struct Constraint {
  const int* mask;
  const float* bias;
};

struct Row {
  const float* logits;
  const int* counts; // null where nothing is penalized
  float* staged;
  float repetition, presence, frequency, temperature, min_p, top;
  int begin, end; // of this block
  Constraint only;

  __device__ __forceinline__ float adjusted(int id) const {
    float x = logits[id];
    if (CONSTRAINED) {
      if (!((u32)only.mask[id >> 5] >> (id & 31) & 1)) return -__int_as_float(0x7f800000);
      if (only.bias) x = __fadd_rn(x, only.bias[id]);
    }
    if (counts) {
      const int count = counts[id];
      if (count) {
        x = x > 0.f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
        const int answered = count & ANSWERED;
        if (answered) x = __fsub_rn(x, __fadd_rn(presence, __fmul_rn(frequency, (float)answered)));
      }
    }
    return x;
  }
  __device__ __forceinline__ float score(int id) const { return STAGED ? staged[id - begin] : adjusted(id); }
  __device__ __forceinline__ u64 weight(float score) const {
    const float share = expf(__fdiv_rn(__fsub_rn(score, top), temperature));
    return share >= min_p ? (u64)(share * UNIT) : 0;
  }
};

// What may be drawn: keys above cut, and of those equal to it the ids below `ids`.
struct Cut {
  u32 key;
  int ids;
  __device__ __forceinline__ bool takes(u32 k, int id) const { return k > key || (k == key && id < ids); }
};

// The largest cut at which what it takes, counted (or weighed), reaches `least` (at least 1).
template <bool WEIGH> __device__ Cut find_cut(Shared& s, const Row& row, Cut kept, u64 least, int vocab, int rank, int& turn) {
  u64 low = 0, high = (u64)ordered(row.top) + 1; // reached at low, not at high
  while (high - low > 1) {
    u64 step = (high - low) / WAYS, x[WAYS - 1] = {};
    step = step ? step : 1;
    for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) {
      const float score = row.score(id);
      const u32 key = ordered(score);
      if (key < low + step || !kept.takes(key, id)) continue;
      const u64 w = WEIGH ? row.weight(score) : 1;
#pragma unroll
      for (int n = 0; n < WAYS - 1; n++) x[n] += key >= low + (n + 1) * step ? w : 0;
    }
    combine<WAYS - 1, false>(s, x, rank, turn);
    u64 from = low, to = high;
#pragma unroll
    for (int n = 0; n < WAYS - 1; n++) {
      const u64 at = low + (n + 1) * step;
      if (at >= high) continue;
      if (x[n] >= least) from = at;
      else if (at < to) to = at;
    }
    low = from, high = to;
  }
  const u32 key = (u32)low;
  u64 x[3] = {}; // what is above the cut, how many lie on it
  for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) {
    const float score = row.score(id);
    const u32 k = ordered(score);
    if (k < key || !kept.takes(k, id)) continue;
    const u64 w = WEIGH ? row.weight(score) : 1;
    if (k > key) x[0] += w;
    else x[1]++, x[2] += w;
  }
  combine<3, false>(s, x, rank, turn);
  if (x[1] == 0) return kept; // fewer than are wanted: all stay
  const u64 each = x[2] / x[1], missing = least > x[0] ? least - x[0] : 0;
  const u64 wanted = each ? (missing + each - 1) / each : x[1];
  if (wanted >= x[1]) return {key, kept.key == key ? kept.ids : vocab};
  int from = 0, to = vocab; // smallest bound below which so many of the equal ones lie: in (from, to]
  while (to - from > 1) {
    const int middle = from + (to - from) / 2;
    u64 below[1] = {0};
    for (int id = row.begin + threadIdx.x; id < row.end && id < middle; id += THREADS) {
      const u32 k = ordered(row.score(id));
      below[0] += k == key && kept.takes(k, id);
    }
    combine<1, false>(s, below, rank, turn);
    if (below[0] >= wanted) to = middle;
    else from = middle;
  }
  return {key, to};
}

// The first id, in their order, at which the running sum of weights exceeds number x their sum.
__device__ u32 pick(Shared& s, const Row& row, Cut cut, double number, int vocab, int rank, int& turn) {
  const int count = row.end - row.begin, each = (count + THREADS - 1) / THREADS;
  const int from = min(row.end, row.begin + (int)threadIdx.x * each), to = min(row.end, from + each);
  u64 own = 0;
  for (int id = from; id < to; id++) {
    const float score = row.score(id);
    if (cut.takes(ordered(score), id)) own += row.weight(score);
  }
  u64 total[1] = {own};
  if (threadIdx.x == 0) s.token = ~0u;
  combine<1, false>(s, total, rank, turn);
  const u64 target = (u64)(number * (double)total[0]), start = s.before;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = own;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const u64 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  if (lane == 31) s.warps[warp][0] = sum;
  __syncthreads();
  u64 before = start + sum - own;
  for (int w = 0; w < warp; w++) before += s.warps[w][0];
  if (before <= target && target < before + own) {
    for (int id = from; id < to; id++) {
      const float score = row.score(id);
      if (cut.takes(ordered(score), id)) before += row.weight(score);
      if (before > target) {
        s.token = id;
        break;
      }
    }
  }
  cluster_sync();
  u32 token = ~0u;
  for (int c = 0; c < CLUSTER; c++) token = min(token, *peer(&s.token, c));
  return token == ~0u ? vocab - 1 : token;
}

// logits [B, V] fp32; settings [B, FIELDS] fp32; numbers [B] fp64; slots [B]; counts [Z, V] or null; last [Z]; ring [*, 2, stride], which may be host
// memory: at its entry `turn` ids, then the bits of log probabilities where they are wanted. An id is -1 where the logits are not finite.
// Grid [B x CLUSTER]. Constrained rows are B of the logits' and the ring's rows, by number, with masks [B, words] and biases [Z, V] or null.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sample(const float* logits, const float* settings, const double* numbers, const int* slots,
    int* counts, int* last, const int* turn_at, int* ring, long long stride, int vocab, const int* rows, const int* masks, const float* biases,
    int words) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  wait_for_input();
  const int b = blockIdx.x / CLUSTER, rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
  const float* f = settings + b * FIELDS;
  const int flags = (int)f[FLAGS], slot = slots[b], at = CONSTRAINED ? rows[b] : b, share = (vocab + CLUSTER - 1) / CLUSTER;
  if (flags & LATER) return; // all blocks of the row
  int turn = 0;
  Row row = {logits + (long long)at * vocab, (flags & PENALIZED) && counts ? counts + (long long)slot * vocab : nullptr,
      reinterpret_cast<float*>(dynamic), f[REPETITION], f[PRESENCE], f[FREQUENCY], f[TEMPERATURE], f[MIN_P], 0.f,
      min(vocab, rank * share), min(vocab, (rank + 1) * share)};
  if (CONSTRAINED) row.only = {masks + (long long)b * words, (flags & BIASED) && biases ? biases + (long long)slot * vocab : nullptr};

  u64 best[3] = {0, 0, 0}; // score and id, logit, whether one is no number
#pragma unroll 4
  for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) {
    const float raw = row.logits[id], x = row.adjusted(id);
    if (STAGED) row.staged[id - row.begin] = x;
    const u64 key = (u64)ordered(x) << 32 | (u32)~id, logit = ordered(raw);
    best[0] = key > best[0] ? key : best[0];
    best[1] = logit > best[1] ? logit : best[1];
    best[2] |= raw != raw;
  }
  combine<3, true>(s, best, rank, turn);
  const u32 high = (u32)best[1];
  const float most = __uint_as_float(high & 0x80000000u ? high & 0x7fffffffu : ~high);
  const bool usable = !best[2] && fabsf(most) < __int_as_float(0x7f800000);
  u32 token = ~(u32)best[0];
  if (usable && f[TEMPERATURE] > 0.f) {
    row.top = row.adjusted((int)token);
    Cut cut = {0, vocab};
    const int k = (int)f[TOP_K];
    if (k > 0 && k < vocab) cut = find_cut<false>(s, row, cut, (u64)k, vocab, rank, turn);
    if (f[TOP_P] < 1.f) {
      u64 total[1] = {0};
      for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) {
        const float score = row.score(id);
        if (cut.takes(ordered(score), id)) total[0] += row.weight(score);
      }
      combine<1, false>(s, total, rank, turn);
      const double limit = (double)f[TOP_P] * (double)total[0];
      u64 least = (u64)limit;
      least += (double)least < limit;
      cut = find_cut<true>(s, row, cut, least ? least : 1, vocab, rank, turn);
    }
    token = pick(s, row, cut, numbers[b], vocab, rank, turn);
  }
  float logprob = 0.f;
  if (usable && (flags & LOGPROB)) {
    float sum = 0.f;
    for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) sum += expf(row.logits[id] - most);
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if ((threadIdx.x & 31) == 0) s.logsum[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = 0.f;
      for (int w = 0; w < WARPS; w++) sum += s.logsum[w];
      s.logsum[0] = sum;
    }
    cluster_sync();
    sum = 0.f;
    for (int c = 0; c < CLUSTER; c++) sum += *peer(&s.logsum[0], c);
    logprob = row.logits[token] - most - logf(sum);
  }
  cluster_sync(); // nobody leaves while others read its memory
  if (rank == 0 && threadIdx.x == 0) {
    int* out = ring + *turn_at * 2 * stride;
    out[at] = usable ? (int)token : -1;
    out[stride + at] = __float_as_int(logprob);
    last[slot] = usable ? (int)token : 0;
    if (row.counts && usable) counts[(long long)slot * vocab + token] += 1;
  }
}

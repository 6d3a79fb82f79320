// The choosing warps of fier_stream.cu: what of each line may belong to the row's best units goes into the row's list, while the next line is scored.
//
// Blocks of a row tell each other twice: normalizers, and a score that enough of the block's units reach. A packet is eight units. Where m packets have
// units that reach a score, at least m units do; so what the enough-th highest of all blocks' scores is reached by as many units as are wanted, for sure.
#pragma once
#include "mail.cuh"
#include "ordered.cuh"
#include "reading.cuh"
#include "stream_score.cuh"

#define CHOOSING (32 * CHOOSERS) // threads
#define PEAK_BINS 256            // of packets' highest scores: eight an octave, from 2^-32 on
#define PEAK_BASE 761
#define MOST_PACKETS (CHOOSING * 4)
#define MOST_TEAM 64             // blocks
#define HEAD_WORDS ((GROUP_HEADS + 2) / 3)
#define STREAM_MAIL (HEAD_WORDS + 1) // words of a block and row

struct Chooser { // shared memory
  __align__(16) real queries[GROUP_HEADS][D + 8]; // padded against bank conflicts
  __align__(16) int peaks[PEAK_BINS];
  __align__(16) float highest[MOST_PACKETS];
  u16 hits[MOST_PACKETS];
  float own[12], zero[12], bound;
  int hit_count;
};
struct Lists { // of all rows
  uint2* units;  // [R, stride] scores and units, in any order
  int* counts;   // [R]
  float* bounds; // [R] what listed units reach
  float* pooled; // for checks: [R, stride] all scores, or null
  long long stride;
};

__device__ __forceinline__ void choosers_sync() { some_sync<1, CHOOSING>(); }

// The query of a line in the order of the products; `raw` are this thread's sixteen bytes of it.
#define QUERY_LOADS ((GROUP_HEADS * D / 8 + CHOOSING - 1) / CHOOSING)
struct Query {
  uint4 raw[QUERY_LOADS];
  __device__ __forceinline__ void load(const real* q) {
    const int t = threadIdx.x - 32 * SCORERS;
#pragma unroll
    for (int k = 0; k < QUERY_LOADS; k++) {
      const int at = (t + k * CHOOSING) * 8;
      if (at < GROUP_HEADS * D) raw[k] = __ldcg(reinterpret_cast<const uint4*>(q + at));
    }
  }
  __device__ __forceinline__ void put(Stream& s, Chooser& c, int slot) const {
    const int t = threadIdx.x - 32 * SCORERS, warp = t >> 5, lane = t & 31;
#pragma unroll
    for (int k = 0; k < QUERY_LOADS; k++) {
      const int at = (t + k * CHOOSING) * 8;
      if (at < GROUP_HEADS * D) *reinterpret_cast<uint4*>(&c.queries[at / D][at % D]) = raw[k];
    }
    choosers_sync();
#pragma unroll
    for (int h = warp; h < 8; h += CHOOSERS) {
      u32 top = 0;
#pragma unroll
      for (int i = lane; i < D; i += 32) top = max(top, h < GROUP_HEADS ? __float_as_uint(fabsf(to_float(c.queries[min(h, GROUP_HEADS - 1)][i]))) : 0);
      top = __reduce_max_sync(~0u, top);
      if (lane == 0) s.exponents[slot][h] = min(max((int)(top >> 23) - 127 - 10, -100), 100); // top / 2^exponent lies in [2^10, 2^11)
    }
    choosers_sync();
#pragma unroll 1
    for (int i = t; i < D / 16 * 32; i += CHOOSING) {
      const int head = MERGED ? i >> 2 & 3 : i >> 2 & 7, from = (i >> 5) * 16 + (i & 3);
      const float down = __uint_as_float((u32)(127 - s.exponents[slot][head]) << 23);
      u32 four[4];
#pragma unroll
      for (int k = 0; k < 4; k++) four[k] = head < GROUP_HEADS ? pack_halves(0.f, to_float(c.queries[min(head, GROUP_HEADS - 1)][from + 4 * k]) * down) : 0;
      s.fragments[slot][i] = make_uint4(four[0], four[1], four[2], four[3]);
    }
    gate_arrive(&s.asked[slot]);
  }
};

// A block's scores of a line.
struct Held {
  const __half* scores; // [GROUP_HEADS, stride]
  int stride, rank, blocks, packets, first, last;

  __device__ __forceinline__ int unit(int packet) const { return (rank + (packet >> 2) * blocks) * 32 + (packet & 3) * 8; }
  // Pooled scores of a packet, -1 of units that are no candidates; add: what is added to its warp's scores.
  __device__ __forceinline__ void pool(int packet, const float (&add)[GROUP_HEADS], float (&out)[8]) const {
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; h++) {
      const uint4 v = *reinterpret_cast<const uint4*>(scores + h * stride + packet * 8);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
        const float x = exp2_fast(f.x + add[h]), y = exp2_fast(f.y + add[h]);
        out[2 * k] = h == 0 ? x : MAXIMUM ? fmaxf(out[2 * k], x) : out[2 * k] + x;
        out[2 * k + 1] = h == 0 ? y : MAXIMUM ? fmaxf(out[2 * k + 1], y) : out[2 * k + 1] + y;
      }
    }
    const int u = unit(packet);
    if (u >= first && u + 8 <= last) return;
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = u + k >= first && u + k < last ? out[k] : -1.f;
  }
};

__device__ __forceinline__ int peak_bin(float x) { return min(max((int)(__float_as_uint(x) >> 20) - PEAK_BASE, 0), PEAK_BINS - 1); }

// One warp: the bin that `enough` packets of this block reach is told to the team; then the bound of all. Bins are left empty.
__device__ __forceinline__ void find_bound(Chooser& c, uint4* mail, int rank, int blocks, u32 stamp, int wanted) {
  const int lane = threadIdx.x & 31, base = PEAK_BINS - 8 * (lane + 1);
  const int agreeing = max(1, blocks * 3 / 5), enough = (wanted + agreeing - 1) / agreeing;
  int4* bins = reinterpret_cast<int4*>(c.peaks + base);
  const int4 a = bins[0], b = bins[1];
  const int n[8] = {b.w, b.z, b.y, b.x, a.w, a.z, a.y, a.x};
  bins[0] = bins[1] = {0, 0, 0, 0};
  int sum = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) sum += n[k];
  const int end = warp_scan(sum);
  const u32 found = __ballot_sync(~0u, end >= enough);
  int seen = end - sum, bin = base + 8;
#pragma unroll
  for (int k = 0; k < 8; k++) bin -= seen < enough, seen += n[k];
  bin = __shfl_sync(~0u, bin, found ? __ffs(found) - 1 : 0);
  if (found == 0) bin = 0;
  if (lane == 0) post(mail + rank, bin, 0, 0, stamp), c.hit_count = 0;
  const int other0 = lane < blocks ? (int)await(mail + min(lane, blocks - 1), stamp).x : -1;
  const int other1 = lane + 32 < blocks ? (int)await(mail + min(lane + 32, blocks - 1), stamp).x : -1;
  __syncwarp();
  bin = 0;
#pragma unroll
  for (int bit = PEAK_BINS / 2; bit; bit >>= 1) {
    const int reach = __popc(__ballot_sync(~0u, other0 >= bin + bit)) + __popc(__ballot_sync(~0u, other1 >= bin + bit));
    if (reach >= agreeing) bin += bit;
  }
  if (lane == 0) c.bound = bin ? __uint_as_float((u32)(bin + PEAK_BASE) << 20) : 0.f;
}

// What is subtracted from a head's scores, so that it is normalized over the row, by the warp of each word of three heads.
__device__ __forceinline__ void find_zero(Chooser& c, const uint4* mail, int blocks, u32 stamp) {
  const int lane = threadIdx.x & 31, word = (threadIdx.x >> 5) - SCORERS;
  if (word >= HEAD_WORDS) return;
  float x[2][3];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    uint4 v = make_uint4(0xff61b1e6u, 0xff61b1e6u, 0xff61b1e6u, 0); // -3e38
    if (lane + 32 * k < blocks) v = await(mail + word * blocks + lane + 32 * k, stamp);
    x[k][0] = __uint_as_float(v.x), x[k][1] = __uint_as_float(v.y), x[k][2] = __uint_as_float(v.z);
  }
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 3; h++) {
    const float top = highest(fmaxf(x[0][h], x[1][h]));
    float total = exp2_fast(x[0][h] - top) + exp2_fast(x[1][h] - top);
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane == 0) c.zero[3 * word + h] = top + log2f(total) + (MAXIMUM ? 0.f : log2f((float)GROUP_HEADS));
  }
}

// Log2 of the sums of exponentials of this block, told to the team.
__device__ __forceinline__ void tell_sums(const Stream& s, Chooser& c, int buffer, uint4* mail, int rank, int blocks, u32 stamp) {
  const int t = threadIdx.x - 32 * SCORERS, lane = t & 31;
#pragma unroll
  for (int h = t >> 5; h < GROUP_HEADS; h += CHOOSERS) {
    const float x = lane < SCORERS ? s.refs[buffer][lane & (SCORERS - 1)][h] + s.sums[buffer][lane & (SCORERS - 1)][h] : -3e38f, top = highest(x);
    float total = exp2_fast(x - top);
#pragma unroll
    for (int o = 8; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane == 0) c.own[h] = top + log2f(total);
  }
  choosers_sync();
  if (t < HEAD_WORDS) {
    post(mail + t * blocks + rank, __float_as_uint(c.own[3 * t]), __float_as_uint(c.own[3 * t + 1]), __float_as_uint(c.own[3 * t + 2]), stamp);
  }
}

// List the units of hit packets that reach the bound; the scores are not needed behind.
__device__ __forceinline__ void list_units(const Stream& s, Chooser& c, const Held& held, int buffer, u64* empty, int row, const Lists& lists) {
  const int lane = threadIdx.x & 31, count = c.hit_count;
  const float bound = c.bound;
#pragma unroll 1
  for (int h = threadIdx.x - 32 * SCORERS; h - lane < count; h += CHOOSING) {
    float score[8];
    u32 set = 0;
    int u = 0;
    if (h < count) {
      const int packet = c.hits[h], warp = packet >> 3 & (SCORERS - 1);
      float add[GROUP_HEADS];
#pragma unroll
      for (int j = 0; j < GROUP_HEADS; j++) add[j] = s.refs[buffer][warp][j] - c.zero[j];
      held.pool(packet, add, score);
      u = held.unit(packet);
#pragma unroll
      for (int k = 0; k < 8; k++) set |= (u32)(score[k] >= bound) << k;
    }
    if (h - lane + CHOOSING >= count) gate_arrive(empty); // this warp's last ones
    const int mine = __popc(set), end = warp_scan(mine);
    int to = 0;
    if (lane == 31 && end) to = atomicAdd(lists.counts + row, end);
    to = __shfl_sync(~0u, to, 31) + end - mine;
    uint2* list = lists.units + row * lists.stride;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (set >> k & 1) list[to++] = make_uint2(__float_as_uint(score[k]), u + k);
    }
  }
  if ((int)threadIdx.x - 32 * SCORERS - lane >= count) gate_arrive(empty);
}

// mail [R, STREAM_MAIL, blocks]: words of heads, then the bin. q_of(line): a line's query.
template <typename QueryOf> __device__ __forceinline__ void choose_lines(Stream& s, Chooser& c, const __half* buffers, int stride, int rank, int blocks,
    uint4* mail_words, const u32* stamps, const Lists& lists, QueryOf q_of) {
  const int t = threadIdx.x - 32 * SCORERS, live = s.live;
  Query query;
  dependency_wait();
  const u32 stamp = __ldcg(stamps) + 1;
#pragma unroll 1
  for (int i = 0; i < min(live, 2); i++) query.load(q_of(s.lines[i])), choosers_sync(), query.put(s, c, i);
#pragma unroll
  for (int i = t; i < PEAK_BINS; i += CHOOSING) c.peaks[i] = 0;
#pragma unroll 1
  for (int i = 0; i < live; i++) {
    const Line line = s.lines[i];
    const int buffer = i % BUFFERS;
    uint4* mail = mail_words + (long long)line.row * STREAM_MAIL * blocks;
    if (i + 2 < live) query.load(q_of(s.lines[i + 2]));
    gate_await(&s.full[buffer], i / BUFFERS & 1);
    tell_sums(s, c, buffer, mail, rank, blocks, stamp);
    if (i + 2 < live) query.put(s, c, i & 1);
    find_zero(c, mail, blocks, stamp);
    choosers_sync();
    const Held held = {buffers + buffer * GROUP_HEADS * stride, stride, rank, blocks, line.count * 4, line.first, line.last};
    float add[GROUP_HEADS]; // packets of a thread are of one warp
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; h++) add[h] = s.refs[buffer][t >> 3][h] - c.zero[h];
#pragma unroll 1
    for (int p = t; p < held.packets; p += CHOOSING) {
      float score[8];
      held.pool(p, add, score);
      float top = score[0];
#pragma unroll
      for (int k = 1; k < 8; k++) top = fmaxf(top, score[k]);
      c.highest[p] = top;
      const int bin = peak_bin(fmaxf(top, 0.f));
      if (bin) atomicAdd(&c.peaks[bin], 1);
      if (lists.pooled) {
#pragma unroll
        for (int k = 0; k < 8; k++) lists.pooled[line.row * lists.stride + held.unit(p) + k] = score[k];
      }
    }
    choosers_sync();
    if (t < 32) find_bound(c, mail + HEAD_WORDS * blocks, rank, blocks, stamp, line.wanted);
    choosers_sync();
    const float bound = c.bound;
    if (rank == 0 && t == 0) lists.bounds[line.row] = bound;
#pragma unroll 1
    for (int p = t; p < held.packets; p += CHOOSING) {
      if (c.highest[p] >= bound) c.hits[atomicAdd(&c.hit_count, 1)] = p;
    }
    choosers_sync();
    list_units(s, c, held, buffer, &s.empty[buffer], line.row, lists);
  }
}

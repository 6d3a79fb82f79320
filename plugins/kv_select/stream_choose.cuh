// The choosing warps of fier_stream.cu: what of each line may belong to the row's best units goes into the row's list, while the next line is scored.
//
// Blocks of a row tell each other twice: normalizers, and a score that enough of the block's units reach. A packet is eight units. Where m packets have
// units that reach a score, at least m units do; so what the enough-th highest of all blocks' scores is reached by as many units as are wanted, for sure.
#pragma once
#include "mail.cuh"
#include "ordered.cuh"
#include "reading.cuh"
#include "stream_score.cuh"

#define CHOOSING (32 * CHOOSERS) // threads of a group
#define PEAK_BINS 256            // of packets' highest scores: eight an octave, from 2^-32 on
#define PEAK_BASE 761
#define THREAD_PACKETS 4 // at most
#define MOST_TEAM 64             // blocks
#define STREAM_MAIL (GROUP_HEADS + 1) // words of a block and row

struct Chooser { // shared memory
  __align__(16) real queries[GROUP_HEADS][D + 8]; // padded against bank conflicts
  __align__(16) int peaks[PEAK_BINS];
  float zero[8];
};
struct Lists { // of all rows
  uint2* units;  // [R, stride] scores and units, in any order
  int* counts;   // [R]
  float* bounds; // [R] what listed units reach
  float* pooled; // for checks: [R, stride] all scores, or null
  long long stride;
};

__device__ __forceinline__ int own_thread() { return threadIdx.x & (CHOOSING - 1); } // of the group
__device__ __forceinline__ void choosers_sync() { some_sync<CHOOSING>(1 + (threadIdx.x - 32 * SCORERS) / CHOOSING); }

// The query of a line in the order of the products: fetched, then put.
struct Query {
  __device__ __forceinline__ void fetch(Chooser& c, const real* q) const {
#pragma unroll
    for (int at = own_thread() * 8; at < GROUP_HEADS * D; at += CHOOSING * 8) copy16(shared_at(&c.queries[at / D][at % D]), q + at);
    copies_commit();
  }
  __device__ __forceinline__ void put(Stream& s, Chooser& c, int slot) const {
    const int t = own_thread(), warp = t >> 5, lane = t & 31;
    copies_wait<0>();
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
  const u16* scores; // [GROUP_HEADS, stride]
  int stride, rank, blocks, packets, first, last;

  __device__ __forceinline__ int unit(int packet) const { return (rank + (packet >> 2) * blocks) * 32 + (packet & 3) * 8; }
  // Pooled scores of a packet, -1 of units that are no candidates; weight: of its warp's exponentials.
  __device__ __forceinline__ void pool(int packet, const float (&weight)[GROUP_HEADS], float (&out)[8]) const {
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; h++) {
      const uint4 v = *reinterpret_cast<const uint4*>(scores + h * stride + packet * 8);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float x = __uint_as_float(words[k] << 16), y = __uint_as_float(words[k] & 0xffff0000u);
        if (MAXIMUM) {
          out[2 * k] = fmaxf(h == 0 ? 0.f : out[2 * k], x * weight[h]), out[2 * k + 1] = fmaxf(h == 0 ? 0.f : out[2 * k + 1], y * weight[h]);
        } else {
          out[2 * k] = h == 0 ? x * weight[h] : fmaf(x, weight[h], out[2 * k]), out[2 * k + 1] = h == 0 ? y * weight[h] : fmaf(y, weight[h], out[2 * k + 1]);
        }
      }
    }
    const int u = unit(packet);
    if (u >= first && u + 8 <= last) return;
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = u + k >= first && u + k < last ? out[k] : -1.f;
  }
};

__device__ __forceinline__ int peak_bin(float x) { return min(max((int)(__float_as_uint(x) >> 20) - PEAK_BASE, 0), PEAK_BINS - 1); }

// Log2 of the sums of exponentials of this block, told to the team: a warp a head.
__device__ __forceinline__ void tell_sums(const Stream& s, int buffer, uint4* mail, int rank, int blocks, u32 stamp) {
  const int t = own_thread(), lane = t & 31;
#pragma unroll
  for (int h = t >> 5; h < GROUP_HEADS; h += CHOOSERS) {
    const float sum = s.sums[buffer][lane & (SCORERS - 1)][h];
    const float x = lane < SCORERS && sum > 0.f ? s.refs[buffer][lane & (SCORERS - 1)][h] + log2f(sum) : -3e38f, top = highest(x);
    float total = exp2_fast(x - top);
#pragma unroll
    for (int o = SCORERS / 2; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane == 0) post(mail + h * blocks + rank, __float_as_uint(top + log2f(total)), 0, 0, stamp);
  }
}
// What is subtracted from every head's scores, so that they are normalized over the row.
__device__ __forceinline__ void find_zero(Chooser& c, const uint4* mail, int blocks, u32 stamp) {
  constexpr int EACH = (GROUP_HEADS + CHOOSERS - 1) / CHOOSERS;
  const int lane = threadIdx.x & 31, warp = own_thread() >> 5;
  uint4 v[EACH][2];
#pragma unroll
  for (int e = 0; e < EACH; e++) { // all are asked for before one is waited for
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int h = warp + e * CHOOSERS, p = lane + 32 * k;
      v[e][k] = make_uint4(0xff61b1e6u, 0, 0, stamp); // -3e38
      if (h < GROUP_HEADS && p < blocks) v[e][k] = look(mail + h * blocks + p);
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int h = warp + e * CHOOSERS;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (v[e][k].w != stamp) v[e][k] = await(mail + h * blocks + lane + 32 * k, stamp);
    }
    __syncwarp();
    const float x = __uint_as_float(v[e][0].x), y = __uint_as_float(v[e][1].x), top = highest(fmaxf(x, y));
    float total = exp2_fast(x - top) + exp2_fast(y - top);
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane == 0 && h < GROUP_HEADS) c.zero[h] = top + log2f(total) + (MAXIMUM ? 0.f : log2f((float)GROUP_HEADS));
  }
}

// How many blocks of a team agree on a bound, and how many packets of each reach it.
struct Agreement {
  int blocks, packets;
  __device__ __forceinline__ Agreement(int team, int wanted) : blocks(max(1, team * 3 / 4)), packets((wanted + blocks - 1) / blocks) {}
};
// One warp: tell the bin that enough packets of this block reach. Bins are left empty.
__device__ __forceinline__ void tell_peaks(Chooser& c, uint4* mail, int rank, int enough, u32 stamp) {
  const int lane = threadIdx.x & 31, base = PEAK_BINS - 8 * (lane + 1);
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
  if (lane == 0) post(mail + rank, found ? bin : 0, 0, 0, stamp);
}
// Every warp for itself: the highest score that enough blocks have told, or more.
__device__ __forceinline__ float find_bound(const uint4* mail, int blocks, int agreeing, u32 stamp) {
  const int lane = threadIdx.x & 31;
  int told0 = -1, told1 = -1, bin = 0;
  if (lane < blocks) told0 = await(mail + lane, stamp).x;
  if (lane + 32 < blocks) told1 = await(mail + lane + 32, stamp).x;
  __syncwarp();
#pragma unroll
  for (int bit = PEAK_BINS / 2; bit; bit >>= 1) {
    const int reach = __popc(__ballot_sync(~0u, told0 >= bin + bit)) + __popc(__ballot_sync(~0u, told1 >= bin + bit));
    if (reach >= agreeing) bin += bit;
  }
  return bin ? __uint_as_float((u32)(bin + PEAK_BASE) << 20) : 0.f;
}

// Pool the line's packets; a thread's are of one warp. The buffer is free behind.
__device__ __forceinline__ void pool_line(const Stream& s, Chooser& c, const Held& held, int buffer, u64* empty, float* pooled, float* check) {
  const int t = own_thread();
  float weight[GROUP_HEADS];
#pragma unroll
  for (int h = 0; h < GROUP_HEADS; h++) weight[h] = exp2_fast(s.refs[buffer][t >> 3 & (SCORERS - 1)][h] - c.zero[h]);
#pragma unroll 1
  for (int p = t; p < held.packets; p += CHOOSING) {
    float score[8];
    held.pool(p, weight, score);
    *reinterpret_cast<float4*>(pooled + p * 8) = make_float4(score[0], score[1], score[2], score[3]);
    *reinterpret_cast<float4*>(pooled + p * 8 + 4) = make_float4(score[4], score[5], score[6], score[7]);
    float top = score[0];
#pragma unroll
    for (int k = 1; k < 8; k++) top = fmaxf(top, score[k]);
    const int bin = peak_bin(fmaxf(top, 0.f));
    if (bin) atomicAdd(&c.peaks[bin], 1);
    if (check) {
#pragma unroll
      for (int k = 0; k < 8; k++) check[held.unit(p) + k] = score[k];
    }
  }
  gate_arrive(empty);
}
// List the units of this thread's packets that reach the bound.
__device__ __forceinline__ void list_units(const Held& held, const float* pooled, float bound, int row, const Lists& lists) {
  const int t = own_thread(), lane = t & 31;
  u32 set = 0;
#pragma unroll
  for (int i = 0; i < THREAD_PACKETS; i++) {
    const int p = t + i * CHOOSING;
    if (p >= held.packets) break;
    const float4 a = *reinterpret_cast<const float4*>(pooled + p * 8), b = *reinterpret_cast<const float4*>(pooled + p * 8 + 4);
    const float score[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int k = 0; k < 8; k++) set |= (u32)(score[k] >= bound) << (8 * i + k);
  }
  const int mine = __popc(set), end = warp_scan(mine);
  int to = 0;
  if (lane == 31 && end) to = atomicAdd(lists.counts + row, end);
  to = __shfl_sync(~0u, to, 31) + end - mine;
  uint2* list = lists.units + row * lists.stride;
#pragma unroll 1
  for (; set; set &= set - 1) {
    const int k = __ffs(set) - 1, p = t + (k >> 3) * CHOOSING;
    list[to++] = make_uint2(__float_as_uint(pooled[p * 8 + (k & 7)]), held.unit(p) + (k & 7));
  }
}

// mail [R, STREAM_MAIL, blocks]: words of heads, then the bin. q_of(line): a line's query. A group of warps has every other line; while blocks tell each
// other about one, it looks after the one before.
template <typename QueryOf> __device__ __forceinline__ void choose_lines(Stream& s, Chooser& c, int group, const u16* buffers, float* pooled, int stride,
    int rank, int blocks, uint4* mail_words, const u32* stamps, const Lists& lists, QueryOf q_of) {
  const int t = own_thread(), live = s.live;
  Query query;
  dependency_wait();
  const u32 stamp = __ldcg(stamps) + 1;
  auto mail_of = [&](const Line& line) { return mail_words + (long long)line.row * STREAM_MAIL * blocks; };
  if (group < live) query.fetch(c, q_of(s.lines[group])), query.put(s, c, group);
  choosers_sync(); // the query has been read
#pragma unroll
  for (int i = t; i < PEAK_BINS; i += CHOOSING) c.peaks[i] = 0;
#pragma unroll 1
  for (int i = group; i < live + 2; i += 2) {
    const int buffer = i % BUFFERS;
    if (i < live) {
      if (i + 2 < live) query.fetch(c, q_of(s.lines[i + 2]));
      gate_await(&s.full[buffer], i / BUFFERS & 1);
      tell_sums(s, buffer, mail_of(s.lines[i]), rank, blocks, stamp);
      if (i + 2 < live) query.put(s, c, group);
    }
    if (i >= 2) {
      const Line& line = s.lines[i - 2];
      const Held held = {nullptr, stride, rank, blocks, line.count * 4, line.first, line.last};
      const float bound = find_bound(mail_of(line) + GROUP_HEADS * blocks, blocks, Agreement(blocks, line.wanted).blocks, stamp);
      if (rank == 0 && t == 0) lists.bounds[line.row] = bound;
      list_units(held, pooled, bound, line.row, lists);
    }
    if (i >= live) break;
    const Line& line = s.lines[i];
    uint4* mail = mail_of(line);
    find_zero(c, mail, blocks, stamp);
    choosers_sync();
    const Held held = {buffers + buffer * GROUP_HEADS * stride, stride, rank, blocks, line.count * 4, line.first, line.last};
    pool_line(s, c, held, buffer, &s.empty[buffer], pooled, lists.pooled ? lists.pooled + line.row * lists.stride : nullptr);
    choosers_sync();
    if (t < 32) tell_peaks(c, mail + GROUP_HEADS * blocks, rank, Agreement(blocks, line.wanted).packets, stamp);
  }
}

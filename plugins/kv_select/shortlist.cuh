// The choice of a row's best units in one exchange more than scores need: every block tells its own best ones, and all blocks choose among them.
//
// A block counts its scores in bins of which a higher one holds higher scores, and tells what lies in the highest bins that its list has room for. No
// block keeps a better unit to itself where enough of what was told lies above all that was not; a row of which that is not so is left to exchange.cuh.
// Raw scores are told before they are normalized, because a block's order does not depend on that. Built as pooling.cuh says.
#pragma once
#include "exchange.cuh"

#define A_WORD (HEADS > 1 ? 2 : 3)      // units
#define MINE (2 * A_WORD)               // units of a thread
#define MOST_SHORT_UNITS (64 * THREADS) // of a block: a bit each
#define MOST_SHORT_BLOCKS 64            // of a row
#define SHORT_MAIL 33                   // words of a block
static_assert(THREADS >= 256, "two words of a row's lists are read by a thread");

// The lists of a row: a word a block that says what was not told, then `words` of each.
struct Lists {
  uint4* heads;
  int blocks, shift;
  __device__ __forceinline__ Lists(const Mail& mail) : heads(mail.list() + CROWD), blocks(mail.blocks), shift(shift_of(mail.blocks)) {}
  __device__ __forceinline__ static int shift_of(int blocks) { return blocks <= 16 ? 5 : blocks <= 32 ? 4 : 3; }
  __device__ __forceinline__ static int room(int blocks) { return A_WORD << shift_of(blocks); }
  __device__ __forceinline__ uint4* of(int block) const { return heads + blocks + (block << shift); }
  __device__ __forceinline__ int block_of(int word) const { return min(word >> shift, blocks - 1); }
};

// The bin with the wanted-th unit, in all lanes; bin -1 and how many there are where there are fewer. A warp for itself.
__device__ __forceinline__ Cut warp_cut(const int* counts, int wanted) {
  const int lane = threadIdx.x & 31, base = BINS - 8 * (lane + 1);
  const int4 a = *reinterpret_cast<const int4*>(counts + base), b = *reinterpret_cast<const int4*>(counts + base + 4);
  const int v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  const int sum = v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7], end = warp_scan(sum);
  int above = end - sum, bin = -1, count = 0;
  const u32 found = __ballot_sync(~0u, end >= wanted);
  if (found == 0) return {-1, __shfl_sync(~0u, end, 31), 0};
#pragma unroll
  for (int i = 7; i >= 0; i--) {
    if (bin < 0) {
      if (above + v[i] >= wanted) bin = base + i, count = v[i];
      else above += v[i];
    }
  }
  const int from = __ffs(found) - 1;
  return {__shfl_sync(~0u, bin, from), __shfl_sync(~0u, above, from), __shfl_sync(~0u, count, from)};
}

// Bins of raw scores minus their part's reference: eight an octave of the distance from it, from 1/32 to 2048.
#define NEAREST 80
__device__ __forceinline__ int raw_bin(u32 half) {
  const int distance = min(max((int)(half >> 7 & 255) - NEAREST, 0), 127);
  return half & 0x8000u ? 127 - distance : 128 + distance;
}
// No score in the bin or below it is higher than this half.
__device__ __forceinline__ u32 raw_bound(int bin) {
  if (bin < 0) return 0xfc00u;
  if (bin < 127) return 0x8000u | (127 - bin + NEAREST) << 7;
  return bin == 127 ? 0 : bin == 255 ? 0x7c00u : (bin - 127 + NEAREST) << 7;
}
__device__ __forceinline__ float wide_half(u32 half) {
  const u32 both = half & 0xffffu;
  return __half22float2(*reinterpret_cast<const __half2*>(&both)).x;
}

__device__ __forceinline__ void count_raw(Desk& s, __half2 both, int unit, const Reading& row) {
  const u32 halves = *reinterpret_cast<const u32*>(&both);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    if (unit + k >= row.first && unit + k < row.last) atomicAdd(&s.own[raw_bin(halves >> 16 * k)], 1);
  }
}

// A unit of a list: what it is compared by, and its number in the block, from one on; 0 is none.
struct Listed {
  u32 image;
  int unit;
};

// A block's list, in the order of its units. part: of its scores, in thread 0, where they are raw.
__device__ __forceinline__ void tell_best(Desk& s, const Mail& mail, const Lists& lists, const Units& units, float4 part, int& turn) {
  const int tid = threadIdx.x, packets = units.count / 8, each = (packets + THREADS - 1) / THREADS;
  const int from = min(packets, tid * each), to = min(packets, from + each);
  const Cut cut = warp_cut(s.own, Lists::room(mail.blocks) + 1);
  const int least = max(cut.bin + 1, HEADS > 1 ? 1 : 0); // of what is told; softmaxes below all bins are in none
  u64 set = 0;
#pragma unroll 1
  for (int p = to - 1; p >= from; p--) {
    u32 bits = 0;
    if (HEADS > 1) {
      const uint4 a = reinterpret_cast<const uint4*>(units.exact)[2 * p], b = reinterpret_cast<const uint4*>(units.exact)[2 * p + 1];
      const u32 v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 8; k++) bits |= (u32)(v[k] && units.key_again(v[k]) >> 6 >= least) << k;
    } else {
      const uint4 a = reinterpret_cast<const uint4*>(units.scores)[p];
      const u32 v[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int u = units.begin + 8 * p + k;
        bits |= (u32)(u >= units.first && u < units.last && raw_bin(v[k >> 1] >> 16 * (k & 1)) >= least) << k;
      }
    }
    set = set << 8 | bits;
  }
  const int mine = __popc((u32)set) + __popc((u32)(set >> 32));
  const int end = block_scan(mine, s.warp_sums, turn);
  int at = end - mine;
  if (tid == THREADS - 1) s.listed = end;
#pragma unroll 1
  for (; set; set &= set - 1) {
    const u32 lower = (u32)set;
    const int unit = 8 * from + (lower ? __ffs(lower) - 1 : 31 + __ffs((u32)(set >> 32)));
    if (HEADS > 1) s.list[at] = (u64)units.exact[unit] << 32 | (u32)(unit + 1);
    else reinterpret_cast<u32*>(s.list)[at] = (u32)(unit + 1) << 16 | reinterpret_cast<const u16*>(units.scores)[unit];
    at++;
  }
  __syncthreads();
  if (tid >> lists.shift == 0) {
    const int first = tid * A_WORD, count = s.listed;
    if (HEADS > 1) {
      const u64 x = first < count ? s.list[first] : 0, y = first + 1 < count ? s.list[first + 1] : 0;
      post(lists.of(mail.rank) + tid, (u32)(x >> 32), (u32)(y >> 32), (u32)x | (u32)y << 16, mail.stamp);
    } else {
      const u32* list = reinterpret_cast<const u32*>(s.list) + first;
      post(lists.of(mail.rank) + tid, first < count ? list[0] : 0, first + 1 < count ? list[1] : 0, first + 2 < count ? list[2] : 0, mail.stamp);
    }
  }
  if (tid == 0) {
    if (HEADS > 1) {
      post(lists.heads + mail.rank, (u32)(units.base + (least << 19)), 0, 0, mail.stamp); // every higher softmax was told
    } else {
      const u32 lowest = pack_halves(part.z - part.x, 0.f) & 0xffffu;
      post(lists.heads + mail.rank, __float_as_uint(part.y), raw_bound(least - 1) | lowest << 16, __float_as_uint(part.x), mail.stamp);
    }
  }
}

// What all blocks have told, read by one block: a thread's units, and where they lie among all.
struct Told {
  Listed of[MINE];
  int bin[MINE]; // -1: none, or something that was not told may be better
};

// Bins of what is better than all that was not told, counted in s.total.
__device__ __forceinline__ void read_lists(Desk& s, const Mail& mail, const Lists& lists, Told& told) {
  const int lane = threadIdx.x & 31, all = mail.blocks << lists.shift, at = 2 * threadIdx.x;
  const uint4* words = lists.of(0) + at;
  uint4 v[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    v[e] = make_uint4(0, 0, 0, 0);
    if (at + e < all) v[e] = look(words + e);
  }
  float top = -3e38f, low = 3e38f, ref[2] = {0.f, 0.f}, bound[2];
  u32 least = 0;
#pragma unroll
  for (int k = 0; k < MOST_SHORT_BLOCKS / 32; k++) {
    bound[k] = __uint_as_float(0xff800000u);
    if (lane + 32 * k >= mail.blocks) continue;
    const uint4 head = await(lists.heads + lane + 32 * k, mail.stamp);
    if (HEADS > 1) {
      least = max(least, head.x);
    } else {
      top = fmaxf(top, __uint_as_float(head.x)), ref[k] = __uint_as_float(head.z), bound[k] = wide_half(head.y);
      low = fminf(low, wide_half(head.y >> 16) + ref[k]);
    }
  }
  __syncwarp();
  float base = 0.f, factor = 0.f;
  if (HEADS > 1) {
    least = __reduce_max_sync(~0u, least) | 0x80000000u; // the image of a positive number
  } else {
    top = highest(top);
    float most = __uint_as_float(0xff800000u); // of what was not told
#pragma unroll
    for (int k = 0; k < MOST_SHORT_BLOCKS / 32; k++) most = fmaxf(most, bound[k] + (ref[k] - top));
    most = highest(most);
    least = ordered(most) + 1; // what is as high as that may have a rival
    base = most > -3e38f ? most : -highest(-low) - top, factor = BINS / fmaxf(-base, 1e-30f);
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int block = lists.block_of(at + e);
    while (at + e < all && v[e].w != mail.stamp) v[e] = look(words + e);
    __syncwarp();
    const float low_ref = __shfl_sync(~0u, ref[0], block & 31), high_ref = __shfl_sync(~0u, ref[1], block & 31);
    const float add = (block < 32 ? low_ref : high_ref) - top;
    const u32 w[3] = {v[e].x, v[e].y, v[e].z};
#pragma unroll
    for (int k = 0; k < A_WORD; k++) {
      Listed& one = told.of[e * A_WORD + k];
      int& bin = told.bin[e * A_WORD + k];
      if (HEADS > 1) {
        one = {w[k], (int)(w[2] >> 16 * k & 0xffffu)};
        bin = (int)min((one.image - least) >> 17, BINS - 1u); // 64 an octave
      } else {
        const float x = wide_half(w[k]) + add;
        one = {ordered(x), (int)(w[k] >> 16)};
        bin = (int)fminf(fmaxf((x - base) * factor, 0.f), BINS - 1.f);
      }
      if (one.unit == 0 || one.image < least) bin = -1;
      else atomicAdd(&s.total[bin], 1);
    }
  }
}

// Choose the wanted best of the row among what was told; false, in all blocks, where that does not decide it.
__device__ __forceinline__ bool choose_listed(Desk& s, const Mail& mail, const Lists& lists, const Reading& row, int per, int* out, int turn) {
  Told told;
  read_lists(s, mail, lists, told);
  __syncthreads();
  MARK(9)
  const Cut cut = warp_cut(s.total, row.wanted);
  const int need = row.wanted - cut.above;
  if (cut.bin < 0 || (cut.count > CROWD && cut.count != need)) return false;
  const int at = 2 * threadIdx.x;
  int chosen = 0;
  u32 set = 0;
#pragma unroll
  for (int i = 0; i < MINE; i++) set |= (u32)(told.bin[i] > cut.bin || (told.bin[i] == cut.bin && cut.count == need)) << i;
  if (cut.count != need) {
    auto value = [&](int i) { return Candidates::value(told.of[i].image, lists.block_of(at + i / A_WORD) * per + told.of[i].unit - 1); };
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (told.bin[i] == cut.bin) s.few[atomicAdd(&s.left, 1)] = value(i);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (told.bin[i] != cut.bin) continue;
      const u64 own = value(i);
      int better = 0;
#pragma unroll 1
      for (int k = 0; k < cut.count; k++) better += s.few[k] > own;
      set |= (u32)(better < need) << i;
    }
  }
  MARK(10)
  chosen = __popc(set);
  int to = block_scan(chosen, s.warp_sums, turn) - chosen;
  MARK(13)
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    if (!(set >> i & 1)) continue;
    const int block = lists.block_of(at + i / A_WORD);
    if (block == mail.rank) out[row.first + to] = block * per + told.of[i].unit - 1;
    to++;
  }
  return true;
}

// As choose_units where the lists decide; false, in all blocks, where they do not. s.own: counts of raw scores by raw_bin; per: units of every block.
__device__ __forceinline__ bool choose_short(Desk& s, const Mail& mail, const Reading& row, Units& units, int* out, u32* stamp, float4 part, int per) {
  int turn = 0;
  const Lists lists(mail);
  if (HEADS > 1) {
    float add[HEADS];
    normalize(s, mail, add);
    units.scale(s.low, (MAXIMUM ? HEADS : 1) / (float)row.wanted);
    MARK(6)
    if (units.count <= 2 * THREADS) units.pool_all<1>(add, s.own);
    else units.pool_all<4>(add, s.own);
    __syncthreads();
  }
  tell_best(s, mail, lists, units, part, turn);
  MARK(7)
  put_forced(mail, row, out);
  if (!choose_listed(s, mail, lists, row, per, out, turn)) return false;
  put_stamp(mail, row, out, stamp);
  MARK(14)
  return true;
}

// Exact top-k of a row whose scorer kept only what may be chosen (fier_lists.cuh), one thread-block cluster a key-value head: the choice of select.cu.
//
// Built as ranking.cuh says, for HEADS > 1. A block of the cluster reads the lists of its share of the parts, which are neighbours. Once normalizers are
// known, so is the largest score that a token outside the lists may have; tokens above it are kept in shared memory and ranked. Where fewer than may be
// chosen lie above it, or more than fit, the row is left to fier.cu and select.cu behind.
#include "ranking.cuh"
#include "lists.cuh"
#include "reading.cuh"

struct Entry {
  u32 h[HEADS][2], set;
  int part;
};
// The lists of a block.
struct Listed {
  const __half* scores; // of all rows
  long long row, stride;
  int parts, first_part, lists; // parts of the row, first of this block; its lists
  const int* starts;            // [lists + 1] where a list's entries begin in those of the block

  __device__ __forceinline__ void load(int i, Entry& entry) const {
    int from = 0, to = lists - 1; // the last list that begins at or before entry i is the one that it is in
    while (from < to) {
      const int middle = (from + to + 1) >> 1;
      if (starts[middle] <= i) from = middle;
      else to = middle - 1;
    }
    entry.part = first_part + from / LIST_WARPS;
    const List<HEADS> list(const_cast<__half*>(scores), row, stride, parts, entry.part, from % LIST_WARPS);
    const int at = i - starts[from];
    const uint4* data = reinterpret_cast<const uint4*>(list.entries + (long long)at * list.ENTRY);
#pragma unroll
    for (int j = 0; j < HEADS; j += 2) {
      const uint4 v = __ldcg(data + j / 2);
      entry.h[j][0] = v.x, entry.h[j][1] = v.y;
      if (j + 1 < HEADS) entry.h[(j + 1) % HEADS][0] = v.z, entry.h[(j + 1) % HEADS][1] = v.w;
    }
    entry.set = __ldcg(list.sets + at);
  }
};
// Tokens of a block that may be chosen.
struct Kept {
  u32 *scores, *units; // [room] order-preserving scores
  int room;
};

// Keep the tokens of the block's entries whose score reaches `least`, and count their keys. The first entry of every thread is loaded.
__device__ __forceinline__ void keep_tokens(Shared& s, const Listed& listed, int entries, Entry& entry, const float* add, float least, int first, int last,
    const Kept& kept, int& held) {
  const int lane = threadIdx.x & 31;
  Entry next;
  for (int i = threadIdx.x; i - lane < entries; i += THREADS) {
    if (i + THREADS < entries) listed.load(i + THREADS, next);
    float score[4];
    pool<2>(entry.h, add + entry.part * HEADS, score);
    u32 stays[4];
    int all = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int u = entry.set * 4 + k;
      stays[k] = __ballot_sync(~0u, i < entries && score[k] >= least && u >= first && u < last);
      all += __popc(stays[k]);
    }
    int at = 0;
    if (lane == 0 && all) at = atomicAdd(&held, all);
    at = __shfl_sync(~0u, at, 0);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int to = at + __popc(stays[k] & ((1u << lane) - 1));
      if ((stays[k] >> lane & 1) && to < kept.room) {
        kept.scores[to] = ordered(score[k]), kept.units[to] = entry.set * 4 + k;
        atomicAdd(&s.hist[key_of(score[k], {}) >> 4], 1);
      }
      at += __popc(stays[k]);
    }
    entry = next;
  }
}

// Mark what is chosen in bitmap, a bit a unit of [lowest, behind); returns how much of it lies in lower blocks, -1 where more share a key than are ranked.
__device__ __forceinline__ int choose(Shared& s, const Kept& kept, int held, int wanted, int rank, int lowest, int behind, u32* bitmap) {
  const int tid = threadIdx.x, lane = tid & 31;
  u32 from = max((u32)s.cut.bin << 4, 1u), to = (u32)s.cut.bin << 4 | 15; // candidates' keys
  int need = wanted - s.cut.above, crowd = s.cut.count;
  auto key_at = [&](int i) { return key_of(__uint_as_float(kept.scores[i] & 0x7fffffffu), {}); };
  if (crowd > CROWD && crowd != need) { // split the bin by the lower four bits of its keys
    for (int i = tid; i < held; i += THREADS) {
      const u32 key = key_at(i);
      if (key >= from && key <= to) atomicAdd(&s.fine[key & 15], 1);
    }
    cut_fine(s, from, wanted, need);
    from = to = s.cut.bin, need = wanted - s.cut.above, crowd = s.cut.count;
  }
  const bool whole = crowd == need;
  if (crowd > CANDIDATES && !whole) return -1;
  int above = 0;
  for (int i = tid; i < held; i += THREADS) {
    const u32 key = key_at(i), unit = kept.units[i];
    if (key > to || (whole && key >= from)) {
      atomicOr(&bitmap[(unit - lowest) >> 5], 1u << ((unit - lowest) & 31)), above++;
    } else if (key >= from) {
      const int at = atomicAdd(&s.counts.x, 1);
      if (CLUSTER == 1) s.all_scores[at] = kept.scores[i], s.all_units[at] = unit;
      else s.own[at] = make_uint2(kept.scores[i], unit);
    }
  }
  above = __reduce_add_sync(~0u, above);
  if (lane == 0 && above) atomicAdd(&s.counts.y, above);
  cluster_sync();
  gather(s, rank, !whole);
  if (whole) return s.before;
  rank_candidates(s, crowd, need);
  return s.before + mark_candidates(s, crowd, lowest, behind, bitmap);
}

// Arguments as of select.cu, and notes [R, num_parts, NOTES] of fier_list.cu, with its lists in the place of scores. Writes redo [R]: 1 where the row is left
// to other kernels, and then nothing to out. Dynamic shared memory: 8 bytes a token that is kept (room_tokens), 12 a part and head, 4 a list and one
// more, and a bit a unit of the block's parts.
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_lists(const __half* scores, const float4* parts, const int* notes, const int* lens,
    int* out, int* redo, const int* slots, const int* budgets, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below,
    int room, int sink, int window, int room_tokens) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  __shared__ int failed, any_failed, held;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x, lane = tid & 31;
  const long long row = blockIdx.x / CLUSTER;
  const int b = row / rows_per_sequence, stored = lens[b];
  const Reading reading(stored, stored / GROUP * GROUP, UNIT, Budget(budgets ? budgets[slots[b]] : 0, budget, dense_below, room, UNIT), sink, window);
  const int first = reading.first, last = reading.last, wanted = reading.wanted;
  int turn = 0;
  cluster_arrive();
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
  if (tid < 16) s.fine[tid] = 0;
  if (tid == 0) s.counts = make_int2(0, 0), s.before = s.lower = 0, s.cut = {0, 0, 0}, failed = held = 0;
  // Parts, lists and units of this block.
  const int groups = stored >> 5, per = (groups + num_parts - 1) / num_parts, each = (num_parts + CLUSTER - 1) / CLUSTER;
  const int first_part = min(num_parts, rank * each), lists = (min(num_parts, first_part + each) - first_part) * LIST_WARPS;
  const int lowest = min(groups, first_part * per) * 32, behind = min(groups, (first_part + lists / LIST_WARPS) * per) * 32, words = (behind - lowest) / 32;
  const Kept kept = {reinterpret_cast<u32*>(dynamic), reinterpret_cast<u32*>(dynamic) + room_tokens, room_tokens};
  float* add = reinterpret_cast<float*>(kept.units + room_tokens); // [num_parts, HEADS], sums, left out
  float* left_out = add + 2 * num_parts * HEADS;                   // log2 of a part's largest score outside its lists, by a head, minus add
  int* starts = reinterpret_cast<int*>(left_out + num_parts * HEADS); // [lists + 1]
  u32* bitmap = reinterpret_cast<u32*>(starts + each * LIST_WARPS + 1); // [words]
  if (!reading.plain) {
    for (int i = tid; i < words; i += THREADS) bitmap[i] = 0;
  }
  dependency_wait();
  parts += row * num_parts * HEADS, notes += row * num_parts * NOTES, out += row * (room + 1);
  if (reading.plain) {
    if (rank == 0 && tid == 0) redo[row] = 0;
    reading.put_plain(out, rank, CLUSTER);
    return;
  }

  int entries = 0; // of lists before this round's
  for (int l = tid; l - tid < lists; l += THREADS) {
    const int count = l < lists ? notes[(first_part + l / LIST_WARPS) * NOTES + l % LIST_WARPS] : 0;
    const bool fits = count <= List<HEADS>(const_cast<__half*>(scores), row, score_stride, num_parts, 0, 0).room;
    if (!fits) failed = 1;
    const int end = entries + block_scan(fits ? count : 0, s.warp_sums, turn);
    if (l < lists) starts[l + 1] = end;
    if (l == 0) starts[0] = 0;
    __syncthreads();
    entries = starts[min(lists, l - tid + THREADS)];
  }
  const Listed listed = {scores, row, score_stride, num_parts, first_part, lists, starts};
  Entry entry = {};
  if (tid < entries) listed.load(tid, entry); // while the normalizers are summed
  for (int i = tid; i < num_parts * HEADS; i += THREADS) {
    const int* note = notes + i / HEADS * NOTES;
    left_out[i] = log2f(__uint_as_float((u32)note[NOTE_THRESHOLD])) - __uint_as_float((u32)note[NOTE_WEIGHTS + i % HEADS]);
    if (!(parts[i].y < 3e38f)) failed = 1; // the scorer gave up
  }
  Share share = {};
  share.add = add;
  normalize(s, share, parts, num_parts, add + num_parts * HEADS);
  float least = -3e38f;
  for (int i = lane; i < num_parts * HEADS; i += 32) least = fmaxf(least, add[i] + left_out[i]);
#pragma unroll
  for (int o = 16; o; o >>= 1) least = fmaxf(least, __shfl_xor_sync(~0u, least, o));
  least = fmaxf(exp2_fast(least) * 1.07f, 1e-30f); // scores were rounded to fp16: by less than 2^(1/16) below exponents of 128
  keep_tokens(s, listed, entries, entry, add, least, first, last, kept, held);
  __syncthreads();
  if (tid == 0 && held > room_tokens) failed = 1;
  cut_cluster(s, wanted, rank, turn);
  if (tid < 32) {
    const bool bad = (lane < CLUSTER && *peer(&failed, lane)) || s.cut.count == 0; // 0: too few reach `least`
    const bool any = __any_sync(~0u, bad);
    if (lane == 0) any_failed = any;
  }
  __syncthreads();
  const int before = any_failed ? -1 : choose(s, kept, held, wanted, rank, lowest, behind, bitmap);
  if (rank == 0 && tid == 0) redo[row] = before < 0;
  cluster_arrive(); // nobody leaves while others read its memory

  if (before >= 0) {
    const int share_words = (words + THREADS - 1) / THREADS, from = min(words, tid * share_words), to = min(words, from + share_words);
    int mine = 0;
    for (int i = from; i < to; i++) mine += __popc(bitmap[i]);
    int at = first + before + block_scan(mine, s.warp_sums, turn) - mine;
    for (int i = from; i < to; i++) {
      u32 flags = bitmap[i];
      while (flags) {
        out[at++] = lowest + i * 32 + __ffs(flags) - 1;
        flags &= flags - 1;
      }
    }
    const int count = first + wanted + reading.units - last; // == reading.width
    for (int i = rank * THREADS + tid; i < first; i += CLUSTER * THREADS) out[i] = i;
    for (int i = first + wanted + rank * THREADS + tid; i < count; i += CLUSTER * THREADS) out[i] = last + i - first - wanted;
    for (int i = count + rank * THREADS + tid; i < room; i += CLUSTER * THREADS) out[i] = -1;
    if (rank == 0 && tid == 0) out[room] = count;
  }
  cluster_wait();
}

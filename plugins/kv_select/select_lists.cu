// Exact top-k of a row whose scorer kept only what may be chosen (fier_lists.cuh), one thread-block cluster a key-value head: the choice of select.cu.
//
// Built as ranking.cuh says, for HEADS > 1. A block of the cluster ranks the lists of its share of the parts, which are neighbours, and keeps keys and
// sets in shared memory. Where what was left out might be chosen too, or the lists do not fit, the row is left to fier.cu and select.cu behind.
#include "ranking.cuh"
#include "lists.cuh"
#include "reading.cuh"

struct Listed {
  const __half* scores; // of all rows
  long long row, stride;
  int parts, first_part, lists, slots; // parts of the row, first of this block; its lists and their tokens
  uint2* keys;       // [slots / 4] four keys each; 0 where a token may not be chosen
  u32* sets;         // [slots / 4] numbers of the sets
  const int* starts; // [lists + 1] where a list's sets begin in those
  const float* add;  // [parts, HEADS]

  __device__ __forceinline__ List<HEADS> list(int l) const {
    return List<HEADS>(const_cast<__half*>(scores), row, stride, parts, first_part + l / LIST_WARPS, l % LIST_WARPS);
  }
  // Pooled scores of the four tokens of an entry.
  __device__ __forceinline__ void pooled(const List<HEADS>& from, int part, int i, float (&out)[4]) const {
    u32 h[HEADS][2];
    const uint4* entry = reinterpret_cast<const uint4*>(from.entries + (long long)i * from.ENTRY);
#pragma unroll
    for (int j = 0; j < HEADS; j += 2) {
      const uint4 v = __ldcg(entry + j / 2);
      h[j][0] = v.x, h[j][1] = v.y;
      if (j + 1 < HEADS) h[(j + 1) % HEADS][0] = v.z, h[(j + 1) % HEADS][1] = v.w;
    }
    pool<2>(h, add + part * HEADS, out);
  }
  __device__ __forceinline__ u32 exact_score(int slot) const {
    const int set = slot >> 2;
    int from = 0, to = lists - 1; // the last list that begins at or before it, and is not empty
    while (from < to) {
      const int middle = (from + to + 1) >> 1;
      if (starts[middle] <= set) from = middle;
      else to = middle - 1;
    }
    float out[4];
    pooled(list(from), first_part + from / LIST_WARPS, set - starts[from], out);
    const int k = slot & 3;
    return ordered(k & 2 ? k & 1 ? out[3] : out[2] : k & 1 ? out[1] : out[0]);
  }
};

// The largest score that a token may have that is in no list, with what rounding may add; above every score where the scorer gave up.
__device__ __forceinline__ void bound_left_out(float& bound, const float* add, const float4* parts, const int* notes, int num_parts) {
  float most = 0.f;
  for (int i = threadIdx.x & 31; i < num_parts * HEADS; i += 32) {
    const int* note = notes + i / HEADS * NOTES;
    const float threshold = __uint_as_float((u32)note[NOTE_THRESHOLD]), weight = __uint_as_float((u32)note[NOTE_WEIGHTS + i % HEADS]);
    most = fmaxf(most, parts[i].y < 3e38f ? threshold * exp2_fast(add[i] - weight) : 3e38f);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  bound = fmaxf(most * 1.07f, 1e-30f); // scores were rounded to fp16: 2^(1/16) below exponents of 128
}

// Mark what is chosen in bitmap, a bit a unit from `lowest` on; returns how much of it lies in lower blocks, -1 where more share a key than can be ranked.
__device__ __forceinline__ int choose(Shared& s, const Listed& listed, int wanted, int rank, int lowest, int behind, u32* bitmap) {
  const int tid = threadIdx.x, lane = tid & 31, sets = listed.slots / 4;
  u32 from = max((u32)s.cut.bin << 4, 1u), to = (u32)s.cut.bin << 4 | 15; // candidates' keys; 0 is none
  int need = wanted - s.cut.above, crowd = s.cut.count;
  auto keys_of = [&](int i, u32 (&key)[4]) {
    const uint2 v = listed.keys[i];
    key[0] = v.x & 0xffffu, key[1] = v.x >> 16, key[2] = v.y & 0xffffu, key[3] = v.y >> 16;
  };
  if (crowd > CROWD && crowd != need) { // split the bin by the lower four bits of its keys
    for (int i = tid; i < sets; i += THREADS) {
      u32 key[4];
      keys_of(i, key);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (key[k] >= from && key[k] <= to) atomicAdd(&s.fine[key[k] & 15], 1);
      }
    }
    cut_fine(s, from, wanted, need);
    from = to = s.cut.bin, need = wanted - s.cut.above, crowd = s.cut.count;
  }
  const bool few = crowd <= CANDIDATES, whole = crowd == need;
  if (!few && !whole) return -1;
  int above = 0;
  for (int i = tid; i < sets; i += THREADS) {
    u32 key[4];
    keys_of(i, key);
    const u32 unit = listed.sets[i] * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (key[k] > to || (whole && key[k] >= from)) {
        atomicOr(&bitmap[(unit + k - lowest) >> 5], 1u << ((unit + k - lowest) & 31)), above++;
      } else if (key[k] >= from) {
        const int at = atomicAdd(&s.counts.x, 1);
        const u32 score = listed.exact_score(i * 4 + k);
        if (CLUSTER == 1) s.all_scores[at] = score, s.all_units[at] = unit + k;
        else s.own[at] = make_uint2(score, unit + k);
      }
    }
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) above += __shfl_xor_sync(~0u, above, o);
  if (lane == 0 && above) atomicAdd(&s.counts.y, above);
  cluster_sync();
  gather(s, rank, !whole);
  if (whole) return s.before;
  rank_candidates(s, crowd, need);
  return s.before + mark_candidates(s, crowd, lowest, behind, bitmap);
}

// Arguments as of select.cu, and notes [R, num_parts, NOTES] of fier_list.cu, with its lists in the place of scores. Writes redo [R]: 1 where the row is left
// to other kernels, and then nothing to out. Dynamic shared memory: 12 bytes a set (room_sets), 8 a part and head, 4 a list and a word of flags.
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_lists(const __half* scores, const float4* parts, const int* notes, const int* lens,
    int* out, int* redo, const int* slots, const int* budgets, long long score_stride, int num_parts, int rows_per_sequence, int budget, int dense_below,
    int room, int sink, int window, int room_sets) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  __shared__ float left_out;
  __shared__ int failed, any_failed;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const long long row = blockIdx.x / CLUSTER;
  const int b = row / rows_per_sequence, stored = lens[b];
  const Reading reading(stored, stored / GROUP * GROUP, UNIT, Budget(budgets ? budgets[slots[b]] : 0, budget, dense_below, room, UNIT), sink, window);
  const int first = reading.first, last = reading.last, wanted = reading.wanted;
  int turn = 0;
  cluster_arrive();
  for (int i = tid; i < BINS; i += THREADS) s.hist[i] = 0;
  if (tid < 16) s.fine[tid] = 0;
  if (tid == 0) s.counts = make_int2(0, 0), s.before = s.lower = 0, s.cut = {0, 0, 0}, failed = 0;
  dependency_wait();
  parts += row * num_parts * HEADS, notes += row * num_parts * NOTES, out += row * (room + 1);
  if (reading.plain) {
    if (rank == 0 && tid == 0) redo[row] = 0;
    reading.put_plain(out, rank, CLUSTER);
    return;
  }

  // Parts, lists and units of this block.
  const int groups = stored >> 5, per = (groups + num_parts - 1) / num_parts, each = (num_parts + CLUSTER - 1) / CLUSTER;
  const int first_part = min(num_parts, rank * each), lists = (min(num_parts, first_part + each) - first_part) * LIST_WARPS;
  const int lowest = min(groups, first_part * per) * 32, behind = min(groups, (first_part + lists / LIST_WARPS) * per) * 32, words = (behind - lowest) / 32;
  uint2* keys = reinterpret_cast<uint2*>(dynamic);
  u32* sets = reinterpret_cast<u32*>(keys + room_sets);
  u32* bitmap = sets + room_sets;                                     // [words]
  float* add = reinterpret_cast<float*>(bitmap + each * per);         // [num_parts, HEADS], twice
  int* starts = reinterpret_cast<int*>(add + 2 * num_parts * HEADS);  // [lists + 1]
  for (int i = tid; i < words; i += THREADS) bitmap[i] = 0;

  int total = 0; // sets before this round of lists
  for (int l = tid; l - tid < lists; l += THREADS) {
    const int count = l < lists ? notes[(first_part + l / LIST_WARPS) * NOTES + l % LIST_WARPS] : 0;
    const bool fits = count <= List<HEADS>(const_cast<__half*>(scores), row, score_stride, num_parts, 0, 0).room;
    if (!fits) failed = 1;
    const int end = total + block_scan(fits ? count : 0, s.warp_sums, turn);
    if (l < lists) starts[l + 1] = end;
    if (l == 0) starts[0] = 0;
    __syncthreads();
    total = starts[min(lists, l - tid + THREADS)];
  }
  Share share = {};
  share.add = add;
  normalize(s, share, parts, num_parts, add + num_parts * HEADS);
  if (warp == 0) {
    float bound;
    bound_left_out(bound, add, parts, notes, num_parts);
    if (lane == 0) left_out = bound;
  }
  const bool here = !failed && total <= room_sets;
  if (!here && tid == 0) failed = 1;
  const Listed listed = {scores, row, score_stride, num_parts, first_part, lists, here ? total * 4 : 0, keys, sets, starts, add};

  const int warps = THREADS / 32, sharers = max(1, warps / max(1, lists)); // warps of a list
  for (int l = warp / sharers; here && l < lists; l += warps / sharers) {
    if (warp / sharers * sharers + sharers > warps) break; // left over
    const List<HEADS> list = listed.list(l);
    const int start = starts[l], count = starts[l + 1] - start, part = first_part + l / LIST_WARPS;
    for (int i = warp % sharers * 32 + lane; i < count; i += sharers * 32) {
      const u32 set = __ldcg(list.sets + i);
      float score[4];
      listed.pooled(list, part, i, score);
      u32 key[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int u = set * 4 + k;
        key[k] = u >= first && u < last ? key_of(score[k], share.scale) : 0;
        if (key[k]) atomicAdd(&s.hist[key[k] >> 4], 1);
      }
      keys[start + i] = make_uint2(key[0] | key[1] << 16, key[2] | key[3] << 16), sets[start + i] = set;
    }
  }
  cut_cluster(s, wanted, rank, turn);
  if (tid < 32) {
    const bool bad = lane < CLUSTER && *peer(&failed, lane);
    const float least = __uint_as_float((max((u32)s.cut.bin << 4, 1u) - 1) << 14); // of the cut
    if (lane == 0) any_failed = 0;
    __syncwarp();
    if (bad || (lane == 0 && !(s.cut.count > 0 && least >= left_out))) any_failed = 1;
  }
  __syncthreads();
  const int before = any_failed ? -1 : choose(s, listed, wanted, rank, lowest, behind, bitmap);
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

// FIER's scores and the exact choice among them in one launch, for few rows: every multiprocessor scores a share and keeps the scores to itself.
//
// Built as fier_groups.cuh and pooling.cuh say, with SCORES_SHARED. The choice is that of fier.cu and select.cu for the same shares: the same fp16
// scores, pooled in the same order. Blocks tell each other normalizers, then counts by the upper eight bits of their keys, then the candidates of
// the bin that is cut.
#define SCORES_SHARED
#define THREADS (32 * WARPS)
#ifndef EARLY_GROUPS
#define EARLY_GROUPS 2
#endif
#include "fier_groups.cuh"
#include "exchange.cuh"

// q [B, q_stride] the rotated queries; bits, meta the pool of one layer as fier_groups.cuh says; table [B, table_stride]; lens [B] stored tokens; slots,
// budgets and dense_below as of select.cu; messages [R, gridDim.x MESSAGE_WORDS + MOST_TIED] and stamps [R], zero before the first launch. Writes out
// [R, list_room + 1]: ascending units, -1 behind them, then their count; -1 everywhere where the sequence is read whole. room: units of a block that
// shared memory holds. Where scores is not null, scores and parts are written as fier.cu does. published [B, Hk, G HEAD_WORDS] as query.cuh says, or null;
// the words are empty behind this launch. Dynamic shared memory: the ring of fier_groups.cuh or 33 bytes for eight units of room, then STEP_HEADS
// (room + 8) scores.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fier_select(const real* q, const char* bits, const char* meta, const int* table,
    const int* lens, int* out, const int* slots, const int* budgets, uint4* message_words, u32* stamps, __half* scores, float4* parts, uint4* published,
    int q_stride, int table_stride, int page_groups, long long score_stride, int budget, int dense_below, int list_room, int sink, int window, int room, float scale_log2) {
  extern __shared__ __align__(128) char dynamic[];
  MARK(15)
  __shared__ Desk s;
  const int rank = blockIdx.x, blocks = gridDim.x, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z, tid = threadIdx.x;
  const long long row = (long long)b * heads + head;
  Query query(q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, published, row);
  const int stored = lens[b], own_budget = budgets ? budgets[slots[b]] : 0;
  clear(s);
  const int groups = stored >> 5, per = (groups + blocks - 1) / blocks, begin = min(groups, rank * per), end = min(groups, begin + per);
  Groups share = {bits, meta, table + (long long)b * table_stride, head, heads, page_groups, stored, begin, end, false, false, 0};
  share.first = share.place(tid & 31); // asked for before the budget has come
  const Reading reading(stored, groups * 32, 1, Budget(own_budget, budget, dense_below, list_room, 1), sink, window);
  out += row * (list_room + 1);
  if (published) published += row * (GROUP_HEADS * HEAD_WORDS);
  if (reading.plain) {
    dependency_wait();
    reading.put_plain(out, rank, blocks);
    if (published && rank == 0) empty_query(published, GROUP_HEADS * HEAD_WORDS, THREADS);
    return;
  }
  const int stride = room + 8, ring = max(WARPS * STAGES * STAGE_BYTES, (room / 8 * 33 + 127) / 128 * 128);
  __half* own = reinterpret_cast<__half*>(dynamic + ring);
  Messages messages = {message_words + row * (blocks * MESSAGE_WORDS + MOST_TIED), blocks, rank, 0};
  float4* to_parts = scores ? parts + (row * blocks + rank) * HEADS : nullptr;
  score_groups(share, query, dynamic, own, stride, scale_log2,
      [&] { messages.stamp = __ldcg(stamps + row) + 1; },
      [&](int h, float4 part) {
        send_part(messages, h, part);
        if (to_parts) to_parts[h] = part;
      });
  // The ring is not needed any more.
  Units units = {own, stride, begin * 32, (end - begin) * 32, reading.first, reading.last, reinterpret_cast<u32*>(dynamic)};
  choose_units(s, messages, reading, units, reinterpret_cast<unsigned char*>(dynamic + room * 4), out, stamps + row);
  if (published && rank == 0) empty_query(published, GROUP_HEADS * HEAD_WORDS, THREADS); // all blocks have published what they scored with it
  if (scores) put_scores(units, scores + row * HEADS * score_stride, score_stride);
}

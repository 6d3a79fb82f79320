// FIER's scores, the exact choice among them and attention to what is chosen in one launch, for few rows.
//
// Built as fier_groups.cuh and retrieve.cuh say, with CHUNK 32. The scores and the choice are those of fier_select for blocks that take groups in turn.
#define SCORES_SHARED
#define THREADS (32 * WARPS)
#define CHUNK 32
#define UNIT 1
#ifndef EARLY_GROUPS
#define EARLY_GROUPS 2
#endif
#include "fier_groups.cuh"
#undef STAGE_BYTES // of a group; of a tile from here on
#include "retrieve.cuh"

// q [B, q_stride] the rotated queries; bits, meta the pool of one layer as fier_groups.cuh says; keys, values [P, Hk, page_size, D]; table
// [B, table_stride]; lens [B] stored tokens; slots, budgets and dense_below as of select.cu; mail [R, row_words] and stamps [R], zero before the first
// launch. Writes out [B, out_stride]. room: units of a block that shared memory holds. Where they are not null, marks, ranked and scores
// [R, ..., score_stride] are written as retrieve.cuh says, parts as fier.cu does. Dynamic shared memory is
// laid out by launch_retrieve.py: exact_bytes for ordered scores, scores at scores_at.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fier_retrieve(const real* q, const char* bits, const char* meta, const char* keys,
    const char* values, const int* table, const int* lens, real* out, const int* slots, const int* budgets, uint4* mail_words, u32* stamps,
    unsigned char* marks, u32* ranked, __half* scores, float4* parts, int q_stride, int out_stride, int table_stride, int page_size, int row_words,
    long long score_stride, int budget, int dense_below, int list_room, int sink, int window, int room, int exact_bytes, int scores_at,
    float scale_log2) {
  extern __shared__ __align__(128) char dynamic[];
  __shared__ Desk s;
  __shared__ Work work;
  MARK(20)
  const int rank = blockIdx.x, blocks = gridDim.x, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  const int stored = lens[b], groups = stored >> 5, page_groups = page_size >> 5, stride = room + 8;
  const int* pages = table + (long long)b * table_stride;
  const real* queries = q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D;
  const int count = max(0, (groups - rank + blocks - 1) / blocks);
  const Places at = places_of(dynamic, room, exact_bytes);
  __half* own = reinterpret_cast<__half*>(dynamic + scores_at);
  Reading reading;
  clear(s);
  const Groups share = {bits, meta, pages, head, heads, page_groups, stored, rank, rank + count, false, blocks, at.units, table_stride * page_groups};
  Mail mail = {mail_words + row * row_words, blocks, rank, 0};
  float4* to_parts = parts ? parts + (row * blocks + rank) * HEADS : nullptr;
  score_groups(share, queries, dynamic + ring_at(room), own, stride, scale_log2,
      [&] { mail.stamp = __ldcg(stamps + row) + 1; },
      [&](int h, float4 part) {
        post_part(mail, h, part);
        if (to_parts) to_parts[h] = part;
      },
      [&] {
        reading = Reading(stored, groups * 32, 1, Budget(budgets ? budgets[slots[b]] : 0, budget, dense_below, list_room, 1), sink, window);
        return reading.plain;
      });
  Units units = {own, stride, rank * 32, count * 32, reading.first, reading.last, at.exact, (blocks - 1) * 32};
  const Certain certain = certain_of(reading, stored, pages, head, heads, page_size);
  const Record record = {marks ? marks + row * score_stride : nullptr, ranked ? ranked + row * score_stride : nullptr, scores + row * HEADS * score_stride, score_stride};
  retrieve(s, work, mail, {mail.list() + CROWD, blocks}, reading, certain, units, at, queries, keys, values, record, stamps + row,
      out + (long long)b * out_stride + (long long)head * GROUP_HEADS * D, scale_log2);
}

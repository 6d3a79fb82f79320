// Page scores, the exact choice among them and attention to what is chosen in one launch, for few rows.
//
// Built as page_share.cuh and retrieve.cuh say, without SHARED and POOL 3, with CHUNK 1. The scores and the choice are those of page_select for blocks
// that take pages in turn.
#define EARLY
#define THREADS (32 * WARPS)
#define CHUNK 1
#include "page_share.cuh"
#include "retrieve.cuh"

// q [B, q_stride]; vectors, beside and cut [B, Hk] as page_share.cuh says; everything else as of fier_retrieve, with pages of UNIT tokens for units.
extern "C" __global__ void __launch_bounds__(THREADS, 1) page_retrieve(const real* q, const char* vectors, const void* beside, const uint2* cut,
    const char* keys, const char* values, const int* table, const int* lens, real* out, const int* slots, const int* budgets, uint4* mail_words,
    u32* stamps, unsigned char* marks, u32* ranked, __half* scores, float4* parts, int q_stride, int out_stride, int table_stride, int page_size,
    int row_words, long long score_stride, int budget, int dense_below, int list_room, int sink, int window, int room, int exact_bytes, int scores_at,
    float scale_log2) {
  extern __shared__ __align__(128) char dynamic[];
  __shared__ Desk s;
  __shared__ Work work;
  MARK(20)
  const int rank = blockIdx.x, blocks = gridDim.x, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  const int stored = lens[b], all = stored / UNIT, stride = room + 8;
  const int* pages = table + (long long)b * table_stride;
  const real* queries = q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D;
  const int count = max(0, (all - rank + blocks - 1) / blocks), per = (all + blocks - 1) / blocks;
  const Places at = places_of(dynamic, room, exact_bytes);
  __half* own = reinterpret_cast<__half*>(dynamic + scores_at);
  Reading reading;
  clear(s);
  const Pages share = {vectors, beside, cut + row, pages, head, heads, stored, rank, rank + count, per, false, blocks, at.units, table_stride * PER_PAGE};
  Mail mail = {mail_words + row * row_words, blocks, rank, 0};
  float4* to_parts = parts ? parts + (row * blocks + rank) * HEADS : nullptr;
  score_share(share, queries, scale_log2,
      [&] { mail.stamp = __ldcg(stamps + row) + 1; },
      [&](int h, int i, __half2 both) { *reinterpret_cast<__half2*>(own + h * stride + i - rank) = both; },
      [&](int h, float4 part) {
        post_part(mail, h, part);
        if (to_parts) to_parts[h] = part;
      },
      [&] {
        reading = Reading(stored, all * UNIT, UNIT, Budget(budgets ? budgets[slots[b]] : 0, budget, dense_below, list_room, UNIT), sink, window);
        return reading.plain;
      });
  // Scores behind the last page are of nothing, and no candidates.
  Units units = {own, stride, rank, (count + 31) / 32 * 32, reading.first, reading.last, at.exact, blocks - 1};
  const Certain certain = certain_of(reading, stored, pages, head, heads, page_size);
  const Record record = {marks ? marks + row * score_stride : nullptr, ranked ? ranked + row * score_stride : nullptr, scores + row * HEADS * score_stride, score_stride};
  retrieve(s, work, mail, {mail.list() + CROWD, blocks}, reading, certain, units, at, queries, keys, values, record, stamps + row,
      out + (long long)b * out_stride + (long long)head * GROUP_HEADS * D, scale_log2);
}

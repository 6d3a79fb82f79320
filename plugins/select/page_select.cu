// Page scores and the exact choice among them in one launch, for few rows: every multiprocessor scores a share and keeps the scores to itself.
//
// Built as page_share.cuh and pooling.cuh say, without SHARED and POOL 3. The choice is that of pages.cu and select.cu for the same shares.
#define EARLY
#define THREADS (32 * WARPS)
#include "page_share.cuh"
#include "shortlist.cuh"

// q [B, q_stride]; vectors, beside and cut [B, Hk] as page_share.cuh says; table, lens, out, slots, budgets, messages, stamps, scores and parts as of
// fier_select, with pages of `unit` tokens for units. Dynamic shared memory: 33 bytes for eight units of room, a multiple of 128, then HEADS (room + 8)
// scores.
extern "C" __global__ void __launch_bounds__(THREADS, 1) page_select(const real* q, const char* vectors, const void* beside, const uint2* cut,
    const int* table, const int* lens, int* out, const int* slots, const int* budgets, uint4* message_words, u32* stamps, __half* scores, float4* parts,
    int q_stride, int table_stride, int unit, long long score_stride, int budget, int dense_below, int list_room, int sink, int window, int room, float scale_log2) {
  MARK(16)
  extern __shared__ __align__(128) char dynamic[];
  __shared__ Desk s;
  const int rank = blockIdx.x, blocks = gridDim.x, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
  const int stored = lens[b], pages = stored / unit;
  const Reading reading(stored, pages * unit, unit, Budget(budgets ? budgets[slots[b]] : 0, budget, dense_below, list_room, unit), sink, window);
  out += row * (list_room + 1);
  if (reading.plain) {
    dependency_wait();
    reading.put_plain(out, rank, blocks);
    return;
  }
  clear(s);
  const int per = ((pages + 31) / 32 + blocks - 1) / blocks * 32, begin = min(pages, rank * per), end = min(pages, begin + per), stride = room + 8;
  __half* own = reinterpret_cast<__half*>(dynamic + (room / 8 * 33 + 127) / 128 * 128);
  // Where a warp has several rounds, all of them would wait for the query behind the first pages.
  const bool settled = per <= WARPS * ROUND && end <= (stored - 1) / unit;
  const Pages share = {vectors, beside, cut + row, table + (long long)b * table_stride, head, heads, stored, begin, end, per, false, settled};
  Messages messages = {message_words + row * (blocks * MESSAGE_WORDS + MOST_TIED + SHORT_MESSAGES(blocks)), blocks, rank, 0};
  float4* to_parts = scores ? parts + (row * blocks + rank) * HEADS : nullptr;
  const bool brief = WARPS == MOST_SHORT_WARPS && blocks <= MOST_SHORT_BLOCKS && pages <= MOST_SHORT_UNITS;
  score_share(share, q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, scale_log2,
      [&] { messages.stamp = __ldcg(stamps + row) + 1; },
      [&](int h, int page, __half2 both) { *reinterpret_cast<__half2*>(own + h * stride + page - begin) = both; },
      [&](int page) {
        if (HEADS == 1 && brief && page < end) send_raw(messages, own + page - begin, page);
      },
      [&](float ref, float high, float low) {
        if (HEADS == 1 && brief) send_range(messages, ref, high, low);
      },
      [&](int h, float4 part) {
        send_part(messages, h, part);
        if (to_parts) to_parts[h] = part;
      });
  MARK(5)
  // Scores behind the last page are of nothing, and no candidates.
  Units units = {own, stride, begin, (end - begin + 31) / 32 * 32, reading.first, reading.last, reinterpret_cast<u32*>(dynamic)};
  if (!brief || !choose_short(s, messages, reading, units, out, stamps + row, per)) {
    __syncthreads();
    clear(s);
    __syncthreads();
    choose_units(s, messages, reading, units, reinterpret_cast<unsigned char*>(dynamic + room * 4), out, stamps + row);
  }
  if (scores) put_scores(units, scores + row * HEADS * score_stride, score_stride);
}

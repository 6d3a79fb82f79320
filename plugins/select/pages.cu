// Page scorer: every block scores an equal share of a row's pages, scores and what is said about the shares go to the selector.
//
// Built as page_share.cuh says.
#include "page_share.cuh"

#define RESIDENT (TILES == 1 && D <= 128 ? 2 : 1) // blocks a multiprocessor

// q [B, q_stride]; vectors [P, Hk, PER_PAGE, VECTORS, D]; beside [P, Hk, PER_PAGE]: radii, or fp32 likeness where pages are FORCED; cut [B, Hk]
// as outlier_cut leaves it; table [B, table_stride]; lens [B] stored tokens. Writes scores and parts as fier_score does, with one unit a page:
// [B Hk, heads, score_stride] and [B Hk, parts, heads]; POOL 3: [B Hq, score_stride] and [B Hq, parts]; SHARED: the same for `copies` rows.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) score_pages(const real* q, const char* vectors, const void* beside, const uint2* cut, const int* table,
    const int* lens, __half* scores, float4* parts, int q_stride, int table_stride, int unit, int heads, int copies, long long score_stride, int budget,
    float scale_log2) {
#ifdef SHARED
  const int head = 0, b = blockIdx.z;
  const long long row = b;
#else
  const int head = blockIdx.y, b = blockIdx.z;
  const long long row = (long long)b * heads + head;
#endif
  const int stored = lens[b], pages = stored <= budget ? 0 : stored / unit;
  const int per = ((pages + 31) / 32 + gridDim.x - 1) / gridDim.x * 32; // a multiple of 32 pages a block: the selector's unit of parts
  const int begin = min(pages, (int)blockIdx.x * per), end = min(pages, begin + per);
  const Pages share = {vectors, beside, cut + row, table + (long long)b * table_stride, head, heads, stored, begin, end, per, stored <= budget};
  score_share(share, q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D, scale_log2, [] {},
      [&](int h, int page, __half2 both) {
#ifdef SHARED
        for (int k = 0; k < copies; k++) *reinterpret_cast<__half2*>(scores + (row * copies + k) * score_stride + page) = both;
#else
        *reinterpret_cast<__half2*>(scores + (row * HEADS_OUT + h) * score_stride + page) = both;
#endif
      },
      [](int) {}, [](float, float, float) {},
      [&](int h, float4 part) {
#ifdef SHARED
        for (int k = 0; k < copies; k++) parts[(row * copies + k) * gridDim.x + blockIdx.x] = part;
#elif POOL == 3
        parts[(row * GROUP_HEADS + h) * gridDim.x + blockIdx.x] = part;
#else
        parts[(row * gridDim.x + blockIdx.x) * HEADS_OUT + h] = part;
#endif
      });
}

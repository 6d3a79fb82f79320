// Decode attention over a list of tokens or pages, or over everything stored: one thread-block cluster a key-value head, split over its blocks.
//
// Built as tile.cuh says, with -DCLUSTER and -DUNIT (tokens a list entry).
//
// Every warp takes blocks of 16 tokens. Warps are merged through shared memory, then every block of the cluster gets from all of them an equal share of
// the channels.
#include "async.cuh"
#include "tile.cuh"

#define QUARTETS (GROUP_HEADS * D / 4) // of channels, of all heads
#define OWN_QUARTETS ((QUARTETS + CLUSTER - 1) / CLUSTER) // that a block merges
#define TILED (UNIT % TILE == 0) // the tokens of a block lie side by side
#define LOOKS (TILED ? 1 : 4) // that a lane looks up at once: rows of blocks, or of a token of every second one
#define LOOKED (TILED ? 32 : 2 * LOOKS) // blocks of them

static_assert(STAGES <= 4, "the tokens that exist are bits of one word");

struct Merge {
  float top[WARPS][HEADS8], sum[WARPS][HEADS8];
  float4 output[CLUSTER][OWN_QUARTETS];
  float2 weight[CLUSTER][HEADS8]; // largest score and sum
  u64 arrived;
};

// q [B, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride]; lens [B]; chosen [B, Hk, chosen_stride] int32, the entries and
// last their count, -1 for everything stored, or null. Writes out [B, out_stride]. Lengths were there before the kernel before this one began; where
// settled, queries too.
extern "C" __global__ void __launch_bounds__(THREADS) attend_list(const real* q, const char* keys, const char* values, const int* table, const int* lens,
    const int* chosen, real* out, int q_stride, int out_stride, int table_stride, int page_size, int chosen_stride, int settled, float scale_log2) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Merge merge;
  __shared__ __align__(128) char asked[HEADS8 * ROW];
  __shared__ int row_at[WARPS][TILED ? 1 : LOOKED * TILE]; // of tokens, -1 for none
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  MARK(0)
  const int stored = lens[b];
  const int* pages = table + (long long)b * table_stride;
  const int* list = chosen ? chosen + ((long long)b * heads + head) * chosen_stride : 0;
  const int room = chosen_stride - 1;
#if CLUSTER > 1
  if (threadIdx.x == 0) {
    barrier_init(&merge.arrived);
    barriers_ready();
  }
  __syncwarp();
  cluster_arrive_ready();
#endif
  auto fetch_query = [&] {
    const real* queries = q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D;
#pragma unroll 1
    for (int i = threadIdx.x; i < HEADS8 * CHUNKS; i += THREADS) {
      const int h = i / CHUNKS, c = i % CHUNKS;
      copy16_sized(shared_at(asked) + place(h, c), queries + min(h, GROUP_HEADS - 1) * D + c * 8, h < GROUP_HEADS ? 16 : 0);
    }
  };
  if (settled) fetch_query();
  dependency_wait();
  if (!settled) fetch_query();
  copies_commit();
  MARK(1)

  // A warp's blocks are neighbours.
  const int workers = CLUSTER * WARPS, worker = rank * WARPS + warp;
  int total, begin, mine;
  bool sparse;
  auto share = [&](int count) {
    sparse = count >= 0, total = sparse ? count * UNIT : stored;
    const int blocks = (total + TILE - 1) / TILE;
    begin = worker * (blocks / workers) + min(worker, blocks % workers), mine = blocks / workers + (worker < blocks % workers);
  };
  // What a lane looks up for blocks from j on: the first token of block j + lane, or token `lane` of look `n` of pairs of blocks.
  auto token_of = [&](int j, int n) { return TILED ? (begin + j + lane) * TILE : (begin + j + 2 * n) * TILE + lane; };
  auto entry_of = [&](int j, int n) { return list[max(0, min(token_of(j, n) / UNIT, room - 1))]; };
  auto row_of = [&](int j, int n, int entry, int& left) {
    const int i = token_of(j, n);
    left = 0;
    if (i >= total || i / TILE >= begin + mine || (sparse && entry < 0)) return -1;
    const int token = sparse ? entry * UNIT + i % UNIT : i;
    left = max(0, min(stored - token, TILE));
    if (left == 0) return -1;
    const int page = token / page_size;
    return (pages[page] * heads + head) * page_size + token - page * page_size;
  };
  // The count and the first entries come together: that the list is one, and full, is nearly always true.
  int entries[LOOKS] = {}, row_ahead, left_ahead;
  share(list ? room : -1);
  const int count = list ? list[room] : -1;
  auto poll_list = [&](int j) {
    if (sparse) {
#pragma unroll
      for (int n = 0; n < LOOKS; n++) entries[n] = entry_of(j, n);
    }
  };
  if (list) sparse = true, poll_list(0);
  if (list && count != room) share(count), poll_list(0);

  const u32 ring_at = shared_at(ring) + warp * STAGES * STAGE_BYTES;
  u64 exist = 0; // bits of the tokens that exist, sixteen a fetched block
  auto fetch = [&](int j) {
    if (j % LOOKED == 0) {
#pragma unroll
      for (int n = 0; n < LOOKS; n++) {
        row_ahead = row_of(j, n, entries[n], left_ahead);
        if (!TILED) row_at[warp][n * 32 + lane] = row_ahead;
      }
      if (j + LOOKED < mine) poll_list(j + LOOKED);
      __syncwarp();
    }
    const int s = j % STAGES;
    const u32 to = ring_at + s * STAGE_BYTES;
    u64 there;
    if (TILED) {
      const int row = __shfl_sync(~0u, row_ahead, j % 32), tokens = __shfl_sync(~0u, left_ahead, j % 32);
      const long long first = (long long)row * ROW + lane * 16;
      there = (1u << tokens) - 1;
      if (tokens == TILE) {
#pragma unroll
        for (int i = 0; i < TILE * CHUNKS / 32; i++) {
          const u32 at = to + place((i * 32 + lane) / CHUNKS, (i * 32 + lane) % CHUNKS);
          copy16(at, keys + first + i * 512), copy16(at + TILE * ROW, values + first + i * 512);
        }
      } else {
#pragma unroll 1
        for (int i = lane; i < TILE * CHUNKS; i += 32) {
          const u32 at = to + place(i / CHUNKS, i % CHUNKS), size = i / CHUNKS < tokens ? 16 : 0;
          const long long from = (long long)max(row, 0) * ROW + (size ? i * 16 : 0);
          copy16_sized(at, keys + from, size), copy16_sized(at + TILE * ROW, values + from, size);
        }
      }
    } else {
      const int* of_block = row_at[warp] + j % LOOKED * TILE;
#pragma unroll
      for (int i = lane; i < TILE * CHUNKS; i += 32) {
        const int r = i / CHUNKS, c = i % CHUNKS, row = of_block[r];
        const long long from = (long long)max(row, 0) * ROW + c * 16; // rows behind the end are masked: any memory of the pool will do
        const u32 at = to + place(r, c), size = row >= 0 ? 16 : 0;
        copy16_sized(at, keys + from, size), copy16_sized(at + TILE * ROW, values + from, size);
      }
      there = __ballot_sync(~0u, of_block[lane % TILE] >= 0) & 0xffffu;
    }
    exist = (exist & ~(0xffffull << s * 16)) | there << s * 16;
  };

  u32 query[TILES][D / 8] = {};
  Seen seen;
  seen.clear();
  MARK(2)
#pragma unroll 1
  for (int j = 0; j < mine + STAGES; j++) { // block j is asked for, block j - STAGES, which lies in its place, is attended to
    if (j >= STAGES) {
      const int s = j % STAGES;
      copies_wait<STAGES - 1>();
      __syncwarp();
      if (j == STAGES) { MARK(4) }
      seen.take(query, ring_at + s * STAGE_BYTES, u32(exist >> s * 16) & 0xffffu, scale_log2);
      __syncwarp();
    }
    if (j < mine) fetch(j);
    copies_commit();
    if (j == STAGES - 1) { // the query, which was asked for first
      copies_wait<STAGES>();
      __syncthreads();
#if CLUSTER > 1
      if (threadIdx.x == 0) // what others have already pushed counts
        barrier_expect(&merge.arrived, CLUSTER * (max(0, min(OWN_QUARTETS, QUARTETS - rank * OWN_QUARTETS)) * 16 + HEADS8 * 8));
#endif
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int c = 0; c < D / 8; c += 4)
          read4(*reinterpret_cast<u32(*)[4]>(&query[t][c]), shared_at(asked) + place(t * 8 + (lane & 7), c + (lane >> 3)));
      }
      MARK(3)
    }
  }
  copies_wait<0>();
  MARK(5)

  // A warp's sums go where its own keys lay.
  float* laid = reinterpret_cast<float*>(ring);
  constexpr int SPACING = STAGES * STAGE_BYTES / 4; // floats from warp to warp
  static_assert(HEADS8 * LAID <= SPACING, "a warp's ring holds its outputs");
  __syncwarp();
  const int gid = lane >> 2, tig = lane & 3;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    float l0 = seen.sum[t][0], l1 = seen.sum[t][1];
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) l0 += __shfl_xor_sync(~0u, l0, o), l1 += __shfl_xor_sync(~0u, l1, o);
    const int h = t * 8 + 2 * tig;
    if (gid == 0) merge.top[warp][h] = seen.top[t][0], merge.top[warp][h + 1] = seen.top[t][1], merge.sum[warp][h] = l0, merge.sum[warp][h + 1] = l1;
    float* to = laid + warp * SPACING + h * LAID + gid;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      to[k * 16] = seen.acc[t][k][0], to[LAID + k * 16] = seen.acc[t][k][1];
      to[k * 16 + 8] = seen.acc[t][k][2], to[LAID + k * 16 + 8] = seen.acc[t][k][3];
    }
  }
#if CLUSTER > 1
  cluster_wait_ready();
#endif
  __syncthreads();
  MARK(6)
  auto top_of = [&](int h) {
    float m = merge.top[0][h];
#pragma unroll
    for (int w = 1; w < WARPS; w++) m = fmaxf(m, merge.top[w][h]);
    return m;
  };
  auto sum_of = [&](int h, float m) {
    float l = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) l += merge.sum[w][h] * exp2_fast(merge.top[w][h] - m);
    return l;
  };
  real* to = out + (long long)b * out_stride + (long long)head * GROUP_HEADS * D;
#pragma unroll 1
  for (int i = threadIdx.x; i < QUARTETS; i += THREADS) {
    const int h = i / (D / 4);
    const float m = top_of(h);
    float4 x = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_fast(merge.top[w][h] - m);
      const float4 y = *reinterpret_cast<const float4*>(laid + w * SPACING + h * LAID + i % (D / 4) * 4);
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
#if CLUSTER > 1
    push16(&merge.output[rank][i % OWN_QUARTETS], i / OWN_QUARTETS, &merge.arrived, x);
#else
    store_output(to + i * 4, x, 1.f / sum_of(h, m));
#endif
  }
#if CLUSTER > 1
#pragma unroll 1
  for (int i = threadIdx.x; i < CLUSTER * HEADS8; i += THREADS) {
    const int h = i % HEADS8;
    const float m = top_of(h);
    push8(&merge.weight[rank][h], i / HEADS8, &merge.arrived, make_float2(m, sum_of(h, m)));
  }
  MARK(7)
  barrier_await(&merge.arrived, 0);
  MARK(8)
#pragma unroll 1
  for (int i = threadIdx.x; i < OWN_QUARTETS && rank * OWN_QUARTETS + i < QUARTETS; i += THREADS) {
    const int at = rank * OWN_QUARTETS + i, h = at / (D / 4);
    float m = -1e30f, l = 0.f;
    float4 x = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) m = fmaxf(m, merge.weight[c][h].x);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const float f = exp2_fast(merge.weight[c][h].x - m);
      const float4 y = merge.output[c][i];
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f, l += merge.weight[c][h].y * f;
    }
    store_output(to + at * 4, x, 1.f / l);
  }
#endif
  MARK(9)
}

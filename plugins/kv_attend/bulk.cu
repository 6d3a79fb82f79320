// Decode attention over a list of tokens or pages by bulk copies, for sm_90 on: one thread-block cluster a key-value head.
//
// Built as tile.cuh says, with -DCLUSTER, -DUNIT (tokens a list entry), -DPART_TOKENS (16 or 32) and -DSLOTS (parts whose keys and values are on their
// way or here). What attend.cu says of its arguments holds.
//
// A part's tokens lie in eight pieces of neighbours, each sixteen bytes further than a multiple of 128: ldmatrix takes a row of each, and meets every
// bank once without a swizzle, which bulk copies of rows do not make. Warps take parts in turn; every slot belongs to one of them (SLOTS is a multiple of
// WARPS), because a barrier's parity tells a phase from the one before it only to who has waited for that.
#include "async.cuh"
#include "tile.cuh"

#define PIECE (UNIT % (PART_TOKENS / 8) == 0 ? PART_TOKENS / 8 : 1) // tokens
#define PIECES (PART_TOKENS / PIECE)
#define PIECE_BYTES (PIECE * ROW + 16)
#define SLOT_BYTES (2 * PIECES * PIECE_BYTES) // keys, then values
#define ASKERS (2 * PIECES > 32 ? 32 : 2 * PIECES) // lanes that ask for a part
#define FIRST (SLOTS / WARPS) // parts that a warp asks for at first
#define TOGETHER (32 / ASKERS) // of them at once
#define QUARTETS (GROUP_HEADS * D / 4)
#define OWN_QUARTETS ((QUARTETS + CLUSTER - 1) / CLUSTER)

static_assert(SLOTS % WARPS == 0, "a warp has slots of its own");

struct Skewed { // of tile t of a part, stage being t * TILE / PIECES rows behind its slot's begin
  static __device__ __forceinline__ u32 key(u32 stage, u32 r, u32 c) {
    return stage + (PIECE == 1 ? r * PIECE_BYTES : (r & 7) * PIECE_BYTES + (r >> 3) * ROW) + c * 16;
  }
  static __device__ __forceinline__ u32 value(u32 stage, u32 r, u32 c) { return key(stage + PIECES * PIECE_BYTES, r, c); }
};
#define TILE_STEP (PIECE == 1 ? TILE * PIECE_BYTES : 2 * ROW)

#ifndef BULK
#define BULK 1
#endif
struct Piece {
  int row, left; // first row in the pool, tokens that exist
};
struct Merge {
  float warp_top[WARPS][HEADS8], warp_sum[WARPS][HEADS8];
  float4 output[CLUSTER][OWN_QUARTETS];
  float2 weight[CLUSTER][HEADS8]; // top and sum
};

extern "C" __global__ void __launch_bounds__(THREADS) attend_list(const real* q, const char* keys, const char* values, const int* table, const int* lens,
    const int* chosen, real* out, int q_stride, int out_stride, int table_stride, int page_size, int chosen_stride, int settled, float scale_log2) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Merge merge;
  __shared__ u64 full[SLOTS], merged;
  __shared__ int left[SLOTS][PIECES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, head = blockIdx.y, heads = gridDim.y, b = blockIdx.z;
  MARK(0)
#if DRY == 2
  return;
#endif
  const int stored = lens[b];
  const int* pages = table + (long long)b * table_stride;
  const int* list = chosen ? chosen + ((long long)b * heads + head) * chosen_stride : 0;
  const real* queries = q + (long long)b * q_stride + (long long)head * GROUP_HEADS * D;
  const int room = chosen_stride - 1;
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) barrier_init(&full[s]);
    barrier_init(&merged);
    barriers_ready();
    barrier_expect(&merged, CLUSTER * (max(0, min(OWN_QUARTETS, QUARTETS - rank * OWN_QUARTETS)) * 16 + HEADS8 * 8));
  }
  __syncwarp();
  cluster_arrive_ready();
  u32 query[TILES][D / 8];
#ifdef TOUCH
  for (int i = threadIdx.x * 32; i * page_size < stored; i += THREADS * 32) touch(pages + i);
#endif
  if (settled) load_query(query, queries);
  dependency_wait();
  MARK(1)

  int total, begin, mine; // tokens of the list; the block's parts, neighbours
  bool sparse;
  auto share = [&](int count) {
    sparse = count >= 0, total = sparse ? count * UNIT : stored;
    const int parts = (total + PART_TOKENS - 1) / PART_TOKENS;
    begin = rank * (parts / CLUSTER) + min(rank, parts % CLUSTER), mine = parts / CLUSTER + (rank < parts % CLUSTER);
  };
  const int piece = lane % PIECES;
  auto entry_of = [&](int part) { return list[max(0, min(((begin + part) * PART_TOKENS + piece * PIECE) / UNIT, room - 1))]; };
  auto find = [&](int part, int entry) {
    const int i = (begin + part) * PART_TOKENS + piece * PIECE;
    Piece one = {0, 0};
    if (part < mine && i < total && (!sparse || entry >= 0)) {
      const int token = sparse ? entry * UNIT + i % UNIT : i;
      one.left = max(0, min(stored - token, PIECE));
      if (one.left > 0) {
        const int page = token / page_size;
        one.row = (pages[page] * heads + head) * page_size + token - page * page_size;
      }
    }
    return one;
  };
  const u32 ring_at = shared_at(ring);
  // Lanes of `ours` ask for a part: keys and values of a piece each, or both.
  auto ask = [&](bool ours, int slot, Piece one) {
    const u32 there = __ballot_sync(~0u, ours && one.left > 0) >> lane / ASKERS * ASKERS;
    const bool first = lane % ASKERS < PIECES;
    if (ours && first) left[slot][piece] = one.left;
    __syncwarp();
#if DRY == 1
    if (ours && lane % ASKERS == 0) barrier_expect(&full[slot], 0);
    return;
#endif
    if (ours && lane % ASKERS == 0) barrier_expect(&full[slot], __popc(there & (PIECES < 32 ? (1u << PIECES % 32) - 1 : ~0u)) * 2 * PIECE * ROW);
    if (ours && one.left > 0) {
      const u32 to = ring_at + slot * SLOT_BYTES + piece * PIECE_BYTES;
      const long long at = (long long)one.row * ROW;
      copy_bulk(first ? to : to + PIECES * PIECE_BYTES, (first ? keys : values) + at, PIECE * ROW, &full[slot]);
      if (2 * PIECES > 32) copy_bulk(to + PIECES * PIECE_BYTES, values + at, PIECE * ROW, &full[slot]);
    }
  };
  // The same by all lanes, sixteen bytes each; the piece's lanes from `base` on know it.
  auto ask_lanes = [&](bool ours, int slot, Piece one, int base) {
    if (ours) {
      if (lane >= base && lane < base + PIECES) left[slot][piece] = one.left;
      const u32 to = ring_at + slot * SLOT_BYTES;
#pragma unroll
      for (int i = lane; i < PART_TOKENS * CHUNKS; i += 32) {
        const int r = i / CHUNKS, c = i % CHUNKS, p = r / PIECE, t = r % PIECE;
        const int row = __shfl_sync(~0u, one.row, base + p), there = __shfl_sync(~0u, one.left, base + p);
        const long long at = (long long)(row + (t < there ? t : 0)) * ROW + c * 16;
        const u32 place_in = to + p * PIECE_BYTES + t * ROW + c * 16;
        copy16_sized(place_in, keys + at, t < there ? 16 : 0);
        copy16_sized(place_in + PIECES * PIECE_BYTES, values + at, t < there ? 16 : 0);
      }
    }
    copies_commit();
  };
  // The count and the first entries come together: that the list is one, and full, is nearly always true.
  constexpr int ROUNDS = (FIRST + TOGETHER - 1) / TOGETHER;
  int entries[ROUNDS] = {};
  share(list ? room : -1);
  const int count = list ? list[room] : -1;
  auto first_entries = [&] {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) entries[r] = entry_of(warp + (r * TOGETHER + lane / ASKERS) * WARPS);
  };
  if (list) first_entries();
  if (!settled) load_query(query, queries);
  if (list && count != room) {
    share(count);
    if (sparse) first_entries();
  }
  Piece asked[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) asked[r] = find(warp + (r * TOGETHER + lane / ASKERS) * WARPS, entries[r]);
  __syncthreads(); // barriers are ready
  MARK(2)
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
#if BULK
    const int part = warp + (r * TOGETHER + lane / ASKERS) * WARPS;
    ask(part < min(mine, SLOTS), part, asked[r]);
#else
#pragma unroll
    for (int k = 0; k < TOGETHER && r * TOGETHER + k < FIRST; k++) {
      const int part = warp + (r * TOGETHER + k) * WARPS;
      ask_lanes(part < mine, part, asked[r], k * ASKERS);
    }
#endif
  }
  auto look_ahead = [&](int part) { return part < mine ? find(part, sparse ? entry_of(part) : 0) : Piece{0, 0}; };
  Piece ahead = look_ahead(warp + SLOTS);

  Seen seen;
  seen.clear();
  MARK(3)
  for (int part = warp; part < mine; part += WARPS) {
    const int slot = part % SLOTS;
    const u32 at = ring_at + slot * SLOT_BYTES;
#if BULK
    barrier_await(&full[slot], part / SLOTS & 1);
#else
    copies_wait<FIRST - 1>();
    __syncwarp();
#endif
    if (part < WARPS) { MARK(4) }
#pragma unroll
    for (int t = 0; t < PART_TOKENS / TILE; t++) {
      auto exists = [&](int r) { return PIECE == 1 ? left[slot][(t * TILE + r) % PIECES] > 0 : t * 2 + (r >> 3) < left[slot][r % PIECES]; };
      const u32 ok = __ballot_sync(~0u, exists(lane & 15)) & 0xffffu;
      if (ok == 0) continue;
      if (BULK && ok != 0xffffu) { // 0 times NaN is NaN
        for (int i = lane; i < TILE * CHUNKS; i += 32) {
          if (!(ok >> i / CHUNKS & 1)) *reinterpret_cast<uint4*>(ring + (Skewed::value(at, i / CHUNKS, i % CHUNKS) - ring_at) + t * TILE_STEP) = uint4{0, 0, 0, 0};
        }
        before_bulk();
        __syncwarp();
      }
      seen.take<Skewed>(query, at + t * TILE_STEP, ok, scale_log2);
    }
    __syncwarp();
#if BULK
    if (part + SLOTS < mine) ask(lane < ASKERS, slot, ahead);
#else
    ask_lanes(part + SLOTS < mine, slot, ahead, 0);
#endif
    ahead = look_ahead(part + WARPS + SLOTS);
  }
#if !BULK
  copies_wait<0>();
#endif
  MARK(5)
  __syncthreads(); // nobody looks into the ring any more
  float* laid = reinterpret_cast<float*>(ring);
  {
    const int gid = lane >> 2, tig = lane & 3;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float l0 = seen.sum[t][0], l1 = seen.sum[t][1];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) l0 += __shfl_xor_sync(~0u, l0, o), l1 += __shfl_xor_sync(~0u, l1, o);
      const int h = t * 8 + 2 * tig;
      if (gid == 0)
        merge.warp_top[warp][h] = seen.top[t][0], merge.warp_top[warp][h + 1] = seen.top[t][1], merge.warp_sum[warp][h] = l0, merge.warp_sum[warp][h + 1] = l1;
      float* to = laid + (warp * HEADS8 + h) * LAID + gid;
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        to[k * 16] = seen.acc[t][k][0], to[LAID + k * 16] = seen.acc[t][k][1];
        to[k * 16 + 8] = seen.acc[t][k][2], to[LAID + k * 16 + 8] = seen.acc[t][k][3];
      }
    }
  }
  cluster_wait_ready();
  __syncthreads();
  MARK(6)
  auto top_of = [&](int h) {
    float m = merge.warp_top[0][h];
#pragma unroll
    for (int w = 1; w < WARPS; w++) m = fmaxf(m, merge.warp_top[w][h]);
    return m;
  };
  for (int i = threadIdx.x; i < CLUSTER * HEADS8; i += THREADS) {
    const int h = i % HEADS8;
    const float m = top_of(h);
    float l = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) l += merge.warp_sum[w][h] * exp2_fast(merge.warp_top[w][h] - m);
    push8(&merge.weight[rank][h], i / HEADS8, &merged, make_float2(m, l));
  }
  for (int i = threadIdx.x; i < QUARTETS; i += THREADS) {
    const int h = i / (D / 4);
    const float m = top_of(h);
    float4 x = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_fast(merge.warp_top[w][h] - m);
      const float4 y = *reinterpret_cast<const float4*>(laid + (w * HEADS8 + h) * LAID + i % (D / 4) * 4);
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
    push16(&merge.output[rank][i % OWN_QUARTETS], i / OWN_QUARTETS, &merged, x);
  }
  MARK(7)
  barrier_await(&merged, 0);
  MARK(8)
  real* to = out + (long long)b * out_stride + (long long)head * GROUP_HEADS * D;
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
  MARK(9)
}

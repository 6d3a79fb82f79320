// Attention of prompts' chunks over pages, for steps that no library's attention can serve: nothing is gathered, and lengths are read on the device.
//
// Built with -DD (head dimension, a multiple of 32), -DKEYS (tokens of a tile), -DWARPS and, for bfloat16, -DBF16. A block takes 16 WARPS queries of a
// head, each warp sixteen of them; keys and values come in two tiles' turns.
#include "matrix.cuh"

#define THREADS (WARPS * 32)
#define QUERIES (WARPS * 16)
#define TILE_BYTES (KEYS * ROW) // of keys, and as many of values behind them

// q, out [T, q_stride]; keys, values [P, Hk, page_size, D]; table [B, table_stride], starts [B + 1], lens [B] stored tokens with the new ones, of which
// a sequence's last are its own; page_size a multiple of 16. Grid [blocks of the longest chunk or more, Hq, B]; group query heads share a key-value head.
extern "C" __global__ void __launch_bounds__(THREADS) attend_chunk(const real* q, const char* keys, const char* values, const int* table,
    const int* starts, const int* lens, real* out, int group, int q_stride, int table_stride, int page_size, float scale_log2) {
  extern __shared__ __align__(128) char tiles[];
  const int b = blockIdx.z, head = blockIdx.y, heads = gridDim.y / group, kv = head / group;
  const int row0 = starts[b], count = starts[b + 1] - row0, first = blockIdx.x * QUERIES;
  if (first >= count) return;
  const int stored = lens[b], before = stored - count, end = min(before + min(first + QUERIES, count), stored);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
  const int mine = first + warp * 16, steps = (end + KEYS - 1) / KEYS; // this warp's first query
  const int* pages = table + (long long)b * table_stride;
  const u32 shared = shared_at(tiles);

  auto fetch = [&](int step) {
    if (step < steps) {
      const u32 to = shared + (step & 1) * 2 * TILE_BYTES;
      for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
        const int inside = i / CHUNKS, chunk = i % CHUNKS, token = min(step * KEYS + inside, end - 1), page = token / page_size;
        const long long from = (((long long)pages[page] * heads + kv) * page_size + token - page * page_size) * ROW + chunk * 16;
        const u32 size = step * KEYS + inside < end ? 16 : 0, at = to + place(inside, chunk);
        copy16_sized(at, keys + from, size), copy16_sized(at + TILE_BYTES, values + from, size);
      }
    }
    copies_commit();
  };
  fetch(0);

  u32 query[D / 16][4];
  const real* own = q + (long long)(row0 + mine) * q_stride + head * D + 2 * tig;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = gid + (i & 1) * 8;
      query[k][i] = mine + row < count ? *reinterpret_cast<const u32*>(own + (long long)row * q_stride + 16 * k + (i >> 1) * 8) : 0u;
    }
  }
  float acc[D / 8][4], top[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int c = 0; c < D / 8; c++) acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0.f;

  for (int step = 0; step < steps; step++) {
    fetch(step + 1);
    copies_wait<1>();
    __syncthreads();
    const u32 at = shared + (step & 1) * 2 * TILE_BYTES;
    if (step * KEYS <= before + mine + 15) { // otherwise all of the tile is behind the warp's queries
      float s[KEYS / 8][4];
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
          u32 r[4];
          read4(r, at + place(16 * j + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
          mma(s[2 * j], query[k][0], query[k][1], query[k][2], query[k][3], r[0], r[1]);
          mma(s[2 * j + 1], query[k][0], query[k][1], query[k][2], query[k][3], r[2], r[3]);
        }
      }
      float most[2] = {top[0], top[1]};
      const bool edge = (step + 1) * KEYS > before + mine; // some query of the warp does not see all of the tile
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int token = step * KEYS + 8 * j + 2 * tig + (e & 1), seen = before + mine + gid + (e >> 1) * 8;
          s[j][e] = edge && token > seen ? -1e30f : s[j][e] * scale_log2;
          most[e >> 1] = fmaxf(most[e >> 1], s[j][e]);
        }
      }
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int o = 1; o < 4; o <<= 1) most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], o));
        factor[h] = exp2_fast(top[h] - most[h]), top[h] = most[h], sum[h] *= factor[h];
      }
#pragma unroll
      for (int c = 0; c < D / 8; c++) acc[c][0] *= factor[0], acc[c][1] *= factor[0], acc[c][2] *= factor[1], acc[c][3] *= factor[1];
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++) {
        u32 weights[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float* two = s[2 * j + (i >> 1)] + (i & 1) * 2;
          two[0] = exp2_fast(two[0] - top[i & 1]), two[1] = exp2_fast(two[1] - top[i & 1]);
          sum[i & 1] += two[0] + two[1], weights[i] = pack_real(two[0], two[1]);
        }
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
          u32 r[4];
          read4_transposed(r, at + TILE_BYTES + place(16 * j + (lane & 7) + ((lane >> 3) & 1) * 8, 2 * c + (lane >> 4)));
          mma(acc[2 * c], weights[0], weights[1], weights[2], weights[3], r[0], r[1]);
          mma(acc[2 * c + 1], weights[0], weights[1], weights[2], weights[3], r[2], r[3]);
        }
      }
    }
    __syncthreads(); // before the tile after the next one takes this one's place
  }
  copies_wait<0>();
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) sum[h] += __shfl_xor_sync(~0u, sum[h], o);
    const int row = mine + gid + h * 8;
    if (row >= count) continue;
    real* to = out + (long long)(row0 + row) * q_stride + head * D + 2 * tig;
    const float one = 1.f / sum[h];
#pragma unroll
    for (int c = 0; c < D / 8; c++) *reinterpret_cast<u32*>(to + 8 * c) = pack_real(acc[c][2 * h] * one, acc[c][2 * h + 1] * one);
  }
}

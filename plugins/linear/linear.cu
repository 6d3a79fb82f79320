// Products of a few tokens with a matrix, y = x W^T + b, as fast as the memory gives the matrix, with the norm in front of them; and norm and gate alone.
//
// Built with -DTOKENS (1 to 4), -DWARPS (of a block), -DROWS (matrix rows of a group of warps), -DSPLIT (warps that share these rows), -DUNROLL (16-byte loads of a lane
// and row on their way), -DGATED (row n and row n + N are gate and up: silu(gate) * up), -DNORM (x is a sum that is normalized first) and, for
// bfloat16, -DBF16.
//
// A kernel may start while the one before it runs: it loads its first piece of the matrix, which nobody writes, and waits only then.
#include "common.cuh"

#ifdef BF16
__device__ __forceinline__ float2 both(u32 x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
#else
__device__ __forceinline__ float2 both(u32 x) { return __half22float2(*reinterpret_cast<const __half2*>(&x)); }
#endif
__device__ __forceinline__ float rounded(float x) { return to_float(to_real(x)); }

#define THREADS (WARPS * 32)
#define GROUPS (WARPS / SPLIT)
#define MATRIX_ROWS (ROWS * (GATED ? 2 : 1)) // that a group reads
#define CHUNK 256                            // entries of a row that a warp loads at once

__device__ __forceinline__ void unpack(const uint4& v, float2 (&entries)[4]) {
  entries[0] = both(v.x), entries[1] = both(v.y), entries[2] = both(v.z), entries[3] = both(v.w);
}
__device__ __forceinline__ u32 pack(float2 x) {
  const real pair[2] = {to_real(x.x), to_real(x.y)};
  return *reinterpret_cast<const u32*>(pair);
}

// Eight entries of every token, as they lie in memory.
struct Entries {
  uint4 x[TOKENS];
#if NORM
  uint4 more[TOKENS], scale;
#endif
};

// A token's entries as numbers. NORM: of x + more, rounded, which the block that `writes` leaves in total; their squares go to `squares`, and what is
// made is scaled by the norm's weight: the factor that all entries share is applied to the product.
__device__ __forceinline__ void numbers(const Entries& found, int t, real* total, bool writes, float2 (&entries)[4], float& squares) {
  unpack(found.x[t], entries);
#if NORM
  float2 other[4];
  unpack(found.more[t], other);
  u32 sums[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[i] = pack(make_float2(entries[i].x + other[i].x, entries[i].y + other[i].y));
    entries[i] = both(sums[i]);
  }
  if (writes) *reinterpret_cast<uint4*>(total) = make_uint4(sums[0], sums[1], sums[2], sums[3]);
  unpack(found.scale, other);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    squares = fmaf(entries[i].x, entries[i].x, fmaf(entries[i].y, entries[i].y, squares));
    entries[i].x *= other[i].x, entries[i].y *= other[i].y;
  }
#endif
}

// One result: of a product, and GATED of the one that it gates.
__device__ __forceinline__ void finish(const float* found, float offset, real* out, int t, int row, int n) {
  if (GATED) {
    const float gate = rounded(found[0]);
    out[(long long)t * n + row] = to_real(rounded(gate / (1.f + expf(-gate))) * rounded(found[1]));
  } else {
    out[(long long)t * n + row] = to_real(found[0] + offset);
  }
}

// x [TOKENS, k], matrix [n, k] (GATED: [2 n, k]), bias [n] or null, out [TOKENS, n]; NORM: more and total [TOKENS, k] (both or none), scale [k].
// k is a multiple of 8, everything aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) gemv(const real* x, const real* matrix, const real* bias, real* out, const real* more,
    const real* scale, real* total, int n, int k, float eps) {
  __shared__ float partial[WARPS][(MATRIX_ROWS + NORM) * TOKENS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp / SPLIT, part = warp % SPLIT;
  const int first = (blockIdx.x * GROUPS + group) * ROWS, start = part * CHUNK + lane * 8;
  const bool writes = blockIdx.x == 0 && group == 0 && more;
  const int index = part * 32 + lane, row = first + index / TOKENS; // one result a thread, in the end
  const bool finishes = index < ROWS * TOKENS && row < n;
  start_next();
  const real* rows[MATRIX_ROWS];
#pragma unroll
  for (int r = 0; r < MATRIX_ROWS; r++) {
    const int row = min(first + r % ROWS, n - 1) + (r / ROWS) * n;
    rows[r] = matrix + (long long)row * k;
  }
  uint4 w[UNROLL][MATRIX_ROWS];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int at = start + u * SPLIT * CHUNK;
#pragma unroll
    for (int r = 0; r < MATRIX_ROWS; r++) w[u][r] = at < k ? load_once(rows[r] + at) : make_uint4(0, 0, 0, 0);
  }
  const float offset = bias && finishes ? to_float(bias[row]) : 0.f;
  // All that a step needs is asked for at once, and a step ahead; the norm's weight is nobody's result either.
  auto read_scale = [&](Entries& e, int at) {
#if NORM
    e.scale = at < k ? *reinterpret_cast<const uint4*>(scale + at) : make_uint4(0, 0, 0, 0);
#endif
  };
  auto read = [&](Entries& e, int at) {
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      e.x[t] = at < k ? *reinterpret_cast<const uint4*>(x + (long long)t * k + at) : make_uint4(0, 0, 0, 0);
#if NORM
      e.more[t] = at < k && more ? *reinterpret_cast<const uint4*>(more + (long long)t * k + at) : make_uint4(0, 0, 0, 0);
#endif
    }
  };
#if TOKENS == 1 // the registers of more tokens would leave room for fewer blocks
  Entries own[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) read_scale(own[u], start + u * SPLIT * CHUNK);
  wait_for_input();
#pragma unroll
  for (int u = 0; u < UNROLL; u++) read(own[u], start + u * SPLIT * CHUNK);
#else
  wait_for_input();
#endif
  float sum[MATRIX_ROWS + NORM][TOKENS] = {};
  for (int base = start; base < k; base += UNROLL * SPLIT * CHUNK) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int at = base + u * SPLIT * CHUNK, next = at + UNROLL * SPLIT * CHUNK;
      if (at >= k) break;
#if TOKENS == 1
      const Entries now = own[u];
      read_scale(own[u], next), read(own[u], next);
#else
      Entries now;
      read_scale(now, at), read(now, at);
#endif
      float2 entries[MATRIX_ROWS][4];
#pragma unroll
      for (int r = 0; r < MATRIX_ROWS; r++) unpack(w[u][r], entries[r]);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        float2 numbers_of[4];
        numbers(now, t, total + (long long)t * k + at, writes, numbers_of, sum[MATRIX_ROWS + NORM - 1][t]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int r = 0; r < MATRIX_ROWS; r++)
            sum[r][t] = fmaf(entries[r][i].x, numbers_of[i].x, fmaf(entries[r][i].y, numbers_of[i].y, sum[r][t]));
      }
#pragma unroll
      for (int r = 0; r < MATRIX_ROWS; r++)
        if (next < k) w[u][r] = load_once(rows[r] + next);
    }
  }
#pragma unroll
  for (int r = 0; r < MATRIX_ROWS + NORM; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
#pragma unroll
      for (int o = 16; o; o >>= 1) sum[r][t] += __shfl_xor_sync(~0u, sum[r][t], o);
      if (lane == 0) partial[warp][r * TOKENS + t] = sum[r][t];
    }
  if (SPLIT > 1) __syncthreads();
  else __syncwarp();
  if (!finishes) return;
  float found[3] = {0.f, 0.f, 0.f};
#pragma unroll
  for (int kind = 0; kind < 3; kind++) {
    if ((kind == 1 && !GATED) || (kind == 2 && !NORM)) continue;
    const int of = kind == 2 ? MATRIX_ROWS : kind * ROWS + index / TOKENS;
    for (int s = 0; s < SPLIT; s++) found[kind] += partial[group * SPLIT + s][of * TOKENS + index % TOKENS];
  }
  if (NORM) {
    const float factor = rsqrtf(found[2] / k + eps);
    found[0] *= factor, found[1] *= factor;
  }
  finish(found, offset, out, index % TOKENS, row, n);
}

#define NORM_THREADS 512

// One token a block: total = x + more (rounded; where more is null, x), out = total / sqrt(mean(total^2) + eps), rounded, times weight.
// Everything [tokens, width]; width is a multiple of 8, at most 16384.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) rms_norm(const real* x, const real* more, const real* weight, real* out, real* total, int width,
    float eps) {
  __shared__ float sums[NORM_THREADS / 32];
  const long long row = (long long)blockIdx.x * width;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  start_next();
  wait_for_input();
  uint4 kept[4], scale[4];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = (threadIdx.x + i * NORM_THREADS) * 8;
    if (at >= width) continue;
    kept[i] = *reinterpret_cast<const uint4*>(x + row + at);
    scale[i] = *reinterpret_cast<const uint4*>(weight + at);
    if (more) {
      const uint4 other = *reinterpret_cast<const uint4*>(more + row + at);
      real* a = reinterpret_cast<real*>(&kept[i]);
      const real* b = reinterpret_cast<const real*>(&other);
#pragma unroll
      for (int j = 0; j < 8; j++) a[j] = to_real(to_float(a[j]) + to_float(b[j]));
      *reinterpret_cast<uint4*>(total + row + at) = kept[i];
    }
    const real* a = reinterpret_cast<const real*>(&kept[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += to_float(a[j]) * to_float(a[j]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = sums[lane % (NORM_THREADS / 32)];
#pragma unroll
  for (int o = NORM_THREADS / 64; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  const float factor = rsqrtf(sum / width + eps);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = (threadIdx.x + i * NORM_THREADS) * 8;
    if (at >= width) continue;
    real* a = reinterpret_cast<real*>(&kept[i]);
    const real* b = reinterpret_cast<const real*>(&scale[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) a[j] = to_real(to_float(to_real(to_float(a[j]) * factor)) * to_float(b[j]));
    *reinterpret_cast<uint4*>(out + row + at) = kept[i];
  }
}

// One stretch of a token a block: out = silu(gate) * up, gate and up side by side in both [tokens, 2 width]; out [tokens, width], width a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS) silu_gate(const real* both, real* out, int width) {
  const int at = (blockIdx.y * THREADS + threadIdx.x) * 8;
  start_next();
  wait_for_input();
  if (at >= width) return;
  const real* from = both + (long long)blockIdx.x * 2 * width + at;
  float2 gates[4], ups[4];
  unpack(*reinterpret_cast<const uint4*>(from), gates);
  unpack(*reinterpret_cast<const uint4*>(from + width), ups);
  u32 made[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 gate = gates[i], silu = make_float2(rounded(gate.x / (1.f + expf(-gate.x))), rounded(gate.y / (1.f + expf(-gate.y))));
    made[i] = pack(make_float2(silu.x * ups[i].x, silu.y * ups[i].y));
  }
  *reinterpret_cast<uint4*>(out + (long long)blockIdx.x * width + at) = make_uint4(made[0], made[1], made[2], made[3]);
}

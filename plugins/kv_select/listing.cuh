// The part of score_groups that lists packets of four tokens, of a group, that may be chosen, instead of storing all scores.
//
// Every warp first scores SAMPLED pairs of its share. From them the block estimates the heads' normalizers, up to one factor, and the pooled score that
// to.reach of its sample's units have: the bound. From then on scores are kept relative to the logarithm of bound times normalizer, so that what is to
// be listed is where the pooled exponentials are at least one, whatever the estimates are worth: who chooses checks that enough of what was listed is
// above what was not.
#if MAXIMUM
#define JOIN_TWO(a, b) __hmax2(a, b)
#define JOIN_ONE(a, b) fmaxf(a, b)
#else
#define JOIN_TWO(a, b) __hadd2(a, b)
#define JOIN_ONE(a, b) ((a) + (b))
#endif
// Where the packets of this lane's quartet stand among those of a round: pairs of bits by gid, of the first and of the second group.
const int leader = lane & (MERGED ? 30 : 28);
const u32 before = (1u << leader) - 1, watched = MERGED ? (pair == 0 ? ~0u : 0) : pair == 0 ? 0xffffu : pair == 1 ? 0xffff0000u : 0;
char* const packets_at = to.region + pair * 16;
char* const numbers_at = to.region + (long long)to.capacity * PACKET;
uint4* const sample = reinterpret_cast<uint4*>(smem + WARPS * STAGES * STAGE_BYTES) + warp * (SAMPLED * PAIRED * 32) + lane;
__half2 bar = __float2half2_rn(-1.f); // all is listed
bool sampling = !to.all;
int count = 0;

auto packed = [&](const float (&t)[2][4]) {
  return make_uint4(pack_halves(t[0][0], t[0][1]), pack_halves(t[0][2], t[0][3]), pack_halves(t[1][0], t[1][1]), pack_halves(t[1][2], t[1][3]));
};
auto unpacked = [&](const uint4& v, float plus0, float plus1, float (&t)[2][4]) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
    t[k / 2][k % 2 * 2] = two.x + (k < 2 ? plus0 : plus1), t[k / 2][k % 2 * 2 + 1] = two.y + (k < 2 ? plus0 : plus1);
  }
};
auto moved = [&](__half2 x, int o) {
  const u32 y = __shfl_xor_sync(~0u, *reinterpret_cast<const u32*>(&x), o);
  return *reinterpret_cast<const __half2*>(&y);
};
auto put_packet = [&](bool there, int slot, const uint4& scores, u32 unit) {
  put16_if(there && 2 * pair < GROUP_HEADS, packets_at + (long long)slot * PACKET, scores);
  put4_if(there && pair == 0, numbers_at + (long long)slot * 4, unit);
};
// What is finished of a pair but not listed: scores of this lane's heads, and its tokens' joined exponentials of these heads, two halves a word.
uint4 held[PAIRED];
__half2 joined[MERGED ? 2 : 4];
auto hold = [&](const float (&t)[PAIRED][2][4], const float (&u)[PAIRED][4]) {
#pragma unroll
  for (int g = 0; g < PAIRED; g++) held[g] = packed(t[g]);
#pragma unroll
  for (int v = 0; v < (MERGED ? 2 : 4); v++) joined[v] = MERGED ? __floats2half2_rn(u[0][v * 2 % 4], u[0][v * 2 % 4 + 1]) : __floats2half2_rn(u[0][v], u[PAIRED - 1][v]);
};
// List it, without a branch, so that products of the next pair stand between. j: the pair's first group.
auto list = [&](int j) {
#if MERGED
  joined[0] = JOIN_TWO(joined[0], moved(joined[0], 1)), joined[1] = JOIN_TWO(joined[1], moved(joined[1], 1));
  const u32 mask = __hge2_mask(__hmax2(joined[0], joined[1]), bar);
#else
  const bool odd = pair & 1, upper = pair & 2;
  const __half2 x = moved(odd ? joined[0] : joined[2], 1), y = moved(odd ? joined[1] : joined[3], 1);
  const __half2 p = JOIN_TWO(odd ? joined[2] : joined[0], x), q = JOIN_TWO(odd ? joined[3] : joined[1], y), z = moved(upper ? p : q, 2);
  __half2 one = JOIN_TWO(upper ? q : p, z);
  one = __hmax2(one, moved(one, 1)), one = __hmax2(one, moved(one, 2));
  const u32 mask = __hge2_mask(one, bar);
#endif
  const u32 hits = __ballot_sync(~0u, mask & watched);
  const bool room = count + 16 <= to.capacity;
  const u32 unit = row.dealt.pair(j >> 1, SAMPLED) * 64 + second * 32 + gid * 4;
  const int slot = count + __popc(hits & before);
  put_packet(room && (MERGED ? mask : mask & 0xffffu), slot, held[0], unit);
  if (!MERGED) put_packet(room && mask >> 16, slot + ((mask & 0xffffu) != 0), held[PAIRED - 1], unit + 32);
  count = room ? count + __popc(hits) : to.capacity + 1;
};
auto finish = [&](const float (&c)[4][4], const float (&plus)[PAIRED][2], int j, int exist) {
  float t[PAIRED][2][4], u[PAIRED][4];
#pragma unroll
  for (int g = 0; g < PAIRED; g++) {
    float pooled[2], e[2][4];
    scaled(c, plus, g, t[g], pooled);
#pragma unroll
    for (int v = 0; v < 4; v++) e[0][v] = exp2_fast(t[g][0][v]), e[1][v] = exp2_fast(t[g][1][v]), u[g][v] = g < exist ? JOIN_ONE(e[0][v], e[1][v]) : -2.f;
    if (g < exist) sum0 += (e[0][0] + e[0][1]) + (e[0][2] + e[0][3]), sum1 += (e[1][0] + e[1][1]) + (e[1][2] + e[1][3]);
  }
  hold(t, u);
  list(j);
};
auto set_bound = [&](float (&plus)[PAIRED][2]) {
#pragma unroll
  for (int i = 0; i < SAMPLED * PAIRED; i++) { // all was listed: this lane's scores, by gid and group
    const int slot = MERGED ? i * 16 + gid * 2 + second : i / 2 * 16 + gid * 2 + i % 2;
    sample[i * 32] = 2 * pair < GROUP_HEADS ? __ldcg(reinterpret_cast<const uint4*>(packets_at + slot * PACKET)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll 1
  for (int i = 0; i < SAMPLED; i++) { // sums of every pair
    float z[2] = {0.f, 0.f};
#pragma unroll
    for (int g = 0; g < PAIRED; g++) {
      float t[2][4];
      unpacked(sample[(i * PAIRED + g) * 32], 0.f, 0.f, t);
#pragma unroll
      for (int v = 0; v < 4; v++) z[0] += exp2_fast(t[0][v]), z[1] += exp2_fast(t[1][v]);
    }
#pragma unroll
    for (int o = MERGED ? 2 : 4; o < 32; o <<= 1) z[0] += __shfl_xor_sync(~0u, z[0], o), z[1] += __shfl_xor_sync(~0u, z[1], o);
    if (gid == 0 && second == 0) pair_sums[2 * pair][warp * SAMPLED + i] = z[0], pair_sums[2 * pair + 1][warp * SAMPLED + i] = z[1];
  }
  __syncthreads();
  if (warp < 8) { // without the largest: one heavy token says nothing about all others
    const float z = pair_sums[warp][lane];
    float sum = z, most = z;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o), most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    if (lane == 0) norms[warp] = warp < GROUP_HEADS ? log2f(sum - most) : 30000.f;
  }
  __syncthreads();
  const float norm0 = norms[2 * pair], norm1 = norms[2 * pair + 1];
#pragma unroll 1
  for (int i = 0; i < SAMPLED * PAIRED; i++) {
    float t[2][4];
    unpacked(sample[i * 32], -norm0, -norm1, t);
#pragma unroll
    for (int v = 0; v < 4; v++) {
      float u = JOIN_ONE(exp2_fast(t[0][v]), exp2_fast(t[1][v]));
      u = JOIN_ONE(u, __shfl_xor_sync(~0u, u, 1));
      if (!MERGED) u = JOIN_ONE(u, __shfl_xor_sync(~0u, u, 2));
      if (pair == (MERGED ? v & 1 : v)) atomicAdd(&bins[min(max((int)(__float_as_uint(u) >> 20) - (1048 - BOUND_BINS), 0), BOUND_BINS - 1)], 1);
    }
  }
  __syncthreads();
  int own = 0, found = 0;
#pragma unroll
  for (int k = 0; k < BOUND_BINS / 32; k++) own += bins[BOUND_BINS - 1 - lane * (BOUND_BINS / 32) - k];
  int seen = warp_scan(own) - own;
  if (seen < to.reach && seen + own >= to.reach) {
#pragma unroll 1
    for (found = BOUND_BINS - lane * (BOUND_BINS / 32); seen < to.reach;) seen += bins[--found];
  }
  found = __reduce_max_sync(~0u, found);
  const float theta = log2f(__uint_as_float((u32)(found + 1048 - BOUND_BINS) << 20));
  const float more0 = -norm0 - theta, more1 = -norm1 - theta; // from scores over the first reference to those over the bound
  ref0 -= more0, ref1 -= more1;
  sum0 *= exp2_fast(more0), sum1 *= exp2_fast(more1);
#pragma unroll
  for (int g = 0; g < PAIRED; g++) plus[g][0] += more0, plus[g][1] += more1;
  if (threadIdx.x < 4) shared_bound[2 * pair] = ref0, shared_bound[2 * pair + 1] = ref1; // unless merged, lanes of one group
  bar = __float2half2_rn(1.f), sampling = false, count = 0;
#pragma unroll 1
  for (int i = 0; i < SAMPLED; i++) {
    float t[PAIRED][2][4], u[PAIRED][4];
#pragma unroll
    for (int g = 0; g < PAIRED; g++) {
      unpacked(sample[(i * PAIRED + g) * 32], more0, more1, t[g]);
#pragma unroll
      for (int v = 0; v < 4; v++) u[g][v] = JOIN_ONE(exp2_fast(t[g][0][v]), exp2_fast(t[g][1][v]));
    }
    hold(t, u);
    list(2 * i);
  }
};

// Column sums on GPUs of compute capability 9.0: what keys receive from all queries, by matrix instructions of a warp group.
//
// A block owns KEYS keys of one query head, as operands in the registers of two warp groups, and walks over the queries that see them in tiles of TILE.
// A third warp group brings the tiles into a ring of shared memory. While the first two take the exponentials of one half of their keys and add them up, the
// products of their other half or of the other warp group are under way; scores never leave registers. A key's sum is added up by four threads in the order
// of the queries: the same bits in every run.
//
// Definitions: D head dimension (64, 128), BF16 (1: bfloat16, 0: float16), GROUP query heads of a KV head.
// Grid: (blocks of keys * together, Hq / together); block: 384 threads.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if BF16
using Real = __nv_bfloat16;
#define TYPE "bf16"
#else
using Real = __half;
#define TYPE "f16"
#endif

constexpr int TILE = 128, STAGES = 6, KEYS = 256, STEPS = D / 16;
constexpr int TILE_BYTES = TILE * D * 2, COPIES = TILE_BYTES / 16 / 128;
constexpr int LATE = 2;  // tiles that are requested and not yet announced
constexpr float LOG2_E = 1.4426950408889634f;

struct Ring {
    unsigned char tiles[STAGES][TILE_BYTES];
    float norms[STAGES][TILE];
    unsigned long long full[STAGES], empty[STAGES];
};

__device__ __forceinline__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void init(unsigned long long* barrier, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            shared_address(barrier)), "r"(parity) : "memory");
}

// Names rows of 128 bytes, eight of them 1,024 bytes apart from the next eight, their 16-byte pieces exchanged by the row's number.
__device__ __forceinline__ unsigned long long describe(unsigned address) {
    return (unsigned long long)((address & 0x3ffff) >> 4) | (1ull << 16) | ((1024ull >> 4) << 32) | (1ull << 62);
}

// Accumulators are registers with names: as values of C++ they would be moved when a loop begins again, and wait for that.
#define EIGHT(x, i) #x #i "0, " #x #i "1, " #x #i "2, " #x #i "3, " #x #i "4, " #x #i "5, " #x #i "6, " #x #i "7"
#define ALL(x) EIGHT(x, 0) ", " EIGHT(x, 1) ", " EIGHT(x, 2) ", " EIGHT(x, 3) ", " EIGHT(x, 4) ", " EIGHT(x, 5) ", " EIGHT(x, 6) ", " EIGHT(x, 7)
#define MULTIPLY(x)                                                                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" ALL(x) "}, {%0, %1, %2, %3}, %4, p, 1, 1, 0;\n}" ::"r"( \
                     key[0]), "r"(key[1]), "r"(key[2]), "r"(key[3]), "l"(queries), "r"(add) : "memory")
#define READ(x, i)                                                                                                                             \
    asm volatile("mov.f32 %0, " #x #i "0; mov.f32 %1, " #x #i "1; mov.f32 %2, " #x #i "2; mov.f32 %3, " #x #i "3;" : "=f"(s[0]), "=f"(s[1]), \
                 "=f"(s[2]), "=f"(s[3]));                                                                                                     \
    asm volatile("mov.f32 %0, " #x #i "4; mov.f32 %1, " #x #i "5; mov.f32 %2, " #x #i "6; mov.f32 %3, " #x #i "7;" : "=f"(s[4]), "=f"(s[5]), \
                 "=f"(s[6]), "=f"(s[7]))

// Scores [64 keys, TILE queries] of bank 0 or 1 (+)= keys [64, 16] queries [16, TILE].
template <int BANK>
__device__ __forceinline__ void multiply(const unsigned (&key)[4], unsigned long long queries, int add) {
    if constexpr (BANK == 0) MULTIPLY(a);
    else MULTIPLY(b);
}

// Returns eight scores of a thread: two queries of two keys, and the same eight queries further.
template <int BANK, int EIGHTH>
__device__ __forceinline__ void read(float (&s)[8]) {
#define CASE(i)                            \
    if constexpr (EIGHTH == i) {           \
        if constexpr (BANK == 0) { READ(a, i); } else { READ(b, i); } \
    }
    CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
}

template <int BANK>
__device__ __forceinline__ void begin(const unsigned (&key)[STEPS][4], unsigned tile) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; step++) multiply<BANK>(key[step], describe(tile + step / 4 * (TILE * 128) + step % 4 * 32), step != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Adds what sixteen queries pay to a thread's two keys; `seen` is the query that the first key is seen by first.
template <int BANK, int EIGHTH, bool MASKED>
__device__ __forceinline__ void collect_eighth(const float* norms, float scale2, float (&sum)[4], int seen) {
    float s[8];
    read<BANK, EIGHTH>(s);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = EIGHTH * 16 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const float share = power(s[i] * scale2 - norms[column]);
        sum[i % 4] += !MASKED || column >= seen + i % 4 / 2 * 8 ? share : 0.f;
    }
}

template <int BANK, bool MASKED>
__device__ __forceinline__ void collect(const float* norms, float scale2, float (&sum)[4], int seen) {
    collect_eighth<BANK, 0, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 1, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 2, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 3, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 4, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 5, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 6, MASKED>(norms, scale2, sum, seen);
    collect_eighth<BANK, 7, MASKED>(norms, scale2, sum, seen);
}

// Brings tiles: 16 bytes a copy, laid out as `describe` says. A tile is announced when LATE - 1 more have been requested.
__device__ __forceinline__ void produce(Ring& ring, const Real* query, const float* lse, int low, int count, int tiles, long long row_stride) {
    constexpr int ROWS = 128 / (D / 8);  // of one copy by all threads
    const int thread = threadIdx.x - 256, part = thread % (D / 8), begin = thread / (D / 8);
    const unsigned at = part / 8 * (TILE * 128) + begin * 128 + ((part % 8) ^ (begin % 8)) * 16;
    float norm[LATE];
    for (int tile = 0; tile < tiles + LATE; tile++) {
        if (tile >= LATE) {
            const int stage = (tile - LATE) % STAGES;
            asm volatile("cp.async.wait_group %0;" ::"n"(LATE - 1) : "memory");
            ring.norms[stage][thread] = norm[0];
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // matrix instructions read by another way
            arrive(&ring.full[stage]);
        }
#pragma unroll
        for (int i = 0; i < LATE - 1; i++) norm[i] = norm[i + 1];
        if (tile < tiles) {
            const int stage = tile % STAGES, turn = tile / STAGES, first = low + tile * TILE;
            if (turn) wait(&ring.empty[stage], (turn - 1) & 1);
            const unsigned to = shared_address(ring.tiles[stage]) + at;
#pragma unroll 2
            for (int copy = 0; copy < COPIES; copy++) {
                const Real* from = query + (long long)min(first + begin + copy * ROWS, count - 1) * row_stride + part * 8;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + copy * ROWS * 128), "l"(from) : "memory");
            }
            norm[LATE - 1] = first + thread < count ? lse[first + thread] * LOG2_E : __int_as_float(0x7f800000);  // who is not there pays nothing
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
}

__device__ __forceinline__ void load_keys(unsigned (&key)[STEPS][4], const Real* keys, int first, int stored) {
    const int lane = threadIdx.x % 32, row = first + lane / 4;
    const Real *one = keys + (long long)min(row, stored - 1) * D + lane % 4 * 2, *other = keys + (long long)min(row + 8, stored - 1) * D + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        key[step][0] = *reinterpret_cast<const unsigned*>(one + step * 16);
        key[step][1] = *reinterpret_cast<const unsigned*>(other + step * 16);
        key[step][2] = *reinterpret_cast<const unsigned*>(one + step * 16 + 8);
        key[step][3] = *reinterpret_cast<const unsigned*>(other + step * 16 + 8);
    }
}

__device__ __forceinline__ void store_sums(float* sums, const float (&sum)[4], int first, int stored) {
    const int lane = threadIdx.x % 32, row = first + lane / 4;
    float total[2] = {sum[0] + sum[1], sum[2] + sum[3]};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(~0u, total[i], 1);
        total[i] += __shfl_xor_sync(~0u, total[i], 2);
        if (lane % 4 == 0 && row + 8 * i < stored) sums[row + 8 * i] = total[i];
    }
}

// Adds up what a warp group's keys receive from a tile. Nothing is under way at its end: the assembler would make products that cross a loop's end wait.
template <bool MASKED>
__device__ __forceinline__ void take(Ring& ring, int tile, const unsigned (&key)[2][STEPS][4], float (&sum)[2][4], int own, float scale2) {
    const int stage = tile % STAGES;
    wait(&ring.full[stage], tile / STAGES & 1);
    begin<0>(key[0], shared_address(ring.tiles[stage]));
    begin<1>(key[1], shared_address(ring.tiles[stage]));
    finish<1>();
    collect<0, MASKED>(ring.norms[stage], scale2, sum[0], own);
    finish<0>();
    collect<1, MASKED>(ring.norms[stage], scale2, sum[1], own + 64);
}

__device__ __forceinline__ void give_back(Ring& ring, int tile) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&ring.empty[tile % STAGES]);
}

// Adds up what a warp group's keys receive from `tiles` tiles of queries, the first of which is number `first` among the stored tokens.
__device__ __forceinline__ void consume(Ring& ring, const Real* keys, float* sums, int first_token, int first, int tiles, int stored, float scale2) {
    const int warp = threadIdx.x % 128 / 32, group_token = first_token + threadIdx.x / 128 * 128, own = group_token + warp * 16;
    unsigned key[2][STEPS][4];
    float sum[2][4] = {};
    asm volatile(".reg .f32 " ALL(a) ";\n.reg .f32 " ALL(b) ";");
#pragma unroll
    for (int half = 0; half < 2; half++) load_keys(key[half], keys, own + half * 64, stored);
    int tile = 0;
    for (; tile < tiles && first + tile * TILE + TILE <= group_token; tile++) give_back(ring, tile);  // of no query that sees these keys
    for (; tile < tiles && first + tile * TILE < group_token + 127; tile++) {
        take<true>(ring, tile, key, sum, own + threadIdx.x % 32 / 4 - first - tile * TILE, scale2);
        give_back(ring, tile);
    }
    for (; tile < tiles; tile++) {
        take<false>(ring, tile, key, sum, 0, scale2);
        give_back(ring, tile);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) store_sums(sums, sum[half], own + half * 64, stored);
}

// Writes sums [Hq, stored] fp32 of what each stored token receives from queries skipped .. count - 1, the last `count` tokens. query [count, Hq, D] by strides
// query_row and query_head, keys [Hk, stored, D] by key_head, lse [Hq, count] fp32 by lse_head: natural logarithms of the sums of exponentials; scale2 is
// attention's scale times log2 e; `together` heads take turns.
extern "C" __global__ void __launch_bounds__(384, 1) column_sums(const Real* query, const Real* keys, const float* lse, float* sums, int count, int stored, int query_row,
                                                                int query_head, int key_head, int lse_head, int skipped, int together, float scale2) {
    extern __shared__ unsigned char memory[];
    Ring& ring = *reinterpret_cast<Ring*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
    const int block = blockIdx.x / together, head = blockIdx.y * together + blockIdx.x % together;
    const int first_token = block * KEYS, offset = stored - count, low = max(skipped, first_token - offset);
    const int tiles = max(count - low + TILE - 1, 0) / TILE;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) init(&ring.full[stage], 128), init(&ring.empty[stage], 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        produce(ring, query + (long long)head * query_head, lse + (long long)head * lse_head, low, count, tiles, query_row);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(ring, keys + (long long)(head / GROUP) * key_head, sums + (long long)head * stored, first_token, low + offset, tiles, stored, scale2);
    }
}

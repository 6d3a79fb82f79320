// Recall of selected pages from host memory into device frames, planned and copied in one launch: by a thread-block cluster for each row (a KV head of
// a sequence), or by fewer that take rows in turn.
//
// Built with -DCLUSTER (1, 2, 4, 8 or 16), -DROW (bytes of a key of one head), -DTOKENS (of a page), -DUNIT (tokens of a list entry: 1 or a page) and
// -DIN_FLIGHT (vectors of sixteen bytes that a thread asks for before it stores any). Of encoded tokens a page of one head is one record: -DRECORD,
// its bytes, and -DEND0 to -DEND5, where its parts end, each of which has a pool of its own on the device; -DUNIT is then any part of a page.
//
// Every block of a cluster plans alike: which listed pages are in a frame, which frames the others take (empty ones, then the least recently selected,
// then the lowest). What does not depend on the list is read and put in order before the kernel waits for the list: lengths, and what the frames hold,
// which nothing writes between the end of the step before and this launch. Pinned memory answers after microseconds, so the blocks of a cluster bring
// each page together and ask for many pages at once. The first block writes the new state once all have read the old one.
// A list of tokens is one of pages, each named once; what it gets back are the places of its tokens.
#include "common.cuh"

typedef long long i64;

#define THREADS 256
#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
#ifdef RECORD
#define VECTORS (RECORD / 16)
#else
#define VECTORS (2 * TOKENS * ROW / 16) // of a page: keys, then values
#endif
#define HIT 0x7fffffff   // the age of a frame that is listed
#define TAKEN 0x7ffffffe // of one that is to be taken

constexpr int PARTS = (VECTORS + THREADS - 1) / THREADS; // of a page: a vector a thread
constexpr int SHARERS = PARTS >= CLUSTER ? CLUSTER : PARTS >= 8 ? 8 : PARTS >= 4 ? 4 : PARTS >= 2 ? 2 : 1; // blocks that bring a page together
constexpr int TEAMS = CLUSTER / SHARERS;
constexpr int LOADS = (PARTS + SHARERS - 1) / SHARERS; // of a thread and page
constexpr int AT_ONCE = IN_FLIGHT > LOADS ? IN_FLIGHT / LOADS : 1; // pages of a team

// Host memory changes between launches only, but is read once: no cache is to keep it.
__device__ __forceinline__ uint4 load_once(const char* p) { return __ldcv(reinterpret_cast<const uint4*>(p)); }

// Where a page of a head lies on the host, in bytes.
struct Host {
  char* base;
  i64 page, head, part, token;
  // A vector of a head in page 0.
  __device__ __forceinline__ char* at(int h, int vector) const {
    const int byte = vector * 16;
#ifdef RECORD
    return base + h * head + byte;
#else
    const int row = byte / ROW;
    return base + h * head + (row / TOKENS) * part + (row % TOKENS) * token + byte % ROW;
#endif
  }
};
// The same vector in a pool's row 0, and the bytes of a row there.
struct Spot {
  char* at;
  int step;
};
// The device's pools: keys and values, or the parts of a record.
struct Pools {
  char *p0, *p1, *p2, *p3, *p4, *p5;
  __device__ __forceinline__ Spot find(int vector) const {
    const int byte = vector * 16;
#ifdef RECORD
    if (byte < END0) return {p0 + byte, END0};
    if (byte < END1) return {p1 + byte - END0, END1 - END0};
    if (byte < END2) return {p2 + byte - END1, END2 - END1};
    if (byte < END3) return {p3 + byte - END2, END3 - END2};
    if (byte < END4) return {p4 + byte - END3, END4 - END3};
    return {p5 + byte - END4, END5 - END4};
#else
    return {byte < TOKENS * ROW ? p0 + byte : p1 + byte - TOKENS * ROW, TOKENS * ROW};
#endif
  }
};

// Brings pages of a head, named by where they lie on the host, to frames: rows first + frame * heads of the pools.
__device__ __forceinline__ void bring(const Host& host, const int* homes, const int* frames, int count, int head, const Pools& pools, int first, int heads,
    int rank) {
  const char* from[LOADS];
  Spot to[LOADS];
  bool mine[LOADS];
#pragma unroll
  for (int l = 0; l < LOADS; l++) {
    const int vector = (l * SHARERS + rank % SHARERS) * THREADS + threadIdx.x;
    from[l] = host.at(head, vector), to[l] = pools.find(vector), mine[l] = vector < VECTORS;
  }
#pragma unroll 1
  for (int begin = rank / SHARERS; begin < count; begin += TEAMS * AT_ONCE) {
    uint4 v[AT_ONCE][LOADS];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = begin + k * TEAMS;
      if (i < count) {
        const i64 page = homes[i] * host.page;
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
          if (mine[l]) v[k][l] = load_once(from[l] + page);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = begin + k * TEAMS;
      if (i < count) {
        const i64 row = first + frames[i] * heads;
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
          if (mine[l]) *reinterpret_cast<uint4*>(to[l].at + row * to[l].step) = v[k][l];
        }
      }
    }
  }
}

// Numbers, over all threads of a block, those that ask: a thread's number among them, from `before` on, which grows by all of them.
__device__ __forceinline__ int number_of_thread(bool asks, int& before, int* of_warps) {
  const int t = threadIdx.x;
  const u32 votes = __ballot_sync(~0u, asks);
  if (t % 32 == 0) of_warps[t / 32] = __popc(votes);
  __syncthreads();
  int number = before + __popc(votes & ((1u << t % 32) - 1));
  for (int w = 0; w < THREADS / 32; w++) {
    if (w < t / 32) number += of_warps[w];
    before += of_warps[w];
  }
  __syncthreads();
  return number;
}

// Of page p, where in the ascending list of n wanted ones it would stand.
__device__ __forceinline__ int find(const int* wanted, int n, int page) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (wanted[middle] < page) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The sum over all threads of a block.
__device__ __forceinline__ int sum_of_threads(int count, int* of_warps) {
  for (int by = 16; by; by >>= 1) count += __shfl_xor_sync(~0u, count, by);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = count;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < THREADS / 32; w++) total += of_warps[w];
  __syncthreads();
  return total;
}

// Orders at most as many frames as there are threads by age, the lowest of equal ones first.
__device__ __forceinline__ void order_frames(const int* age, int frames, int* by_age) {
  const int t = threadIdx.x;
  if (t >= frames) return;
  const int own = age[t];
  int before = 0;
#pragma unroll 4
  for (int g = 0; g < frames; g++) before += age[g] < own || (age[g] == own && g < t);
  by_age[before] = t;
}

// Finds the `missing` frames of least age, the lowest of equal ones: victim [missing], ascending. Frames of age HIT are in use; by_age is the order of
// all of them before that was known, where there are no more than threads.
__device__ __forceinline__ void find_victims(int* age, const int* by_age, int frames, int missing, int* victim, int* of_warps) {
  const int t = threadIdx.x;
  if (frames <= THREADS) {
    const int f = t < frames ? by_age[t] : 0;
    const bool free = t < frames && age[f] != HIT;
    int before = 0, taken = 0;
    const int number = number_of_thread(free, before, of_warps);
    if (free && number < missing) age[f] = TAKEN;
    __syncthreads();
    const bool take = t < frames && age[t] == TAKEN;
    const int place = number_of_thread(take, taken, of_warps);
    if (take) victim[place] = t;
    __syncthreads();
    return;
  }
  int low = -2, high = HIT - 4; // fewer than missing are at most low, that many or more at most high; their distance is an int
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    int count = 0;
#pragma unroll 1
    for (int f = t; f < frames; f += THREADS) count += age[f] <= middle;
    if (sum_of_threads(count, of_warps) >= missing) high = middle;
    else low = middle;
  }
  int below = 0;
#pragma unroll 1
  for (int f = t; f < frames; f += THREADS) below += age[f] < high;
  int equal = sum_of_threads(below, of_warps), taken = 0; // frames of age `high` are taken until there are enough
#pragma unroll 1
  for (int first = 0; first < frames; first += THREADS) {
    const int f = first + t, own = f < frames ? age[f] : HIT;
    const int number_equal = number_of_thread(own == high, equal, of_warps);
    const bool take = own < high || (own == high && number_equal < missing);
    const int number = number_of_thread(take, taken, of_warps);
    if (take) victim[number] = f;
  }
  __syncthreads();
}

// selection [B, H, room + 1] int32: ascending pages (or tokens, of at most width pages) and last their count, -1 for all of them; lens [B] stored
// tokens; slots [B]; table [B, table_stride] pages of the host; host as its strides say; keys, values [Z (F + R), H, TOKENS, D] pools of frames and
// rings; held, stamps [Z, H, F] int32; moved [2] counts. With ahead the selection is the next step's, which has one token more; else places
// [B, H, room + 1] gets the places of the entries and rows [B, F + R] the row of every place; of records places gets the rows themselves, where all is
// read those of all pages, and rows is not written. With flush the page that ends `behind` tokens before the newest is written to the host where that is
// its last. With pending [B, H, 1 + 2 F] nothing is copied: it gets the number of copies and their pages and frames.
extern "C" __global__ void __launch_bounds__(THREADS, IN_FLIGHT > 4 ? 3 : 4) recall(const int* selection, const int* lens, const int* slots, const int* table, char* host_base,
    char* keys, char* values, char* pool2, char* pool3, char* pool4, char* pool5, int* held, int* stamps, unsigned long long* moved, int* places,
    int* rows, int* pending, i64 host_page, i64 host_head, i64 host_part, i64 host_token, int batch, int heads, int room, int width,
    int table_stride, int frames, int ring, int num_slots, int behind, int ahead, int flush) {
  extern __shared__ __align__(16) char arena[];
  __shared__ int warp_missing[THREADS / 32], by_age[THREADS];
  int *wanted = reinterpret_cast<int*>(arena), *place = wanted + width, *pages = place + width;
  int *age = pages + frames, *victim = age + frames, *copied = victim + frames;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, t = threadIdx.x;
  const Host host = {host_base, host_page, host_head, host_part, host_token};
  const Pools pools = {keys, values, pool2, pool3, pool4, pool5};
  auto recall_row = [&](int head, int b) {
    const int now = lens[b], stored = now + ahead, slot = slots[b], newest = (stored - 1) / TOKENS;
    const int recent = newest - ring; // the last page that is not in the ring
    const i64 state = ((i64)slot * heads + head) * frames;
    const int *list = selection + ((i64)b * heads + head) * (room + 1), *own_table = table + (i64)b * table_stride;
#pragma unroll 1
    for (int f = t; f < frames; f += THREADS) {
      const int page = held[state + f], stamp = stamps[state + f];
      pages[f] = page, age[f] = page < 0 ? -1 : stamp;
    }
    __syncthreads();
    cluster_arrive(); // the old state has been read
    if (frames <= THREADS) order_frames(age, frames, by_age);
    MARK(0)
    dependency_wait();
    MARK(1)
    const int first_entry = t < room ? list[t] : 0, count = list[room];
    const bool whole = count < 0;
    int first_home = 0; // where the page of this thread's first entry lies on the host: asked for before it is known to be missing
#if UNIT == TOKENS
    const int n = min(whole ? newest + 1 : count, width);
#pragma unroll 1
    for (int j = t; j < n; j += THREADS) {
      const int page = whole ? j : j == t ? first_entry : list[j];
      wanted[j] = page, place[j] = page > recent ? frames + ring - 1 - (newest - page) : HIT;
    }
    if (t < n) first_home = own_table[whole ? t : first_entry];
#else
    int n = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += THREADS) {
      const int j = first + t, page = j < count ? (j == t ? first_entry : list[j]) * UNIT / TOKENS : 0;
      const bool begins = j < count && (j == 0 || list[j - 1] * UNIT / TOKENS != page);
      const int number = number_of_thread(begins, n, warp_missing);
      if (begins && number < width) wanted[number] = page;
    }
    n = min(whole ? newest + 1 : n, width);
#pragma unroll 1
    for (int j = t; whole && j < n; j += THREADS) wanted[j] = j;
    __syncthreads();
#pragma unroll 1
    for (int j = t; j < n; j += THREADS) place[j] = wanted[j] > recent ? frames + ring - 1 - (newest - wanted[j]) : HIT;
    if (t < n) first_home = own_table[wanted[t]];
#endif
    __syncthreads();
#pragma unroll 1
    for (int f = t; f < frames; f += THREADS) {
      const int page = pages[f];
      const int low = find(wanted, n, page);
      if (page >= 0 && low < n && wanted[low] == page && page <= recent) place[low] = f, age[f] = HIT;
    }
    __syncthreads();
    MARK(2)
    int missing = 0; // number the pages that are in no frame
#pragma unroll 1
    for (int first = 0; first < n; first += THREADS) {
      const int j = first + t;
      const bool own = j < n && place[j] == HIT;
      const int number = number_of_thread(own, missing, warp_missing);
      if (own) place[j] = -1 - number;
    }
    if (missing) {
      find_victims(age, by_age, frames, missing, victim, warp_missing);
#pragma unroll 1
      for (int j = t; j < n; j += THREADS) {
        if (place[j] < 0) {
          const int number = -1 - place[j];
          copied[number] = pending ? wanted[j] : j == t ? first_home : own_table[wanted[j]], place[j] = victim[number];
        }
      }
      __syncthreads();
    }
    MARK(3)
    auto tell = [&] {
#pragma unroll 1
      for (int j = t; j < n; j += THREADS) {
        if (wanted[j] <= recent) held[state + place[j]] = wanted[j], stamps[state + place[j]] = 2 * stored - ahead;
      }
      if (missing && t == 0) atomicAdd(moved + ahead, (unsigned long long)missing);
      if (pending) {
        int* to = pending + ((i64)b * heads + head) * (1 + 2 * frames);
        if (t == 0) to[0] = missing;
#pragma unroll 1
        for (int i = t; i < missing; i += THREADS) to[1 + 2 * i] = copied[i], to[2 + 2 * i] = victim[i];
      }
      if (ahead) return;
      int* to = places + ((i64)b * heads + head) * (room + 1);
#ifdef RECORD
      const auto row_of = [&](int p, int page) { return p < frames ? slot * frames + p : num_slots * frames + slot * ring + page % ring; };
#pragma unroll 1
      for (int j = t; j <= room; j += THREADS) {
        const int page = whole ? j : j < count ? list[j] * UNIT / TOKENS : -1;
        const int i = whole ? j : page < 0 ? n : find(wanted, n, page);
        to[j] = i < n && j < room ? row_of(place[i], page) : -1;
      }
#else
#if UNIT == TOKENS
#pragma unroll 1
      for (int j = t; j < room; j += THREADS) to[j] = j < n ? place[j] : -1;
      if (t == 0) to[room] = whole ? -1 : n;
#else
#pragma unroll 1
      for (int j = t; j < room; j += THREADS) to[j] = j < count ? place[find(wanted, n, list[j] * UNIT / TOKENS)] * TOKENS + list[j] % TOKENS : -1;
      if (t == 0) to[room] = count;
#endif
      if (head) return;
      // A sequence that is read whole has the same frames in all heads, since their lists have always been the same.
#pragma unroll 1
      for (int i = t; i < frames + ring; i += THREADS) {
        const int page = whole ? i : newest - (frames + ring - 1 - i);
        int row = slot * frames + min(i, frames - 1);
        if (whole && i < n && place[i] < frames) row = slot * frames + place[i];
        else if (whole ? i < n : i >= frames && page >= 0) row = num_slots * frames + slot * ring + page % ring;
        rows[(i64)b * (frames + ring) + i] = row;
      }
#endif
    };
    if (rank == 0) cluster_wait(), tell();
    MARK(4)
    if (missing && !pending) bring(host, copied, victim, missing, head, pools, slot * frames * heads + head, heads, rank);
    if (flush && now > behind && (now - behind) % TOKENS == 0 && rank == CLUSTER - 1) {
      const int page = (now - behind) / TOKENS - 1, home = own_table[page];
      const i64 row = ((i64)num_slots * frames + (i64)slot * ring + page % ring) * heads + head;
#pragma unroll 1
      for (int vector = t; vector < VECTORS; vector += THREADS) {
        const Spot spot = pools.find(vector);
        *reinterpret_cast<uint4*>(host.at(head, vector) + home * host.page) = *reinterpret_cast<const uint4*>(spot.at + row * spot.step);
      }
    }
    if (rank) cluster_wait();
    MARK(5)
  };
  for (int row = blockIdx.y; row < batch * heads; row += gridDim.y) {
    recall_row(row % heads, row / heads);
    __syncthreads(); // the next row is planned in the same memory
  }
}

// What the other kernels of a decode step need to know of the open pages, from lens [B], slots [B] and table [B, table_stride]: the row of the open
// page, the tokens in it, its page number, the tokens of the next step, and the length behind which no place holds tokens; each [B] int32.
extern "C" __global__ void open_pages(const int* lens, const int* slots, const int* table, int* row, int* inside, int* home, int* next, int* end, int batch,
    int table_stride, int frames, int ring, int num_slots, int budget) {
  dependency_wait();
  for (int b = threadIdx.x; b < batch; b += 32) {
    const int stored = lens[b], newest = (stored - 1) / TOKENS, filled = (stored - 1) % TOKENS + 1;
    row[b] = num_slots * frames + slots[b] * ring + newest % ring;
    inside[b] = filled, home[b] = table[(i64)b * table_stride + newest], next[b] = stored + 1;
    end[b] = stored <= budget ? stored : (frames + ring - 1) * TOKENS + filled;
  }
}

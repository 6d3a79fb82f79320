// Forgets the queries that are remembered of sequences whose prompts are being read: what they would be compared with is no query of an answer.
typedef unsigned int u32;

// remembered [Z, words], words of two channels each, become NaN in the rows that slots [B] name; grid [B].
extern "C" __global__ void forget_queries(u32* remembered, const int* slots, int words) {
  u32* row = remembered + (long long)slots[blockIdx.x] * words;
  for (int i = threadIdx.x; i < words; i += blockDim.x) row[i] = 0xffffffffu;
}

// Leaves the shared memory of every multiprocessor full of one word, or of words that all differ where `word` is 1.
extern "C" __global__ void __launch_bounds__(1024) fill_shared(unsigned word, int words) {
  extern __shared__ unsigned room[];
  for (int i = threadIdx.x; i < words; i += 1024) static_cast<volatile unsigned*>(room)[i] = word == 1 ? i * 2654435761u ^ blockIdx.x * 40503u : word;
}

// What the library repeats: a blob that tables.py writes from recorded launches, in little-endian numbers, read where it lies.
#pragma once
#include <cstdint>
#include <cstring>

namespace trtkv {

enum Source : int32_t { kInput, kOutput, kBuffer, kScratch, kNull, kInteger, kFloat }; // of an argument, as in record.py
enum Node : int32_t { kAppend, kSelect, kAttend, kChunks, kNodes = 2 * kChunks }; // the second three for chunks
enum Flag : int32_t { kOverlap = 1, kCooperative = 2 };

struct Span {
  uint32_t offset, count; // of a section, from the blob's beginning
};
struct Binary {
  uint64_t offset, size; // a cubin
};
struct Kernel {
  uint32_t binary, entry;   // entry: its name among the texts
  int32_t shared, percent;  // dynamic shared memory that launches may request; what a multiprocessor shares of its memory, -1: the driver's choice
  int32_t parameters, nulls; // and null pointers behind those
};
struct Launch {
  uint32_t kernel, grid[3], threads, shared, cluster, flags, first, arguments;
  uint32_t per, unused; // tokens of a block, of the longest chunk, in the first place of its grid; 0: that is fixed
};
struct Argument {
  int32_t source, index; // index: which input or buffer or scratch; of a number its bytes
  int64_t value;         // an offset in bytes, or the number's bits
};
struct Program { // of one node
  uint32_t first, launches;
};
struct Scratch {
  uint64_t size;
  uint32_t fill, filled;
};
struct Step { // the steps of one batch: a program of every node of every kind of layer
  uint32_t programs, scratch, scratches, unused;
};
struct Device { // with a step of every batch from 1 on
  uint32_t arch, multiprocessors, steps, unused;
};
struct Tables {
  char magic[8];
  uint32_t plan, version, policy, sms; // texts
  uint32_t layers, groups, pages, max_batch, half, norms, heads, dim, buffers, kinds, parts;
  Span kind_of_layer, configs, binaries, kernels, launches, arguments, programs, nodes, scratch, steps, devices, texts;

  template <typename T> T const* at(Span span) const { return reinterpret_cast<T const*>(reinterpret_cast<char const*>(this) + span.offset); }
  char const* text(uint32_t offset) const { return at<char>(texts) + offset; }
  bool valid() const { return !std::memcmp(magic, "trtkv-1", 8); }
};

extern Tables const& tables; // of this library

} // namespace trtkv

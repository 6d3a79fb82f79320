// NCCL, opened when an engine of several parts first needs it: the process's own, or the system's library. Types and numbers are those of its ABI.
#pragma once
#include "driver.h"

namespace trtkv {

using Communicator = struct ncclComm*;

struct Nccl {
  int (*ncclAllReduce)(void const* from, void* to, size_t count, int type, int operation, Communicator, CUstream);
  int (*ncclAllGather)(void const* from, void* to, size_t count, int type, Communicator, CUstream);
  int (*ncclGroupStart)();
  int (*ncclGroupEnd)();
  int (*ncclCommCount)(Communicator, int* parts);
  int (*ncclCommCuDevice)(Communicator, int* device);
  char const* (*ncclGetErrorString)(int code);
};
enum { kNcclSum = 0, kNcclHalf = 6, kNcclBfloat16 = 9 };

// NCCL, null where there is none.
Nccl const* nccl();

} // namespace trtkv

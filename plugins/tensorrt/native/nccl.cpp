#include "nccl.h"

#include <dlfcn.h>

namespace trtkv {

namespace {
template <typename T> bool find(T& function, void* library, char const* name) {
  return (function = reinterpret_cast<T>(dlsym(library, name))) != nullptr;
}

// A communicator belongs to the copy of NCCL that made it: the one that a program holds itself, or that by this name, which all that open it share.
bool open(Nccl& found) {
  void* const library = dlsym(RTLD_DEFAULT, "ncclAllReduce") ? RTLD_DEFAULT : dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
#define TRTKV_FIND(name) find(found.name, library, #name)
  return TRTKV_FIND(ncclAllReduce) && TRTKV_FIND(ncclAllGather) && TRTKV_FIND(ncclGroupStart) && TRTKV_FIND(ncclGroupEnd) &&
      TRTKV_FIND(ncclCommCount) && TRTKV_FIND(ncclCommCuDevice) && TRTKV_FIND(ncclGetErrorString);
#undef TRTKV_FIND
}
} // namespace

Nccl const* nccl() {
  static Nccl found{};
  static bool const there = open(found);
  return there ? &found : nullptr;
}

} // namespace trtkv

#include "driver.h"

#include <dlfcn.h>

namespace trtkv {

namespace {
bool open(Driver& found) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) return false;
#define TRTKV_FIND(name, symbol) \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, symbol)); \
  if (!found.name) return false;
  TRTKV_DRIVER(TRTKV_FIND)
#undef TRTKV_FIND
  return true;
}
} // namespace

Driver const* driver() {
  static Driver found{};
  static bool const there = open(found);
  return there ? &found : nullptr;
}

} // namespace trtkv

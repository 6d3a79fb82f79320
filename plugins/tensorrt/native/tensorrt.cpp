#include "tensorrt.h"

#include <NvInferVersion.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

namespace trtkv {

namespace {
constexpr int32_t kError = 1; // ILogger::Severity
void* finder = nullptr;
} // namespace

void* find_symbol(char const* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  for (char const* library : {"libtensorrt_rtx.so.1", "libnvinfer.so.11", "libnvinfer.so.10"}) {
    if (found) break;
    if (void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD)) found = dlsym(loaded, name);
  }
  return found;
}

bool moved() {
  auto const version = reinterpret_cast<int32_t (*)()>(find_symbol("getInferLibVersion")); // 101401 is TensorRT 10.14.1, 10701 TensorRT-RTX 1.7.1
  int32_t const here = version ? version() : NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100;
  return here >= 110000 || (here >= 10500 && here < 100000);
}

void log_with(void* given) { finder = given; }

void report(std::string const& text) {
  auto const global = reinterpret_cast<void* (*)()>(find_symbol("getLogger"));
  int const place = moved() ? 4 : 0;
  void* const logger = finder ? call<void*>(finder, place) : global ? global() : nullptr;
  std::string const line = "trtkv: " + text;
  if (logger) {
    call<void>(logger, place, kError, line.c_str());
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

} // namespace trtkv

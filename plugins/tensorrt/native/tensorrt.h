// TensorRT as it is in the process that opens the library, which is linked to none.
#pragma once
#include <string>

namespace trtkv {

void* find_symbol(char const* name); // of TensorRT, null where the process has none

// TensorRT 11 and TensorRT-RTX 1.5 moved the functions of logger, its finder and registry. The headers at hand may be of one kind and the TensorRT
// that opens the library of the other, so these three are called by the places of their functions.
bool moved();
template <typename Result, typename... Given> Result call(void* object, int place, Given... given) {
  return reinterpret_cast<Result (*)(void*, Given...)>((*static_cast<void***>(object))[place])(object, given...);
}

void log_with(void* finder); // through which TensorRT names the logger of who opened the library
void report(std::string const& text);

} // namespace trtkv

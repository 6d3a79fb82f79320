// The CUDA driver, opened when it is first needed: a library can be loaded, and engines be built, where there is none.
#pragma once
#include <cuda.h>

namespace trtkv {

struct Driver {
#define TRTKV_DRIVER(X) \
  X(cuCtxGetCurrent, "cuCtxGetCurrent") X(cuCtxGetDevice, "cuCtxGetDevice") X(cuDeviceGetAttribute, "cuDeviceGetAttribute") \
  X(cuModuleLoadData, "cuModuleLoadData") X(cuModuleGetFunction, "cuModuleGetFunction") X(cuFuncGetAttribute, "cuFuncGetAttribute") \
  X(cuFuncSetAttribute, "cuFuncSetAttribute") X(cuLaunchKernelEx, "cuLaunchKernelEx") X(cuGetErrorName, "cuGetErrorName") \
  X(cuMemAlloc, "cuMemAlloc_v2") X(cuMemFree, "cuMemFree_v2") X(cuMemsetD8Async, "cuMemsetD8Async") X(cuMemsetD32Async, "cuMemsetD32Async") \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2") X(cuStreamCreate, "cuStreamCreate") X(cuStreamDestroy, "cuStreamDestroy_v2") \
  X(cuStreamSynchronize, "cuStreamSynchronize") X(cuStreamIsCapturing, "cuStreamIsCapturing") \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode")
#define TRTKV_DECLARE(name, symbol) decltype(&::name) name;
  TRTKV_DRIVER(TRTKV_DECLARE)
#undef TRTKV_DECLARE
};

// The driver, null where there is none or it is too old.
Driver const* driver();

} // namespace trtkv

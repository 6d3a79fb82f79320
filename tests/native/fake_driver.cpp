// A CUDA driver whose device memory is the host's and which hands every launch to a callback: to load the library's tables where there is no GPU.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace {
struct Function {
  void const* image;
  std::string name;
  int shared = -1, percent = -1, clusters = 0;
};
using Callback = int (*)(void const* image, char const* name, CUlaunchConfig const* config, void** parameters, int const* settings);
Callback callback = nullptr;
int arch = 90, multiprocessors = 132;
} // namespace

extern "C" {
void fake_device(int new_arch, int count, Callback on_launch) { arch = new_arch, multiprocessors = count, callback = on_launch; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = reinterpret_cast<CUcontext>(static_cast<long>(arch * 1000 + multiprocessors)), CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? arch / 10
      : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR    ? arch % 10
      : which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT        ? multiprocessors
                                                                 : 227 * 1024;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, void const* image) { return *module = reinterpret_cast<CUmodule>(const_cast<void*>(image)), CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, char const* name) {
  return *function = reinterpret_cast<CUfunction>(new Function{module, name}), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 1024, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  auto* const one = reinterpret_cast<Function*>(function);
  (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? one->shared
          : which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT ? one->percent
                                                                        : one->clusters) = value;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(CUlaunchConfig const* config, CUfunction function, void** parameters, void**) {
  auto const* const one = reinterpret_cast<Function*>(function);
  int const settings[] = {one->shared, one->percent, one->clusters};
  return callback && callback(one->image, one->name.c_str(), config, parameters, settings) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, char const** name) { return *name = "CUDA_ERROR_OF_THE_FAKE", CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* pointer, size_t size) { return *pointer = reinterpret_cast<CUdeviceptr>(std::malloc(size)), CUDA_SUCCESS; }
CUresult cuMemFree(CUdeviceptr pointer) { return std::free(reinterpret_cast<void*>(pointer)), CUDA_SUCCESS; }
CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t count, CUstream) {
  return std::memset(reinterpret_cast<void*>(pointer), value, count), CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t count, CUstream) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(pointer)[i] = value;
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream) {
  return std::memcpy(to, reinterpret_cast<void*>(from), size), CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream*, unsigned) { return CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) { return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) { return std::swap(*mode, *mode), CUDA_SUCCESS; }
}

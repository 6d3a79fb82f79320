// Takes plugins of a library through their life as TensorRT does, without TensorRT: made, serialized, made again, cloned, attached, run.
#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <chrono>
#include <string>

using namespace nvinfer1;

namespace {
struct Tensor {
  void* data;
  int32_t type, dims;
  int64_t shape[4];
};
std::string message;
// Of either kind of TensorRT: what is called is at the first and at the fifth place.
struct Logger {
  virtual void log(int32_t, char const* text) noexcept { message = text; }
  virtual void second() {}
  virtual void third() {}
  virtual void fourth() {}
  virtual void log_11(int32_t, char const* text) noexcept { message = text; }
} logger;
struct Finder {
  virtual void* find() { return &logger; }
  virtual void second() {}
  virtual void third() {}
  virtual void fourth() {}
  virtual void* find_11() { return &logger; }
} finder;

PluginTensorDesc describe(Tensor const& tensor) {
  PluginTensorDesc desc{};
  desc.type = static_cast<DataType>(tensor.type), desc.format = TensorFormat::kLINEAR, desc.dims.nbDims = tensor.dims;
  for (int i = 0; i < tensor.dims; ++i) desc.dims.d[i] = tensor.shape[i];
  return desc;
}
IPluginV3OneRuntime* runtime(void* plugin) {
  return static_cast<IPluginV3OneRuntime*>(static_cast<IPluginV3*>(plugin)->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}
struct Given {
  PluginTensorDesc descs[16];
  void const* inputs[16];
  PluginTensorDesc out;
  void* outputs[1];
  Given(int count, Tensor const* tensors) : out(describe(tensors[count])), outputs{tensors[count].data} {
    for (int i = 0; i < count; ++i) descs[i] = describe(tensors[i]), inputs[i] = tensors[i].data;
  }
};
} // namespace

extern "C" {
char const* host_message() { return message.c_str(); }
void* host_open(char const* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    message = dlerror();
    return nullptr;
  }
  reinterpret_cast<void (*)(void*)>(dlsym(library, "setLoggerFinder"))(&finder);
  return dlsym(library, "getCreators");
}
// phase -1: as in an execution context of an engine that was built and loaded; 0: as a builder that measures.
void* host_make(void* get_creators, char const* name, int layer, char const* cfg, int phase) {
  int32_t count = 0;
  auto const creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(get_creators)(count);
  for (int i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::string(creator->getPluginName()) != name) continue;
    PluginField const fields[] = {
        {"layer", &layer, PluginFieldType::kINT32, 1}, {"cfg", cfg, PluginFieldType::kCHAR, static_cast<int32_t>(std::string(cfg).size()) + 1}};
    PluginFieldCollection const given{2, fields};
    IPluginV3* const built = creator->createPlugin("node", &given, TensorRTPhase::kBUILD);
    if (!built || phase == 0) return built;
    IPluginV3* const loaded = creator->createPlugin("node", runtime(built)->getFieldsToSerialize(), TensorRTPhase::kRUNTIME);
    delete built;
    IPluginV3* const engine = loaded->clone();
    delete loaded;
    IPluginV3* const attached = runtime(engine)->attachToContext(nullptr);
    delete engine;
    return attached;
  }
  message = "no creator " + std::string(name);
  return nullptr;
}
void host_delete(void* plugin) { delete static_cast<IPluginV3*>(plugin); }
int host_shapes(void* plugin, int count, Tensor const* tensors) {
  Given const given(count, tensors);
  return runtime(plugin)->onShapeChange(given.descs, count, &given.out, 1);
}
// Nanoseconds of the fastest of some calls, or a negative answer.
int64_t host_run(void* plugin, int count, Tensor const* tensors, void* stream, int times) {
  Given const given(count, tensors);
  int64_t best = INT64_MAX;
  for (int i = 0; i < times; ++i) {
    auto const begun = std::chrono::steady_clock::now();
    auto* const queue = static_cast<cudaStream_t>(stream);
    int const code = runtime(plugin)->enqueue(given.descs, &given.out, given.inputs, given.outputs, nullptr, queue);
    if (code) return code < 0 ? code : -code;
    best = std::min<int64_t>(best, std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun).count());
  }
  return best;
}
}

// The plugin nodes as TensorRT knows them: what plugins/nodes.py says of them, and launches that were recorded from what it runs.
//
// A context's first step with a `state` table reads it; later steps take nothing from the host but the addresses of their tensors.
#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "session.h"

using namespace nvinfer1;

namespace trtkv {
namespace {

constexpr AsciiChar const* kDomain = "trtkv";
constexpr AsciiChar const* kVersion = "1";
// Inputs by their place, which differs by one behind the first of KvAppend; `state` is the one behind the sequences (and rope).
struct Face {
  AsciiChar const* name;
  Node node;
  int sequences, state, least, most; // places of cu_seqlens and of state, and how many inputs there are
};
constexpr Face kFaces[] = {{"KvAppend", kAppend, 2, 8, 9, 11}, {"KvSelect", kSelect, 1, 6, 7, 7}, {"KvAttend", kAttend, 1, 6, 7, 8}};

void* finder = nullptr;

template <typename T> T find_symbol(char const* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  for (char const* library : {"libtensorrt_rtx.so.1", "libnvinfer.so.11", "libnvinfer.so.10"}) {
    if (found) break;
    if (void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD)) found = dlsym(loaded, name);
  }
  return reinterpret_cast<T>(found);
}

// TensorRT 11 and TensorRT-RTX 1.5 moved the functions of logger, its finder and registry. The headers at hand may be of one kind and the TensorRT that
// opens the library of the other, so these three are called by the places of their functions.
bool moved() {
  auto const version = find_symbol<int32_t (*)()>("getInferLibVersion"); // 101401 is TensorRT 10.14.1, 10701 TensorRT-RTX 1.7.1
  int32_t const here = version ? version() : NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100;
  return here >= 110000 || (here >= 10500 && here < 100000);
}
template <typename Result, typename... Given> Result call(void* object, int place, Given... given) {
  return reinterpret_cast<Result (*)(void*, Given...)>((*static_cast<void***>(object))[place])(object, given...);
}

void report(std::string const& text) {
  auto const global = find_symbol<void* (*)()>("getLogger");
  int const place = moved() ? 4 : 0;
  void* const logger = finder ? call<void*>(finder, place) : global ? global() : nullptr;
  std::string const line = "trtkv: " + text;
  if (logger) {
    call<void>(logger, place, ILogger::Severity::kERROR, line.c_str());
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

// What a node carries; `cfg` is JSON of Python's json.dumps, one flat object.
struct Config {
  int32_t layer = -1;
  std::string text;

  std::string value(char const* name) const {
    std::string const key = "\"" + std::string(name) + "\": ";
    auto const found = text.find(key);
    if (found == std::string::npos) return "";
    auto const from = found + key.size();
    return text.substr(from, text.find_first_of(",}", from) - from);
  }
  int number(char const* name) const { return std::atoi(value(name).c_str()); }
};

class Plugin : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  Plugin(Face const& face, Config config, bool runs) : face_(face), config_(std::move(config)), runs_(runs) {
    fields_[0] = PluginField("layer", &config_.layer, PluginFieldType::kINT32, 1);
    fields_[1] = PluginField("cfg", config_.text.data(), PluginFieldType::kCHAR, static_cast<int32_t>(config_.text.size()));
    collection_ = {2, fields_};
  }

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    if (type == PluginCapabilityType::kCORE) return static_cast<IPluginV3OneCore*>(this);
    if (type == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild*>(this);
    return static_cast<IPluginV3OneRuntime*>(this);
  }
  IPluginV3* clone() noexcept override { return new Plugin(face_, config_, runs_); }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  AsciiChar const* getPluginName() const noexcept override { return face_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kDomain; }
  PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &collection_; }
  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t setTactic(int32_t) noexcept override { return 0; }
  size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept override { return 0; }
  int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override { return 0; }

  int32_t getOutputDataTypes(DataType* outputs, int32_t, DataType const* inputs, int32_t count) const noexcept override {
    if (count < face_.least || count > face_.most) return fail("it is given " + std::to_string(count) + " inputs");
    outputs[0] = face_.node == kSelect ? DataType::kINT32 : inputs[0];
    return 0;
  }
  int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t,
      IExprBuilder& builder) noexcept override {
    DimsExprs& out = outputs[0];
    if (face_.node == kSelect) {
      out.nbDims = 3;
      out.d[0] = inputs[face_.sequences + 1].d[0];
      out.d[1] = builder.constant(config_.number("select_heads"));
      out.d[2] = builder.constant(config_.number("select_width") + 1);
    } else {
      out.nbDims = 2;
      out.d[0] = inputs[0].d[0];
      out.d[1] = builder.constant(config_.number("num_q_heads") * config_.number("head_dim"));
    }
    return 0;
  }
  bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t) noexcept override {
    auto const& desc = tensors[position].desc;
    if (desc.format != TensorFormat::kLINEAR) return false;
    if (position >= inputs) return desc.type == (face_.node == kSelect ? DataType::kINT32 : tensors[0].desc.type);
    if (position == 0) return desc.type == (tables.half ? DataType::kHALF : DataType::kBF16);
    if (position == face_.state) return desc.type == DataType::kINT64;
    return desc.type == DataType::kINT32 || desc.type == DataType::kFLOAT || desc.type == tensors[0].desc.type;
  }

  int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
    batch_ = static_cast<int>(inputs[face_.sequences + 1].dims.d[0]);
    entries_ = inputs[face_.state].dims.d[0];
    calls_ = nullptr;
    if (!runs_) return 0; // a builder that measures
    longest_ = static_cast<unsigned>(inputs[0].dims.d[0] - batch_ + 1); // every sequence has a new token
    auto const groups = inputs[face_.sequences + 4].dims.d[0], columns = inputs[face_.sequences + 4].dims.d[2];
    uint32_t const wanted = 1 + tables.buffers * tables.layers;
    if (inputs[0].dims.d[0] < batch_) return fail("every sequence needs a new token");
    if (batch_ > static_cast<int>(tables.max_batch)) return fail("this library takes " + std::to_string(tables.max_batch) + " sequences");
    if (groups != static_cast<int64_t>(tables.groups)) return fail("'page_table' needs " + std::to_string(tables.groups) + " page groups");
    if (columns != static_cast<int64_t>(tables.pages)) return fail("'page_table' needs " + std::to_string(tables.pages) + " columns");
    if (entries_ < static_cast<int64_t>(wanted)) return fail("'state' needs " + std::to_string(wanted) + " entries");
    return 0;
  }

  int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const* out, void const* const* inputs, void* const* outputs, void*,
      cudaStream_t stream) noexcept override {
    auto const queue = reinterpret_cast<CUstream>(stream);
    try {
      if (!runs_) return zero(out[0], outputs[0], queue);
      void const* const state = inputs[face_.state];
      if (state != state_) session_ = nullptr, prepared_.clear(), calls_ = nullptr;
      if (!calls_) prepare(state, queue);
      calls_->run(inputs, outputs, queue, longest_);
      return 0;
    } catch (std::exception const& error) {
      return fail(error.what());
    }
  }

 private:
  void prepare(void const* state, CUstream stream) {
    if (!session_) session_ = Session::find(state, entries_, stream);
    state_ = state;
    int const node = face_.node + (longest_ > 1 ? kChunks : 0);
    auto& ready = prepared_[{batch_, node}];
    if (!ready) ready.reset(new Calls(session_, node, config_.layer, batch_));
    calls_ = ready.get();
  }
  int32_t zero(PluginTensorDesc const& out, void* memory, CUstream stream) const {
    size_t bytes = out.type == DataType::kINT32 || out.type == DataType::kFLOAT ? 4 : 2;
    for (int i = 0; i < out.dims.nbDims; ++i) bytes *= static_cast<size_t>(out.dims.d[i]);
    if (!driver()) throw Error("there is no CUDA driver");
    check(driver()->cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, bytes, stream), "the output cannot be written");
    return 0;
  }
  int32_t fail(std::string const& why) const {
    report(std::string(face_.name) + " of layer " + std::to_string(config_.layer) + ": " + why);
    return -1;
  }

  Face const& face_;
  Config const config_;
  bool const runs_; // in an execution context, and not while an engine is built
  PluginField fields_[2];
  PluginFieldCollection collection_;
  int batch_ = 0;
  unsigned longest_ = 1; // new tokens of a sequence, at most
  int64_t entries_ = 0;
  void const* state_ = nullptr;
  std::shared_ptr<Session> session_;
  std::map<std::pair<int, int>, std::unique_ptr<Calls>> prepared_; // by batch and node
  Calls* calls_ = nullptr;
};

class Creator : public IPluginCreatorV3One {
 public:
  explicit Creator(Face const& face) : face_(face) {}
  AsciiChar const* getPluginName() const noexcept override { return face_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kDomain; }
  PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }

  IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* given, TensorRTPhase phase) noexcept override {
    Config config;
    for (int i = 0; i < given->nbFields; ++i) {
      PluginField const& field = given->fields[i];
      if (!std::strcmp(field.name, "layer") && field.data) config.layer = *static_cast<int32_t const*>(field.data);
      if (!std::strcmp(field.name, "cfg") && field.data) config.text.assign(static_cast<char const*>(field.data), field.length);
    }
    while (!config.text.empty() && config.text.back() == '\0') config.text.pop_back();
    std::string const where = std::string(face_.name) + " '" + name + "'";
    if (config.layer < 0 || config.layer >= static_cast<int>(tables.layers)) {
      report(where + " is of layer " + std::to_string(config.layer) + ", and the plan has " + std::to_string(tables.layers) + " layers");
      return nullptr;
    }
    int const kind = tables.at<int32_t>(tables.kind_of_layer)[config.layer];
    std::string const ours = tables.text(tables.at<uint32_t>(tables.configs)[kind]);
    if (config.text != ours) {
      report(where + " has " + config.text + ", and this library of trtkv " + tables.text(tables.version) + ", policy " + tables.text(tables.policy) +
          ", has " + ours + ". Load the library that trtkv build --native wrote beside the engine.");
      return nullptr;
    }
    return new Plugin(face_, std::move(config), phase == TensorRTPhase::kRUNTIME);
  }

 private:
  Face const& face_;
  PluginField const fields_[2] = {
      {"layer", nullptr, PluginFieldType::kINT32, 1}, {"cfg", nullptr, PluginFieldType::kCHAR, 1}};
  PluginFieldCollection const collection_{2, fields_};
};

Creator creators[] = {Creator(kFaces[0]), Creator(kFaces[1]), Creator(kFaces[2])};
IPluginCreatorInterface* const kCreators[] = {&creators[0], &creators[1], &creators[2]};

// A library that is only opened, as polygraphy and trtexec do, registers itself; who asks for its creators registers them, and only once can they be.
struct Registration {
  void* registry = nullptr;
  int place = 0; // of registerCreator
  std::vector<IPluginCreatorInterface*> registered;
  Registration() {
    auto const find = find_symbol<void* (*)()>("getPluginRegistry");
    registry = find ? find() : nullptr, place = moved() ? 8 : 12;
    for (auto* one : kCreators) {
      if (registry && call<bool>(registry, place, one, kDomain)) registered.push_back(one);
    }
  }
  void release() {
    for (auto* one : registered) call<bool>(registry, place + 3, one);
    registered.clear();
  }
} registration;

} // namespace
} // namespace trtkv

extern "C" {
__attribute__((visibility("default"))) void setLoggerFinder(ILoggerFinder* given) { trtkv::finder = given; }
__attribute__((visibility("default"))) IPluginCreatorInterface* const* getCreators(int32_t& count) {
  trtkv::registration.release();
  count = 3;
  return trtkv::kCreators;
}
}

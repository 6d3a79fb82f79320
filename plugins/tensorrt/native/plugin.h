// What every node is for TensorRT, whatever it runs.
#pragma once
#include <NvInferRuntime.h>

#include "session.h"
#include "tensorrt.h"

namespace trtkv {
using namespace nvinfer1;

constexpr AsciiChar const* kDomain = "trtkv";
constexpr AsciiChar const* kVersion = "1";

// What a node carries; `cfg` is JSON of Python's json.dumps, one flat object.
struct Config {
  int32_t layer = -1;
  std::string text;

  int number(char const* name) const {
    std::string const key = "\"" + std::string(name) + "\": ";
    auto const found = text.find(key);
    return found == std::string::npos ? 0 : std::atoi(text.c_str() + found + key.size());
  }
};

class Plugin;
// Inputs by their place: `sequences` is that of cu_seqlens, behind which the others of a step's sequences lie; -1 where a node does not take them.
struct Face {
  AsciiChar const* name;
  Plugin* (*make)(Face const& face, Config config, bool runs);
  int node, sequences, state, least, most; // node: among the tables' programs; least and most: how many inputs there are
};
Plugin* make_cache_node(Face const& face, Config config, bool runs);
Plugin* make_collective(Face const& face, Config config, bool runs);

class Plugin : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  Plugin(Face const& face, Config config, bool runs);

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override;
  IPluginV3* clone() noexcept override { return face_.make(face_, config_, runs_); }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  AsciiChar const* getPluginName() const noexcept override { return face_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kDomain; }
  PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &collection_; }
  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t setTactic(int32_t) noexcept override { return 0; }
  size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept override { return 0; }
  int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override { return 0; }
  int32_t getOutputDataTypes(DataType* outputs, int32_t, DataType const* inputs, int32_t count) const noexcept override;
  bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t) noexcept override;
  int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t, PluginTensorDesc const*, int32_t) noexcept override;
  int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const* out, void const* const* inputs, void* const* outputs, void*,
      cudaStream_t stream) noexcept override;

 protected:
  virtual bool integer_output() const { return false; }
  virtual void shaped(PluginTensorDesc const* inputs) = 0;  // new shapes; throws Error, as the others
  virtual void opened() = 0;                                // a new session
  virtual void run(void const* const* inputs, void* const* outputs, CUstream stream) = 0;

  Face const& face_;
  Config const config_;
  std::shared_ptr<Session> session_;
  int64_t entries_ = 0; // of the state table

 private:
  int32_t fail(std::string const& why) const;

  bool const runs_; // in an execution context, and not while an engine is built
  void const* state_ = nullptr;
  PluginField fields_[2];
  PluginFieldCollection collection_;
};

} // namespace trtkv

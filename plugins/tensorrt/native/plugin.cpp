#include "plugin.h"

namespace trtkv {

namespace {
void zero(PluginTensorDesc const& out, void* memory, CUstream stream) {
  size_t bytes = out.type == DataType::kINT32 || out.type == DataType::kFLOAT ? 4 : 2;
  for (int i = 0; i < out.dims.nbDims; ++i) bytes *= static_cast<size_t>(out.dims.d[i]);
  if (!driver()) throw Error("there is no CUDA driver");
  check(driver()->cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, bytes, stream), "the output cannot be written");
}
} // namespace

Plugin::Plugin(Face const& face, Config config, bool runs) : face_(face), config_(std::move(config)), runs_(runs) {
  fields_[0] = PluginField("layer", &config_.layer, PluginFieldType::kINT32, 1);
  fields_[1] = PluginField("cfg", config_.text.data(), PluginFieldType::kCHAR, static_cast<int32_t>(config_.text.size()));
  collection_ = {2, fields_};
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  if (type == PluginCapabilityType::kCORE) return static_cast<IPluginV3OneCore*>(this);
  if (type == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild*>(this);
  return static_cast<IPluginV3OneRuntime*>(this);
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t, DataType const* inputs, int32_t count) const noexcept {
  if (count < face_.least || count > face_.most) return fail("it is given " + std::to_string(count) + " inputs");
  outputs[0] = integer_output() ? DataType::kINT32 : inputs[0];
  return 0;
}

bool Plugin::supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t) noexcept {
  auto const& desc = tensors[position].desc;
  if (desc.format != TensorFormat::kLINEAR) return false;
  if (position >= inputs) return desc.type == (integer_output() ? DataType::kINT32 : tensors[0].desc.type);
  if (position == 0) return desc.type == (tables.half ? DataType::kHALF : DataType::kBF16);
  if (position == face_.state) return desc.type == DataType::kINT64;
  return desc.type == DataType::kINT32 || desc.type == DataType::kFLOAT || desc.type == tensors[0].desc.type;
}

int32_t Plugin::onShapeChange(PluginTensorDesc const* inputs, int32_t, PluginTensorDesc const*, int32_t) noexcept {
  entries_ = inputs[face_.state].dims.d[0];
  if (!runs_) return 0; // a builder that measures
  try {
    auto const wanted = 1 + static_cast<int64_t>(tables.buffers) * tables.layers;
    if (entries_ < wanted) throw Error("'state' needs " + std::to_string(wanted) + " entries");
    shaped(inputs);
    return 0;
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t Plugin::enqueue(PluginTensorDesc const*, PluginTensorDesc const* out, void const* const* inputs, void* const* outputs, void*,
    cudaStream_t stream) noexcept {
  auto const queue = reinterpret_cast<CUstream>(stream);
  try {
    if (!runs_) return zero(out[0], outputs[0], queue), 0;
    if (void const* const state = inputs[face_.state]; state != state_ || !session_) {
      state_ = nullptr, session_ = nullptr;
      session_ = Session::find(state, entries_, queue);
      opened();
      state_ = state;
    }
    run(inputs, outputs, queue);
    return 0;
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t Plugin::fail(std::string const& why) const {
  report(std::string(face_.name) + " of layer " + std::to_string(config_.layer) + ": " + why);
  return -1;
}

} // namespace trtkv

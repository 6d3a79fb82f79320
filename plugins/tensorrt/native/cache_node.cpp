// Nodes that reach the cache: launches that were recorded from what Python runs.
#include <map>

#include "plugin.h"

namespace trtkv {

namespace {

class CacheNode : public Plugin {
 public:
  using Plugin::Plugin;

  int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t,
      IExprBuilder& builder) noexcept override {
    DimsExprs& out = outputs[0];
    if (integer_output()) {
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

 private:
  bool integer_output() const override { return face_.node == kSelect; }

  void shaped(PluginTensorDesc const* inputs) override {
    calls_ = nullptr;
    batch_ = static_cast<int>(inputs[face_.sequences + 1].dims.d[0]);
    longest_ = static_cast<unsigned>(inputs[0].dims.d[0] - batch_ + 1); // every sequence has a new token
    auto const groups = inputs[face_.sequences + 4].dims.d[0], columns = inputs[face_.sequences + 4].dims.d[2];
    if (inputs[0].dims.d[0] < batch_) throw Error("every sequence needs a new token");
    if (batch_ > static_cast<int>(tables.max_batch)) throw Error("this library takes " + std::to_string(tables.max_batch) + " sequences");
    if (groups != static_cast<int64_t>(tables.groups)) throw Error("'page_table' needs " + std::to_string(tables.groups) + " page groups");
    if (columns != static_cast<int64_t>(tables.pages)) throw Error("'page_table' needs " + std::to_string(tables.pages) + " columns");
  }

  void opened() override { prepared_.clear(), calls_ = nullptr; }

  void run(void const* const* inputs, void* const* outputs, CUstream stream) override {
    if (!calls_) {
      int const node = face_.node + (longest_ > 1 ? kChunks : 0);
      auto& ready = prepared_[{batch_, node}];
      if (!ready) ready.reset(new Calls(session_, node, config_.layer, batch_));
      calls_ = ready.get();
    }
    calls_->run(inputs, outputs, stream, longest_);
  }

  int batch_ = 0;
  unsigned longest_ = 1; // new tokens of a sequence, at most
  std::map<std::pair<int, int>, std::unique_ptr<Calls>> prepared_; // by batch and node
  Calls* calls_ = nullptr;
};

} // namespace

Plugin* make_cache_node(Face const& face, Config config, bool runs) { return new CacheNode(face, std::move(config), runs); }

} // namespace trtkv

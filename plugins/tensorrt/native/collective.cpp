// Nodes that put the parts of an engine together, by NCCL: AllReduce adds x [T, E] up, AllGather writes the columns x [R, V / G] side by side.
//
// The last entry of the `state` table is the communicator (ncclComm_t, blocking) of the part whose table it is; its ranks are the parts in order.
#include "nccl.h"
#include "plugin.h"

namespace trtkv {

namespace {

class Collective : public Plugin {
 public:
  using Plugin::Plugin;

  int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t,
      IExprBuilder& builder) noexcept override {
    outputs[0] = inputs[0];
    if (gathers()) outputs[0].d[1] = builder.operation(DimensionOperation::kPROD, *inputs[0].d[1], *inputs[1].d[0]);
    return 0;
  }

 private:
  bool gathers() const { return face_.node == 1; }

  void shaped(PluginTensorDesc const* inputs) override {
    rows_ = static_cast<size_t>(inputs[0].dims.d[0]), width_ = static_cast<size_t>(inputs[0].dims.d[1]);
    auto const parts = gathers() ? inputs[1].dims.d[0] : tables.parts;
    if (parts != static_cast<int64_t>(tables.parts)) {
      throw Error("it is of " + std::to_string(parts) + " parts, and this library of " + std::to_string(tables.parts));
    }
    if (entries_ < 2 + static_cast<int64_t>(tables.buffers) * tables.layers) throw Error("'state' needs a last entry for a communicator");
  }

  void opened() override {
    if (!nccl()) throw Error("there is no libnccl.so.2 here that this library can use. Install NCCL, such as by pip install nvidia-nccl-cu13");
    with_ = reinterpret_cast<Communicator>(session_->last());
    std::string const wanted = std::to_string(tables.parts) + " parts";
    if (!with_) throw Error("the last entry of 'state' is 0. Write there the ncclComm_t of this part among " + wanted);
    int parts = 0, device = 0;
    CUdevice here{};
    good(nccl()->ncclCommCount(with_, &parts)), good(nccl()->ncclCommCuDevice(with_, &device));
    check(driver()->cuCtxGetDevice(&here), "there is no CUDA context");
    std::string const its = "the communicator in 'state' ", gpu = std::to_string(device);
    if (parts != static_cast<int>(tables.parts)) throw Error(its + "has " + std::to_string(parts) + " ranks, and the engine " + wanted);
    if (device != here) throw Error(its + "is of GPU " + gpu + ", and the step runs on GPU " + std::to_string(here));
  }

  void run(void const* const* inputs, void* const* outputs, CUstream stream) override {
    int const type = tables.half ? kNcclHalf : kNcclBfloat16;
    if (!gathers()) return good(nccl()->ncclAllReduce(inputs[0], outputs[0], rows_ * width_, type, kNcclSum, with_, stream));
    // Row by row each lies where it belongs, and as a group they are one launch.
    auto const* from = static_cast<char const*>(inputs[0]);
    auto* to = static_cast<char*>(outputs[0]);
    size_t const bytes = 2 * width_;
    good(nccl()->ncclGroupStart());
    int failed = 0;
    for (size_t row = 0; row < rows_ && !failed; ++row) {
      failed = nccl()->ncclAllGather(from + row * bytes, to + row * tables.parts * bytes, width_, type, with_, stream);
    }
    int const ended = nccl()->ncclGroupEnd();
    good(failed ? failed : ended);
  }

  static void good(int code) {
    if (code) throw Error(std::string("NCCL failed (") + nccl()->ncclGetErrorString(code) + ")");
  }

  size_t rows_ = 0, width_ = 0;
  Communicator with_ = nullptr;
};

} // namespace

Plugin* make_collective(Face const& face, Config config, bool runs) { return new Collective(face, std::move(config), runs); }

} // namespace trtkv

#include "session.h"

#include <algorithm>
#include <cstdlib>

namespace trtkv {

namespace {

// Calls that a stream capture forbids are allowed to this thread: they touch no captured stream.
struct Relaxed {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  Relaxed() { driver()->cuThreadExchangeStreamCaptureMode(&mode); }
  ~Relaxed() { driver()->cuThreadExchangeStreamCaptureMode(&mode); }
};
// A stream of its own, on which whatever is queued has ended when `wait` returns.
struct Beside {
  CUstream stream{};
  Beside() { check(driver()->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "no stream can be made"); }
  ~Beside() { driver()->cuStreamDestroy(stream); }
  void wait() { check(driver()->cuStreamSynchronize(stream), "the device failed"); }
};

int attribute(CUdevice_attribute which, CUdevice device) {
  int value = 0;
  check(driver()->cuDeviceGetAttribute(&value, which, device), "the device cannot be asked");
  return value;
}

// The table of a GPU: of its compute capability, or of a lower one of its generation; of its number of multiprocessors, or of the next lower one.
Device const* find_table(int arch, int multiprocessors) {
  Device const* devices = tables.at<Device>(tables.devices);
  auto worse = [&](Device const& a, Device const& b) {
    return a.arch != b.arch ? a.arch < b.arch : a.multiprocessors < b.multiprocessors;
  };
  Device const* best = nullptr;
  for (Device const* one = devices; one != devices + tables.devices.count; ++one) {
    bool const fits = one->arch / 10 == static_cast<uint32_t>(arch) / 10 && one->arch <= static_cast<uint32_t>(arch);
    if (fits && one->multiprocessors <= static_cast<uint32_t>(multiprocessors) && (!best || worse(*best, *one))) best = one;
  }
  return best;
}

} // namespace

void check(CUresult code, char const* what) {
  if (code == CUDA_SUCCESS) return;
  char const* name = "an unknown error";
  driver()->cuGetErrorName(code, &name);
  throw Error(std::string(what) + " (" + name + ")");
}

Kernels::Kernels(CUdevice device) : device_(device) {
  major_ = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  int const arch = 10 * major_ + attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  int const count = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  most_shared_ = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
  table_ = find_table(arch, count);
  if (!table_) {
    std::string const sm = std::to_string(arch);
    throw Error("this library has kernels for sm " + std::string(tables.text(tables.sms)) + " and the GPU is sm " + sm + " with " +
        std::to_string(count) + " multiprocessors. Build the engine with trtkv build --native --sm " + sm + ".");
  }
}

std::shared_ptr<Kernels> Kernels::of_current_device() {
  static std::mutex lock;
  static std::map<CUcontext, std::shared_ptr<Kernels>> known; // modules belong to a context
  std::lock_guard<std::mutex> const guard(lock);
  CUcontext context{};
  CUdevice device{};
  check(driver()->cuCtxGetCurrent(&context), "there is no CUDA context");
  check(driver()->cuCtxGetDevice(&device), "there is no CUDA context");
  auto& found = known[context];
  if (!found) found.reset(new Kernels(device));
  return found;
}

CUfunction Kernels::function(uint32_t index) {
  std::lock_guard<std::mutex> const guard(lock_);
  auto const found = functions_.find(index);
  if (found != functions_.end()) return found->second;
  Relaxed const relaxed;
  Kernel const& kernel = tables.at<Kernel>(tables.kernels)[index];
  CUmodule& module = modules_[kernel.binary];
  if (!module) {
    Binary const& binary = tables.at<Binary>(tables.binaries)[kernel.binary];
    void const* cubin = reinterpret_cast<char const*>(&tables) + binary.offset;
    check(driver()->cuModuleLoadData(&module, cubin), "the driver does not take a kernel of this library: check it with trtkv doctor");
  }
  CUfunction function{};
  check(driver()->cuModuleGetFunction(&function, module, tables.text(kernel.entry)), "a kernel is missing");
  int fixed = 0;
  check(driver()->cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), "a kernel cannot be asked");
  auto set = [&](CUfunction_attribute which, int value) { return driver()->cuFuncSetAttribute(function, which, value); };
  check(set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, std::min(kernel.shared, most_shared_ - fixed)), "a kernel has no shared memory");
  if (kernel.percent >= 0) check(set(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, kernel.percent), "a kernel cannot be set");
  if (major_ >= 9) set(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1); // refused where sixteen blocks are too many for any kernel
  return functions_[index] = function;
}

std::shared_ptr<Session> Session::find(void const* state, int64_t entries, CUstream stream) {
  static std::mutex lock;
  static std::map<std::pair<CUcontext, void const*>, std::weak_ptr<Session>> known;
  if (!driver()) throw Error("there is no CUDA driver here that this library can use: check it with trtkv doctor");
  CUcontext context{};
  check(driver()->cuCtxGetCurrent(&context), "there is no CUDA context");
  std::lock_guard<std::mutex> const guard(lock);
  auto& slot = known[{context, state}];
  auto found = slot.lock();
  if (!found) {
    found.reset(new Session(state, entries, stream));
    slot = found;
  }
  return found;
}

Session::Session(void const* state, int64_t entries, CUstream stream) : kernels(Kernels::of_current_device()), entries_(entries) {
  CUstreamCaptureStatus capturing{};
  check(driver()->cuStreamIsCapturing(stream, &capturing), "the stream cannot be asked");
  if (capturing == CU_STREAM_CAPTURE_STATUS_NONE) check(driver()->cuStreamSynchronize(stream), "the device failed");
  Relaxed const relaxed;
  Beside beside;
  auto const from = reinterpret_cast<CUdeviceptr>(state);
  check(driver()->cuMemcpyDtoHAsync(entries_.data(), from, entries * sizeof(int64_t), beside.stream), "the input 'state' cannot be read");
  beside.wait();
  if (entries_[0] != std::strtoll(tables.text(tables.plan), nullptr, 16)) {
    throw Error("the input 'state' is of a cache of another plan, and this library of " + std::string(tables.text(tables.plan)) +
        ". Begin it with the number that layout.txt beside the library begins with.");
  }
}

Session::~Session() {
  for (auto const& one : scratch_) driver()->cuMemFree(one.second);
}

CUdeviceptr Session::scratch(int batch, int index) {
  std::lock_guard<std::mutex> const guard(lock_);
  auto const found = scratch_.find({batch, index});
  if (found != scratch_.end()) return found->second;
  Scratch const& wanted = tables.at<Scratch>(tables.scratch)[step(batch).scratch + index];
  Relaxed const relaxed;
  CUdeviceptr made = 0;
  check(driver()->cuMemAlloc(&made, wanted.size), "the GPU has no memory left for the scratch of the library's kernels");
  scratch_[{batch, index}] = made;
  if (wanted.filled) {
    Beside beside;
    check(driver()->cuMemsetD32Async(made, wanted.fill, wanted.size / 4, beside.stream), "scratch cannot be filled");
    beside.wait();
  }
  return made;
}

Calls::Calls(std::shared_ptr<Session> session, int node, int layer, int batch) : session_(std::move(session)) {
  int const kind = tables.at<int32_t>(tables.kind_of_layer)[layer];
  uint32_t const number = tables.at<uint32_t>(tables.nodes)[session_->step(batch).programs + kind * kNodes + node];
  Program const& program = tables.at<Program>(tables.programs)[number];
  for (uint32_t i = program.first; i < program.first + program.launches; ++i) {
    Launch const& launch = tables.at<Launch>(tables.launches)[i];
    Kernel const& kernel = tables.at<Kernel>(tables.kernels)[launch.kernel];
    calls_.emplace_back(new Call{});
    Call& call = *calls_.back();
    call.per = launch.per;
    call.function = session_->kernels->function(launch.kernel);
    call.values.assign(kernel.parameters + kernel.nulls, 0);
    for (auto& value : call.values) call.parameters.push_back(&value);
    for (uint32_t j = 0; j < launch.arguments; ++j) {
      Argument const& argument = tables.at<Argument>(tables.arguments)[launch.first + j];
      auto const offset = static_cast<uint64_t>(argument.value);
      switch (argument.source) {
        case kInput:
        case kOutput: call.given.emplace_back(j, &argument); break;
        case kBuffer: call.values[j] = session_->buffer(argument.index, layer) + offset; break;
        case kScratch: call.values[j] = session_->scratch(batch, argument.index) + offset; break;
        case kNull: break;
        default: call.values[j] = offset; // a number's bits
      }
    }
    unsigned count = 0;
    if (launch.flags & kOverlap && session_->kernels->major() >= 9) {
      call.attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      call.attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (launch.flags & kCooperative) {
      call.attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      call.attributes[count++].value.cooperative = 1;
    }
    if (launch.cluster > 1) {
      call.attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      call.attributes[count].value.clusterDim.x = launch.cluster;
      call.attributes[count].value.clusterDim.y = call.attributes[count].value.clusterDim.z = 1;
      ++count;
    }
    call.config = {launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1, launch.shared, nullptr, call.attributes, count};
  }
}

void Calls::run(void const* const* inputs, void* const* outputs, CUstream stream, unsigned longest) {
  for (auto const& one : calls_) {
    Call& call = *one;
    for (auto const& given : call.given) {
      void const* base = given.second->source == kInput ? inputs[given.second->index] : outputs[0];
      call.values[given.first] = reinterpret_cast<uint64_t>(base) + static_cast<uint64_t>(given.second->value);
    }
    if (call.per) call.config.gridDimX = (longest + call.per - 2) / call.per + 1;
    call.config.hStream = stream;
    check(driver()->cuLaunchKernelEx(&call.config, call.function, call.parameters.data(), nullptr), "a kernel cannot be launched");
  }
}

} // namespace trtkv

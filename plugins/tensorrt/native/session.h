// What nodes share on a device: loaded kernels, the addresses of one cache, and the scratch of its steps.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "tables.h"

namespace trtkv {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void check(CUresult code, char const* what); // throws Error

// The kernels of this library on one device of the process, loaded at its first step.
class Kernels {
 public:
  static std::shared_ptr<Kernels> of_current_device();
  CUfunction function(uint32_t kernel);
  Device const& table() const { return *table_; }
  int major() const { return major_; }

 private:
  explicit Kernels(CUdevice device);
  std::mutex lock_;
  std::map<uint32_t, CUfunction> functions_;
  std::map<uint32_t, CUmodule> modules_;
  Device const* table_ = nullptr;
  CUdevice device_;
  int major_ = 0, most_shared_ = 0;
};

// A cache, known by the address of its state table, which is read once: nodes of all execution contexts that are given it share its scratch.
class Session {
 public:
  static std::shared_ptr<Session> find(void const* state, int64_t entries, CUstream stream);
  ~Session();
  CUdeviceptr buffer(int index, int layer) const { return entries_[1 + index * tables.layers + layer]; }
  int64_t last() const { return entries_.back(); }
  CUdeviceptr scratch(int batch, int index);
  Step const& step(int batch) const { return tables.at<Step>(tables.steps)[kernels->table().steps + batch - 1]; }
  std::shared_ptr<Kernels> const kernels;

 private:
  Session(void const* state, int64_t entries, CUstream stream);
  std::mutex lock_;
  std::vector<int64_t> entries_;
  std::map<std::pair<int, int>, CUdeviceptr> scratch_;
};

// A node's launches of one batch, of single tokens or of chunks, ready but for the addresses of its inputs and its output.
class Calls {
 public:
  Calls(std::shared_ptr<Session> session, int node, int layer, int batch);
  void run(void const* const* inputs, void* const* outputs, CUstream stream, unsigned longest); // throws Error

 private:
  struct Call {
    CUlaunchConfig config;
    CUlaunchAttribute attributes[3];
    CUfunction function;
    unsigned per;
    std::vector<uint64_t> values;
    std::vector<void*> parameters;
    std::vector<std::pair<int, Argument const*>> given; // parameters that are inputs or the output
  };
  std::shared_ptr<Session> session_;
  std::vector<std::unique_ptr<Call>> calls_;
};

} // namespace trtkv

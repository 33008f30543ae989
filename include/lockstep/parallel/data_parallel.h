// One process, several devices: PyTorch's DataParallel.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/parallel/device_thread.h"
#include "lockstep/parallel/devices.h"

namespace lockstep::parallel {

/// Numbers of devices, or all that there are: `{0, 2}`, `kAllDevices`.
class DeviceIds {
 public:
  DeviceIds() = default;  // all
  DeviceIds(std::initializer_list<int> ids) : ids_(ids) {}
  DeviceIds(std::vector<int> ids) : ids_(std::move(ids)) {}  // NOLINT(google-explicit-constructor): as lists are
  const std::optional<std::vector<int>>& given() const { return ids_; }

 private:
  std::optional<std::vector<int>> ids_;
};
inline const DeviceIds kAllDevices;

struct Chunk;

/// The use of a device since the DataParallel was made.
struct DeviceUse {
  int id = 0;
  std::chrono::nanoseconds cpu_time{};        // of the thread that computes on it; output_device's is the caller's
  std::uint64_t bytes_in = 0, bytes_out = 0;  // from and to the other devices
};

/// Note [Data parallel]
/// A module whose forward cuts its inputs along axis `dim` (chunks_of), gives each piece to a device, brings that
/// device's copy of the module up to date, runs all copies at once, each on a thread of its device, and puts their
/// results together on output_device, where the caller computes the loss. Backward goes the same way back, and leaves
/// in the parameters of the module that was given the sum of all copies' gradients. So the first device holds the
/// optimised parameters and, after forward(), all results and the loss, and exchanges data with all the others. Several
/// processes (DistributedDataParallel) avoid that.
///
/// forward_loss() has each device compute the loss of its own results, which stay there, as do their gradients: two
/// numbers of each travel, the sum and the count of correct predictions, and the first device needs hardly more memory
/// than the others. Gradients are those of the loss outside, the sum is rounded in another order.
///
/// The module itself is the copy of device_ids[0]. The others are built by its factory (Module::factory) where a batch
/// first reaches their device, and kept: a parameter is sent again when its version has changed, buffers are sent in
/// each forward, and what the copies do to theirs is forgotten, as in PyTorch. The sum is taken in the order of
/// device_ids: the same bits in each run.
///
/// A tape's backward may be walked once, so each forward has tapes of its own on the devices, which the outer tape
/// gives back when it forgets the pass: several passes may be on one outer tape, of any size.
///
/// One thread uses it, with tapes on output_backend(); it must outlive what they have recorded (else their backward is
/// a UsageError). `devices` must outlive it and those tapes' next reset, and is not moved meanwhile.
///
/// What a copy throws comes out of forward or backward when all devices have ended: that of the first of device_ids,
/// whose text names the replica if it is a lockstep::Error. The next forward may then begin; gradients of a backward
/// that failed are not whole.
class DataParallel final : public nn::Module {
 public:
  /// The module's parameters and buffers are on device_ids[0]. Absent are: device_ids (all), output_device
  /// (device_ids[0]). Its factory is called by forward, on the caller's thread. Throws UsageError where there is no
  /// module, a number is given twice or is no device's, the module is elsewhere, or it has no factory and there are
  /// several devices.
  DataParallel(std::unique_ptr<nn::Module> module, Devices& devices, const DeviceIds& device_ids = {},
               std::optional<int> output_device = std::nullopt, int dim = 0);
  /// Around a module that somebody else owns and keeps alive until this has ended.
  DataParallel(nn::Module& module, Devices& devices, const DeviceIds& device_ids = {},
               std::optional<int> output_device = std::nullopt, int dim = 0);
  ~DataParallel() override;

  /// Inputs are on output_backend(), as is what it returns. Those that need a gradient get one. Throws UsageError where
  /// inputs have other extents along `dim` than the first.
  nn::Var forward(nn::Tape& tape, nn::Var x) override;
  nn::Vars forward_all(nn::Tape& tape, const nn::Vars& inputs) override;
  /// The loss of each piece on its device: `targets`, on output_backend(), are cut as the inputs are. `loss` is called
  /// on several threads at once, before this returns.
  nn::Loss forward_loss(nn::Tape& tape, const nn::Vars& inputs, const nn::Tensor& targets, const nn::LossFunction& loss,
                        float scale) override;
  /// Of one input, which may be on any device: `where`.
  nn::Vars forward(nn::Tape& tape, const nn::Tensor& x, nn::Backend& where);

  nn::Module& module() { return module_; }
  const std::vector<int>& device_ids() const { return device_ids_; }
  int output_device() const { return output_device_; }
  nn::Backend& output_backend() { return output_; }
  std::string type_name() const override { return "DataParallel"; }

  /// Of device_ids in their order, and after them output_device where it is none of them.
  std::vector<DeviceUse> use();

 private:
  struct Copy;
  struct Pass;
  class Lease;
  class Replicas;
  class Gather;
  class AddUp;

  DataParallel(std::unique_ptr<nn::Module> owned, nn::Module* module, Devices& devices, const DeviceIds& device_ids,
               std::optional<int> output_device, int dim);
  void check_place() const;
  /// What one pass is about.
  struct Call {
    nn::Tape& tape;
    std::span<const nn::Tensor> inputs;
    nn::Backend& where;              // they and the targets are
    const nn::Vars* vars = nullptr;  // those inputs, where they are values of the tape
    const nn::Tensor* targets = nullptr;
  };
  std::vector<nn::Tensor> values_of(const nn::Tape& tape, const nn::Vars& inputs) const;
  std::int64_t extent_of(const Call& call) const;
  nn::Vars run(const Call& call);
  std::optional<Lease> begin(const Call& call);
  void run_replicas(const Call& call, Pass& pass, FunctionRef<void(std::size_t, const nn::Tensor&)> forward);
  nn::Vars put_together(nn::Tape& tape, Lease pass);
  void share_dropout(const nn::Tape& tape, Pass& pass);
  void prepare(std::size_t count);
  void build(Copy& copy) const;
  void list_state(Copy& copy, nn::Module& built) const;
  void compare(const Copy& copy) const;
  void take_parameters(Copy& copy);
  void check_outputs(const Pass& pass) const;
  nn::Tensor gather(Pass& pass, std::size_t output);
  nn::Tensor add_totals(const Pass& pass);
  void add_up_later(nn::Tape& tape, Pass& pass);
  void run_backward(nn::Tape& tape, Pass& pass);
  void scatter_gradients(Pass& pass);
  void gather_gradient(nn::Tape& tape, const Pass& pass, std::size_t input);
  void add_up(std::size_t parameter, std::size_t copies);
  void clear_grads();
  void on_devices(std::size_t count, FunctionRef<void(std::size_t)> work);
  DeviceUse& use_of(const nn::Backend& backend);
  void moved(std::uint64_t bytes, const nn::Backend& from, const nn::Backend& to);

  std::unique_ptr<nn::Module> owned_;
  nn::Module& module_;
  Devices& devices_;
  std::vector<int> device_ids_;
  int output_device_;
  int dim_;
  nn::Backend& output_;
  std::vector<nn::NamedParameter> parameters_;
  std::vector<nn::NamedBuffer> buffers_;
  bool fused_ = false;
  nn::Tensor mark_;                            // (1), value and gradient of marks, which say what comes before what
  std::vector<std::unique_ptr<Copy>> copies_;  // by place in device_ids
  std::vector<std::unique_ptr<Pass>> idle_;
  std::size_t passes_ = 0;  // that exist
  DeviceUse output_use_;    // where it is none of device_ids
  DeviceUse elsewhere_;     // of devices that are none of these, together
  std::chrono::nanoseconds caller_began_;
};

}  // namespace lockstep::parallel

// The devices of this process, by their numbers.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/device.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::parallel {

/// Devices 0 to count() - 1, each a backend of its own with memory of its own, which is made when it is first asked
/// for. CPU devices share the machine's cores and memory and know nothing of each other: with them, all that runs on
/// several GPUs runs without any. One thread uses it; it must outlive whatever is made on its devices. Backends stay
/// where they are when it is moved; one that was moved from has no devices.
class Devices {
 public:
  /// Called once for each device, by operator[], which passes on what it throws. It returns no nullptr.
  using Maker = std::function<std::unique_ptr<nn::Backend>(int id)>;
  /// Throws UsageError for a count below 1.
  Devices(DeviceKind kind, int count, Maker make);
  /// With `threads` compute threads each.
  static Devices cpu(int count, int threads = 1);
  /// The GPUs that this process sees; `options` of each, but for its number. Throws DeviceError where there are none.
  static Devices cuda(const nn::CudaOptions& options = {});

  int count() const { return static_cast<int>(places_.size()); }
  /// Throws UsageError where there is no such device, and whatever keeps it from being opened.
  nn::Backend& operator[](int id);
  /// From now on device `id`, which nobody has asked for before, is this one, which must outlive the use of it here.
  void adopt(int id, nn::Backend& backend);

  /// "cpu:1"
  std::string name_of(int id) const;
  /// Of a backend that may be none of these: then what it is itself.
  std::string name_of(const nn::Backend& backend) const;
  /// What there is: "are 3 devices, cpu:0 to cpu:2", "is one device, cpu:0".
  std::string describe() const;

 private:
  struct Place {
    std::unique_ptr<nn::Backend> made;
    nn::Backend* backend = nullptr;
  };
  void check(int id) const;

  DeviceKind kind_;
  Maker make_;
  std::vector<Place> places_;
};

}  // namespace lockstep::parallel

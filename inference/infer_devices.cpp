#include "inference/infer_devices.h"

#include <fmt/format.h>

#include "base/text.h"
#include "session/device_request.h"
#include "session/opening.h"

namespace lockstep::inference {

InferDevices::InferDevices(const InferConfig& config, session::Session& session) {
  const bool is_cpu = session.device.kind == DeviceKind::kCpu;
  const bool numbered = !is_cpu || !session::parse_device(config.device).indices.empty();
  for (const int id : session.devices) {
    nn::Backend* backend = session.backend.get();
    if (!backends_.empty()) {
      constexpr int kThreads = 1;  // streams have their own
      own_.push_back(is_cpu ? nn::make_cpu_backend(kThreads)
                            : nn::make_cuda_backend(session::cuda_options(session_options(config), id)));
      backend = own_.back().get();
    }
    backends_.push_back(backend);
    names_.push_back(numbered ? fmt::format("{}:{}", is_cpu ? "cpu" : "cuda", id) : "cpu");
  }
}

std::string InferDevices::describe() const {
  std::vector<std::string> rest(names_.begin() + 1, names_.end());
  for (std::string& name : rest) name.erase(0, name.find(':') + 1);
  rest.insert(rest.begin(), names_.front());
  return join(rest, ",");
}

session::SessionOptions session_options(const InferConfig& config) {
  session::SessionOptions options;
  static_cast<session::DeviceOptions&>(options) = config;
  options.all_devices = !session::parse_device(config.device).indices.empty();
  options.precision = activations_of(config.precision);
  options.threads = 1;  // streams have their own
  return options;
}

}  // namespace lockstep::inference

#include "trainer/module_manifest.h"

#include <fmt/format.h>

namespace lockstep::trainer {
namespace {

std::string described(const std::string& name, const nn::Tensor& tensor) {
  return fmt::format("{} {} {}", name, name_of(tensor.dtype()), nn::to_string(tensor.shape()));
}

}  // namespace

comm::Manifest manifest_of(const nn::Module& module) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  comm::Manifest manifest = {
      {"number of parameters", fmt::to_string(parameters.size())},
      {"number of buffers", fmt::to_string(buffers.size())},
  };
  for (std::size_t i = 0; i < parameters.size(); ++i)
    manifest.emplace_back(fmt::format("parameter {}", i),
                          fmt::format("{}{}", described(parameters[i].name, parameters[i].parameter->value()),
                                      parameters[i].parameter->requires_grad() ? "" : ", not trained"));
  for (std::size_t i = 0; i < buffers.size(); ++i)
    manifest.emplace_back(fmt::format("state {}", i), described(buffers[i].name, *buffers[i].tensor));
  return manifest;
}

}  // namespace lockstep::trainer

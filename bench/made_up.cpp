#include "bench/made_up.h"

#include <fmt/format.h>

namespace lockstep::bench {

std::string made_up_data(const std::string& model, std::int64_t samples) {
  const char* const shape = model == "linear"                             ? "5"
                            : model.starts_with("gpt") || model == "lstm" ? "tokens"
                            : model == "resnet18-cifar"                   ? "3x32x32"
                            : model == "resnet18" || model == "resnet50"  ? "3x224x224"
                                                                          : "1x28x28";
  return fmt::format("random:{},{}", shape, samples);
}

}  // namespace lockstep::bench

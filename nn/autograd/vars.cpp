#include "lockstep/nn/autograd/vars.h"

#include "base/error.h"

namespace lockstep::nn {

void Vars::refuse_number(std::size_t i) const {
  throw UsageError(fmt::format("value {} of {}", i, size()), "count from 0, and give or return as many as are used");
}

void Vars::refuse_count(std::size_t wanted) const {
  throw UsageError(fmt::format("{} value{} where {} {} expected", size(), size() == 1 ? "" : "s", wanted,
                               wanted == 1 ? "is" : "are"),
                   "take as many as there are: as<2>(), [0], or a loss that takes nn::Vars");
}

}  // namespace lockstep::nn

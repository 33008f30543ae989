#include <fmt/format.h>

#include "nn/ops/cuda/cudnn.h"

namespace lockstep::nn::cuda {
namespace {

using What = ConvProblem::What;

const char* name_of(What what) {
  switch (what) {
    case What::kForward: return "the result";
    case What::kBackwardInput: return "the input's gradient";
    case What::kBackwardWeight: return "the weight's gradient";
  }
  return "?";
}

}  // namespace

PlanKey ConvProblem::key() const {
  PlanKey key{};
  std::size_t at = 0;
  for (const Shape* const shape : {&x, &w, &y})
    for (int i = 0; i < 4; ++i) key[at++] = (*shape)[i];
  for (const auto d : window.stride) key[at++] = d;
  for (const auto d : window.padding) key[at++] = d;
  for (const bool b : {bias, relu, tf32}) key[at++] = b ? 1 : 0;
  key[at++] = static_cast<std::int64_t>(what);
  key[at++] = static_cast<std::int64_t>(dtype);
  return key;
}

std::string ConvProblem::describe() const {
  const std::int64_t groups = groups_of(x, w);
  return fmt::format("{} of a {}x{} convolution (stride {}x{}, padding {}x{}{}) of {} to {}, {}", cuda::name_of(what),
                     window.kernel[0], window.kernel[1], window.stride[0], window.stride[1], window.padding[0],
                     window.padding[1], groups == 1 ? "" : fmt::format(", {} groups", groups), to_string(x),
                     to_string(y), lockstep::name_of(dtype));
}

PlanKey AttentionProblem::key() const {
  return {static_cast<std::int64_t>(what),
          samples,
          tokens,
          heads,
          width,
          pitch,
          causal ? 1 : 0,
          padded ? 1 : 0,
          deterministic ? 1 : 0,
          static_cast<std::int64_t>(dtype)};
}

std::string AttentionProblem::describe() const {
  return fmt::format("{}{}attention with {} heads of {} over [{}, {}]{}, {}",
                     what == What::kBackward ? "the gradient of " : "", causal ? "causal " : "", heads, width, samples,
                     tokens, padded ? " with padding" : "", lockstep::name_of(dtype));
}

}  // namespace lockstep::nn::cuda

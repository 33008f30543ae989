// Files whose tensors have other names than the model's: what may be concluded from names and shapes, without a guess.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/nn/io/safetensors.h"

namespace lockstep::nn {

/// The names without their first part, where that is the same in all of them ("model." of "model.fc.weight", as
/// Lightning has it), without their first two, and so on, as far as wrappers go.
std::vector<std::vector<std::string>> without_common_parts(const std::vector<std::string>& names);

struct ShapeMatch {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;  // places in `wanted` and in `given`; empty: see why_not
  std::string why_not;                                     // for an error; empty also where shapes differ
};

/// Which of `given` is which of `wanted`, by shapes (in file layout) and types alone, where there is one way and no
/// other: as many of each, and for each exactly one of its shape. A tensor whose axes may be exchanged without a change
/// of its shape (a square matrix) is no match unless its name ends as the other's does (".weight"), because other
/// programs transpose; nor is one whose name ends as another kind of parameter ("bias" for "weight").
ShapeMatch match_by_shape(const std::vector<TensorHeader>& wanted, const std::vector<TensorHeader>& given);

/// Whether numbers of type `from` are loaded into `to`: floating-point ones of any width into f32, others as they are.
bool converts(DType from, DType to);

}  // namespace lockstep::nn

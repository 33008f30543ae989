// The likeliest of several classes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::inference {

struct Ranked {
  std::int32_t number;  // of a class or a token
  double probability;   // softmax over all
};

/// The `top` likeliest first, of equally likely ones that of the smaller number; fewer where there are fewer. Keeps its
/// memory: valid until the next call. Throws DivergedError for a logit that is NaN or infinite.
class Ranking {
 public:
  std::span<const Ranked> of(std::span<const float> logits, int top);

 private:
  std::vector<std::int32_t> order_;
  std::vector<Ranked> ranked_;
};

/// Throws DivergedError for a result that is NaN or infinite.
void check_finite(std::span<const float> results);

/// `logits` becomes what y has, of any shape, as f32.
void download_f32(nn::Backend& backend, const nn::Tensor& y, std::vector<float>& logits);

/// The names in a file, one per line, in the order of the classes. Throws UsageError unless they are as many.
std::vector<std::string> read_class_names(const std::string& path, std::int64_t classes);

}  // namespace lockstep::inference

// What inference does with each kind of input: one function a kind, which opens the inputs, and makes the workers of
// run_streams().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "inference/config.h"
#include "inference/model.h"
#include "inference/streams.h"

namespace lockstep::inference {

/// Inputs, ready to be run.
struct InferTask {
  InferReport::Kind kind = InferReport::Kind::kImages;
  std::uint64_t jobs = 0;
  const char* doing = "";  // "classifying"
  /// What it returns shares what it needs; model and configuration must outlive the workers.
  std::function<std::unique_ptr<InferWorker>(nn::Backend&)> make_worker;
};

/// Files of images, or all in a directory: a line each with the likeliest classes. A corrupt one is named in a warning
/// and counted. Throws UsageError for models that take no images and for flags of other kinds, IoError where there are
/// none.
InferTask image_task(const InferConfig& config, const InferModel& model);

/// A prompt, or several: each is printed and continued. Throws UsageError for models that know no tokens and for
/// flags of other kinds, IoError for files, and for text that the vocabulary does not have.
InferTask text_task(const InferConfig& config, const InferModel& model);

/// Texts that a model reads as a whole: a line each with the likeliest classes, or, for each [MASK] in them, the
/// likeliest tokens. Throws UsageError where there is no [MASK], or no vocabulary, IoError for files.
InferTask read_task(const InferConfig& config, const InferModel& model);

/// random:SHAPE[,LEN], in PyTorch's order (N, C, H, W), (N, F) or, of tokens, (N, T): prints the result's size and its
/// device.
struct RandomInput {
  std::int64_t batch = 0;
  std::vector<std::int64_t> sample;  // as models take it: {H, W, C}, {F} or {T}
  std::uint64_t count = 1;
};
/// Throws UsageError.
RandomInput parse_random_input(const std::string& text);
InferTask random_task(const InferConfig& config, const InferModel& model, const RandomInput& input);

}  // namespace lockstep::inference

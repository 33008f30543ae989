// What inference does with each kind of input: one function a kind, which opens the inputs, and makes the workers of
// run_streams().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/file_list.h"
#include "data/images.h"
#include "inference/infer.h"
#include "inference/model.h"
#include "inference/streams.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::inference {

/// Inputs, ready to be run.
struct InferTask {
  InferReport::Kind kind = InferReport::Kind::kImages;
  std::uint64_t jobs = 0;
  const char* doing = "";  // "classifying"
  std::int64_t batch = 1;  // inputs of a job, but for the last one
  /// What it returns shares what it needs; model and configuration must outlive the workers.
  MakeWorker make_worker;
};

/// Files of images, named one by one, or all of a directory.
class ImageFiles {
 public:
  /// `input` is as --input has it. Throws IoError where there are none, and UsageError for a directory among files.
  explicit ImageFiles(const std::string& input);
  std::uint64_t size() const { return list_ != nullptr ? list_->size() : files_.size(); }
  std::string path(std::uint64_t i) const { return list_ != nullptr ? list_->path(i) : files_[i]; }

 private:
  std::vector<std::string> files_;
  std::unique_ptr<const data::FileList> list_;
};

/// A text that is given to a model: --prompt, or a file, or its lines, or the rows of a table, or the files of a
/// folder.
struct PromptText {
  std::string text;
  std::string source;                   // for errors: "FILE, line 3"
  std::optional<std::string> second{};  // of a pair
  bool of_table = false;                // tabs in it are text
  std::string file{};                   // of a folder's, as results are called by then
};

/// All of it. Throws IoError, and InterruptedError after a stop request.
std::string read_standard_input();

/// At least one; of lines also those that are empty: results shall be as many. With --lines the first line of a table
/// (data::is_table()) names its columns, and is no text. Throws IoError for a file that cannot be read, and where no
/// line has a text.
std::vector<PromptText> read_prompts(const InferConfig& config);

/// A line for each image with the likeliest classes; config.batch of them are computed together. A corrupt one is named
/// in a warning and counted. `files`: nullptr: config.input's. Throws UsageError for models that take no images and for
/// flags of other kinds, and as ImageFiles does.
InferTask image_task(const InferConfig& config, const InferModel& model, std::shared_ptr<const ImageFiles> files);

/// A prompt, or several: each is printed and continued. Throws UsageError for models that know no tokens and for
/// flags of other kinds, IoError for files, and for text that the vocabulary does not have.
InferTask text_task(const InferConfig& config, const InferModel& model);

/// Texts that a model reads as a whole: a line each with the likeliest classes, or, for each [MASK] in them, the
/// likeliest tokens. Throws UsageError where there is no [MASK], or no vocabulary, IoError for files.
InferTask read_task(const InferConfig& config, const InferModel& model);

/// A line for each row of a table, with its fields and what is predicted of it, after a line of names; config.batch of
/// them are computed together. The model's metadata has a table. Throws UsageError for flags of other kinds, IoError
/// for the file and what its columns are not.
InferTask table_task(const InferConfig& config, const InferModel& model);

/// random:SHAPE[,LEN], in PyTorch's order (N, C, H, W), (N, F) or, of tokens, (N, T): prints the result's size and its
/// device for each; config.batch of them are computed together.
struct RandomInput {
  std::int64_t batch = 0;
  std::vector<std::int64_t> sample;  // as models take it: {H, W, C}, {F} or {T}
  std::uint64_t count = 1;
};
/// Throws UsageError.
RandomInput parse_random_input(const std::string& text);
/// How many of them are computed together, at most config.batch. Throws UsageError where that is too much to count.
std::uint64_t inputs_together(const InferConfig& config, const RandomInput& input);
/// `devices` must outlive the workers too.
InferTask random_task(const InferConfig& config, const InferModel& model, const InferDevices& devices,
                      const RandomInput& input);

/// How the model takes images: as the weights say, or for files of other programs as their models do. Throws
/// UsageError where its samples are none.
data::ImageForm image_form_of(const InferConfig& config, const InferModel& model);

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

/// The names of the model's classes, in their order: those in config.class_names, a file with one per line, or else
/// those of the weights; empty if neither has any. Throws UsageError unless the file has one for each class.
std::vector<std::string> class_names_of(const InferConfig& config, const InferModel& model);

}  // namespace lockstep::inference

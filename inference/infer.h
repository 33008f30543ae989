// One inference run of this process: its configuration as plain values, and infer().
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/dtype.h"
#include "lockstep/base/settings.h"
#include "lockstep/checkpoint/options.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/session/session.h"
#include "options/table.h"

namespace lockstep::inference {

inline constexpr std::int64_t kDefaultTokens = 256;
inline constexpr int kDefaultTop = 5;
inline constexpr std::uint64_t kDefaultSeed = 1;

/// bf16: weights and activations; int8w: weights as Int8Rows, activations f32. Sums are f32.
enum class InferPrecision : std::uint8_t { kF32, kBF16, kInt8W };
/// What activations are.
constexpr Precision activations_of(InferPrecision precision) {
  return precision == InferPrecision::kBF16 ? Precision::kBF16 : Precision::kF32;
}
constexpr DType dtype_of(InferPrecision precision) { return lockstep::dtype_of(activations_of(precision)); }

/// `device`: of a list all, with a copy of the weights each; `quiet`: no report.
struct InferConfig : session::DeviceOptions, checkpoint::WeightsOptions {
  nn::ModelConfig model;  // sizes that are not given are those of the weights

  std::string config_file;            // where settings come from
  std::string input;                  // a file, several with commas between, a directory, random:SHAPE[,LEN], -
  std::optional<std::string> prompt;  // text itself

  // Images.
  std::optional<int> top;         // likeliest classes that are printed (default kDefaultTop)
  std::string class_names;        // a file with a name per line
  std::optional<int> image_size;  // pixels; default: what the weights say, or the model's

  // Text.
  std::string vocabulary, merges;      // GPT-2's vocab.json and merges.txt; a BERT's vocab.txt
  std::optional<bool> cased;           // a BERT's texts keep capital letters and accents (default: its vocabulary says)
  std::optional<std::int64_t> tokens;  // most that are generated of a text (default kDefaultTokens)
  std::optional<std::int64_t> samples;  // continuations of each prompt (default 1)
  std::optional<double> temperature;    // 0: always the likeliest token (default 1)
  std::optional<std::int64_t> top_k;    // the likeliest so many are drawn from; 0: all (default)
  bool lines = false;                   // each line of the input, or row of a table, is a prompt
  Settings table;                       // data::text_table_settings() of a table
  std::optional<std::uint64_t> seed;    // of drawn tokens, synthetic inputs, and parameters without weights (default 1)

  // Streams.
  std::optional<std::int64_t> batch;  // images or synthetic inputs of a forward pass (default 1)
  InferPrecision precision = InferPrecision::kF32;
  // Streams, of all devices together; 0: on the CPU one for each core, on GPUs one each, but no more than there are
  // batches of inputs.
  int threads = 0;
  std::int64_t warmup = 0;  // unmeasured runs of the first input by each stream

  std::string output;  // the file that results go to; empty: stdout
  bool json = false;   // results and report as JSON lines
};

/// Throws UsageError for values that contradict each other; the model and its inputs are checked when it is opened.
void validate(const InferConfig& config);

/// A kind of input that has nothing to do with files: "random:1x3x224x224,100".
inline constexpr std::string_view kRandomInput = "random:";

/// The settings of lockstep infer, as trainer/options.h has those of a run; `config` must outlive the table.
options::OptionTable infer_options(InferConfig& config);

/// Opens the model and its inputs and runs them on streams of their own (run_streams); results go to stdout, or to a
/// file that is written whole or not at all, a report of times to stderr, or to stdout as JSON. Not for ranks: a
/// process under a launcher of several is refused. Returns the exit code 0; throws lockstep::Error otherwise, IoError
/// also, once all others are done, where images were corrupt.
int infer(const InferConfig& config);

}  // namespace lockstep::inference

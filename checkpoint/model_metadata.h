// What a weights file says of its model, so that whoever uses it needs neither flags nor the data;
// and a model whose sizes come from such a file.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/images.h"
#include "data/table_schema.h"
#include "data/text.h"
#include "data/word_pieces.h"
#include "lockstep/checkpoint/options.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::checkpoint {

/// Goes into the "__metadata__" of the safetensors files that training writes, as JSON under "lockstep".
struct ModelMetadata {
  nn::ModelSpec spec;  // name and all sizes
  bool tokens = false;
  std::vector<std::string> class_names;                 // of the first classes; may be empty
  std::shared_ptr<const data::Characters> characters;   // whose tokens they are; nullptr: nobody knows
  std::shared_ptr<const data::WordPieces> word_pieces;  // or these'
  std::shared_ptr<const data::ImageForm> image;         // what it takes of an image; nullptr: it was not trained on any
  std::shared_ptr<const data::TableSchema> table = {};  // the columns of the tables that it was trained on
  std::string data;                                     // for people: "digits train"
  std::uint64_t seed = 0;
  std::optional<BestEvaluation> best = {};  // whose weights these are; nothing: those of a run's end
};

/// {"format": "pt", "lockstep": …}
std::map<std::string, std::string> metadata_of(const ModelMetadata& metadata);

/// What metadata_of() has put among `metadata`, if it is there. Throws IoError naming `source` for what does not say
/// what it should.
std::optional<ModelMetadata> find_model_metadata(const std::map<std::string, std::string>& metadata,
                                                 const std::string& source);

/// Of a file: nothing where it is another program's, or of another kind. Throws IoError as nn::read_weights() does.
std::optional<ModelMetadata> read_model_metadata(const std::string& path);

/// The pieces of the vocabulary file `vocabulary`, or, where it is empty, of the metadata of `weights`; nullptr:
/// neither says any. What the metadata says of how texts are read holds. Throws IoError for the file, and UsageError
/// for other pieces than the metadata's, and for a `cased` that is not theirs.
std::shared_ptr<const data::WordPieces> open_word_pieces(const std::string& vocabulary, std::optional<bool> cased,
                                                         const std::optional<ModelMetadata>& metadata,
                                                         const std::string& weights);

/// Sizes that `model` leaves open become those of the metadata. Throws UsageError naming the flag for others, and for
/// another model. An lstm takes texts of any context: one that is given stays.
void apply_metadata(nn::ModelConfig& model, const ModelMetadata& metadata, const std::string& source);

/// What `spec`, of a file, says of sizes; `source` is that file, where it says them by itself and nobody may say
/// others. If only shapes give sizes, the user's settings win, and load_state() reports misfits.
void apply_sizes(nn::ModelConfig& model, const nn::ModelSpec& spec, const std::optional<std::string>& source);

/// Throws IoError naming file `source` and the first of `tensors` that has no elements: no model has such.
void check_not_empty(const std::vector<nn::HostTensor>& tensors, const std::string& source);

/// Where the sizes of a model come from.
struct SizesOf {
  bool metadata = true;        // the file says them; otherwise its tensors' shapes and flags do
  bool all_are_loaded = true;  // the file must have all parameters
};

/// What the config.json of Hugging Face's packages says of the settings of `given` that are not given
/// (ModelFamily::config). Throws IoError naming `source` for one that cannot be read, or is of a model that computes
/// something else.
Settings read_config_file(std::string_view text, const std::string& source, const nn::ModelConfig& given);

/// nn::spec_of_tensors() of the weights file `path`, which has no metadata, with what a config.json beside it says.
nn::ModelSpec spec_of_file(const nn::ModelConfig& given, const std::vector<nn::HostTensor>& tensors,
                           const std::string& path);

/// The module of `spec`, which comes from file `source`: what may be a lie takes no more memory than `tensors`, the
/// file's, account for, and 1 GiB more where the file may lack parameters or be another model's. Throws IoError naming
/// the file where it would be larger, or where metadata names no model; without metadata, UsageError for what is no
/// model.
std::unique_ptr<nn::Module> make_model_of_file(nn::Context& context, const nn::ModelSpec& spec,
                                               const std::vector<nn::HostTensor>& tensors, const std::string& source,
                                               const SizesOf& sizes);

/// Logs which tensors of file `source` have other names than the model's, which ones it lacks (`instead`: their new
/// state) and which ones are not used.
void log_report(const nn::LoadReport& report, const std::string& source, const char* instead);

}  // namespace lockstep::checkpoint

// The registry of models: a family is one file in this directory, which declares a `ModelFamily`, and a line in
// models.cpp. Nobody else knows a model by its name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/models/language_model.h"

namespace lockstep::nn {

/// What a model is built for. Vectors are {F}, images {H, W, C}, tokens {T}.
struct ModelSpec {
  std::string name;
  std::vector<std::int64_t> sample_shape;
  std::int64_t classes = 10;  // of a model that predicts tokens: those of its vocabulary; of numbers: how many
  Settings settings = {};     // its family's; those that are not given have the defaults of its name
  // Of a model that reads tokens and predicts a class of the whole sample; 0: it predicts tokens.
  std::int64_t vocabulary = 0;
  std::int64_t predictions = 1;               // of a model that predicts masked tokens: how many of a sample
  std::vector<std::int64_t> categories = {};  // of a table's categorical columns: how many codes each has
};

/// A model, and what was said of it: settings that its family declares.
struct ModelConfig {
  std::string name;  // one of model_names()
  Settings settings;
};

/// A layer as the matrix product that it is for one sample: a convolution has a row for each pixel that it computes, a
/// layer of a transformer one for each token. Attention is two, queries by keys and weights by values: a row for each
/// pair of a token and one that it sees, of all heads, T (T + 1) / 2 · heads of them.
struct MatrixProduct {
  std::int64_t rows = 1;
  std::int64_t in = 0;      // a convolution's: kernel height · kernel width · channels
  std::int64_t out = 0;     // features or channels
  bool reads_data = false;  // so nothing needs the gradient of its input
};

/// Tensors of a weights file by all their possible_names(): those that load_state() may give them
/// (LoadOptions::match_other_names). Returns pointers into the list that it was made with.
class TensorsByName {
 public:
  /// `tensors` must outlive it, and not change.
  explicit TensorsByName(const std::vector<HostTensor>& tensors);

  /// Those with so many dimensions, in the file's order, whatever their names: for files with other names than the
  /// model's.
  std::vector<const HostTensor*> with_dims(std::size_t dims) const;

  /// Whether the names of some begin with `part`.
  bool has_one_in(const std::string& part) const;
  /// nullptr: there is none of so many dimensions.
  const HostTensor* find(const std::string& name, std::size_t dims) const;
  /// Its shape; nullptr: there is none of so many dimensions.
  const std::vector<std::int64_t>* shape(const std::string& name, std::size_t dims) const;

 private:
  const std::vector<HostTensor>& tensors_;
  std::map<std::string, const HostTensor*> by_name_;
};

/// A name of a family, with what it means.
struct ModelVariant {
  std::string name;
  Settings defaults = {};                                   // where they differ from the family's
  std::vector<std::int64_t> sample_shape = {};              // that it is known for: {224, 224, 3}; empty: tokens
  std::optional<std::int64_t> classes_of_random_data = {};  // default: the data set's
  std::optional<std::int64_t> classes_of_weights = {};      // of a weights file that does not say how many; default: 10
  bool whole_images = false;  // its images are small and taken whole, where others are cropped
};

/// What a family is trained with where nothing else is asked for.
struct TrainingDefaults {
  std::string optimizer = "adamw";
  // With that optimizer alone; others have their own defaults.
  std::optional<double> lr = {};
  std::optional<double> lr_per_256 = {};  // samples of the global batch, instead of lr
  std::optional<double> weight_decay = {};
};

/// The last layer, in a family whose models share all other layers: it is reinitialized if the loaded weights are of a
/// model for another task.
struct SeparateHead {
  std::string own;                        // its names begin so: "classifier."; empty: as the last parameter's
  std::vector<std::string> others = {};   // those of other tasks' layers, which are not used
  std::vector<std::string> new_too = {};  // names of layers that files of other tasks may lack
};

/// What files have instead of, or beside, the names of a family's parameters: those of other programs, and of other
/// versions. In patterns * stands for any characters.
struct FileNames {
  using Renaming = std::pair<std::string, std::string>;  // from, to

  /// A parameter that all models of the family have, and no others. Empty: files have the names of the parameters.
  std::string known_by;
  /// Before all names but those of copies in some files: "transformer.".
  std::string wrapper = {};
  /// Before names that begin as one of `inner_parts`, where a file has `known_by` without it: "bert.".
  std::string lacked = {};
  std::vector<std::string> inner_parts = {};
  std::vector<Renaming> endings = {};    // how older files' names end
  std::vector<Renaming> copies = {};     // tensors that are there again: their name, and that of the parameter
  std::vector<std::string> unused = {};  // patterns of others, which are not used where the model has none of the name
};

/// What the config.json of Hugging Face's packages, beside a file of weights, says of a family's models. A name with a
/// dot is that of a member of a member.
struct ConfigFile {
  std::vector<std::pair<std::string, std::string>> settings = {};  // their names, and those of the family's settings
  /// What the family's models compute with, as JSON; a file with another value is refused.
  std::vector<std::pair<std::string, std::vector<std::string>>> wanted = {};
  /// The file that their from_pretrained() reads a model of ours by. Empty: there is none.
  std::function<std::string(const ModelSpec& spec, const std::vector<std::string>& class_names)> text = {};
};

struct ModelFamily {
  std::string title = {};  // "ResNets": what help calls all its models together; empty: their names
  std::vector<ModelVariant> variants;
  std::vector<SettingSpec> settings = {};
  // What a sample may be.
  bool takes_vectors = false, takes_images = false, takes_tokens = false;
  bool takes_categories = false;  // beside vectors: a table's, as a second input
  /// Of its settings the one that says how many tokens a sample has; empty: none.
  std::string tokens_setting = {};
  /// The tensor of its weights files that has a row for each token; empty: none.
  std::string token_table = {};
  bool blocks = false;         // Module::blocks() has some
  bool batch_norm = false;     // some layer has running statistics
  bool attention = false;      // some layer is attention()
  bool random = false;         // a pass may call dropout() or randn(), also where no setting says so
  bool carries_state = false;  // over texts it is a CarriesState
  bool word_pieces = false;    // it reads texts as word pieces, and predicts masked ones, or classes of texts
  /// Its last layer has parameters of its own, which can be reinitialized. Nothing: it has not.
  std::optional<SeparateHead> head = SeparateHead();
  bool any_image_size = false;  // one set of weights fits images of all sizes
  bool any_samples = false;     // `build` decides: samples and classes are not looked at before
  TrainingDefaults training = {};
  FileNames file_names = {};
  ConfigFile config = {};

  // `context`, `spec` and `tensors` are there during the call. Modules may be built as long as the process lives, so
  // what a function refers to is there as long.

  /// Throws UsageError for a sample shape or settings that it cannot have. `spec` is complete. Returns a module.
  std::function<std::unique_ptr<Module>(Context& context, const ModelSpec& spec)> build = {};
  /// In the order of its forward pass. `spec` is complete. Empty: nobody knows its products.
  std::function<std::vector<MatrixProduct>(const ModelSpec& spec)> products = {};
  /// Bytes that a module holds beside parameters and buffers, and that no file has. `spec` is complete. Empty: none.
  std::function<double(const ModelSpec& spec)> constant_bytes = {};
  /// Derives sample shape, classes and settings from the shapes of a weights file. `spec` has the given settings, which
  /// stay, and the variant's usual sample shape and classes. Empty: they say nothing.
  std::function<void(const TensorsByName& tensors, ModelSpec& spec)> read_tensors = {};

  /// Its names: "gpt", "gpt2".
  std::vector<std::string> names() const;
  /// The family's own; InternalError for another name.
  const ModelVariant& variant(const std::string& name) const;
  /// Settings as a model of this name has them where nothing is given.
  std::vector<SettingSpec> settings_of(const std::string& name) const;
};

/// Families are there as long as the process; the list changes with register_model().
const std::vector<const ModelFamily*>& model_families();
/// Adds a program's own, which then has all that lockstep's have: flags for its settings, checkpoints, evaluation.
/// Before threads start. One of the program's own with the same name is replaced; throws UsageError for a name of
/// lockstep's, or one that cannot be typed, without names, and without ModelFamily::build.
void register_model(ModelFamily family);
/// nullptr: no model has this name.
const ModelFamily* find_model_family(const std::string& name);
/// Throws UsageError for another name, with the nearest right one.
const ModelFamily& model_family(const std::string& name);

/// All names, in the order of help texts.
std::vector<std::string> model_names();
inline void check_model_name(const std::string& name) { model_family(name); }
/// Those whose family does, for texts: "gpt, gpt2 and lstm".
std::string models_that(bool (*does)(const ModelFamily& family), const char* before_last = "and");

/// `spec` with all settings. Throws UsageError for an unknown name and for settings that its family does not have.
ModelSpec complete(const ModelSpec& spec);
/// With a factory, which keeps a copy of `spec`. Throws UsageError for an unknown name (with the nearest right one) or
/// a sample shape or settings that the model cannot take.
std::unique_ptr<Module> make_model(Context& context, const ModelSpec& spec);
/// What the shapes of a weights file's tensors say of the model `name`; settings that are `given` hold. Throws
/// UsageError where they say too little, and as complete() does.
ModelSpec spec_of_tensors(const std::string& name, const Settings& given, const std::vector<HostTensor>& tensors);
/// The most tokens that the model takes at once, if that is one of its sizes.
std::optional<std::int64_t> most_tokens(const ModelSpec& spec);
/// Matrix products of a sample's forward pass; none where the family does not say.
std::vector<MatrixProduct> products_of(const ModelSpec& spec);

/// A size of a model: a whole number of at least 1.
SettingSpec size_setting(const char* name, std::int64_t fallback, const char* help,
                         SettingSpec::Role role = SettingSpec::Role::kStructure);
/// --hidden: the widths of a perceptron's hidden layers.
SettingSpec hidden_setting(std::vector<std::int64_t> fallback);
/// The probability with which an element is dropped in training.
SettingSpec dropout_setting();
/// Numbers of a sample.
std::int64_t features_of(const ModelSpec& spec);
/// Throws UsageError unless samples are images of at least `least` pixels each way.
void check_images(const ModelSpec& spec, std::int64_t least);

}  // namespace lockstep::nn

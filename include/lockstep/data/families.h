// The registry of data sets: a family is one file in this directory, which declares a `DatasetFamily`, and a line in
// open.cpp.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

struct DatasetFamily {
  std::string name;           // "mnist"
  std::string argument = {};  // what follows the colon: "DIR"; empty: nothing
  std::string about = {};     // "IDX files, plain or .gz"
  std::string remedy = {};    // for an argument that is missing: "the directory with MNIST's IDX files"
  std::vector<SettingSpec> settings = {};
  /// Classes that its files have; fewer cannot be asked for. 0: they say it, or whoever opens it.
  int classes = 0;
  bool has_tokens = false;        // of all its samples
  bool consecutive = false;       // each sample continues where the one before ends
  bool takes_vocabulary = false;  // OpenOptions::vocabulary
  bool any_classes = false;       // its numbers do not say how many classes there are
  bool any_image_size = false;    // its images are scaled to what is asked for
  bool synthetic = false;         // nothing is read
  bool test_validates = false;    // the part that training is validated on is the test part that was published
  /// `spec`: all that was typed, for messages. `options` have all settings, and the family's classes for 0. The
  /// arguments are valid during the call alone. It issues no collectives: what it throws on one rank ends all of them.
  std::function<DataSplits(const std::string& spec, const std::string& argument, const OpenOptions& options)> open = {};
  /// The regular files that `argument` names; empty: it is a directory, or none.
  std::function<std::vector<std::string>(const std::string& argument)> files = {};
};

/// lockstep's own, and after them those of the program. Families live as long as the process.
const std::vector<const DatasetFamily*>& dataset_families();
/// Adds a program's own, as nn::register_model() does a model. Throws UsageError for one without `open`.
void register_dataset(DatasetFamily family);
/// That of "mnist:DIR"; nullptr: there is none.
const DatasetFamily* find_dataset_family(const std::string& spec);
/// "DIR" of "mnist:DIR"; empty where there is none.
std::string dataset_argument(const std::string& spec);
/// Whether its samples are tokens, as far as the name says: random ones may be.
bool may_have_tokens(const std::string& spec);

/// "digits (shipped), mnist:DIR (IDX files, plain or .gz), …"
std::string dataset_help();

inline constexpr const char *kAugment = "augment", *kErasing = "erasing", *kRandAugment = "randaugment",
                            *kMixup = "mixup", *kCutmix = "cutmix", *kImageSize = "image-size";
/// How training samples are mixed: of data sets of images with classes. And what they make of them.
std::vector<SettingSpec> mixing_settings();
Mixing mixing_of(const Settings& settings);
/// These, and whether training samples are cropped and mirrored at random, what else is done to their pixels, and how
/// many lose a rectangle: of data sets of photographs.
std::vector<SettingSpec> augment_settings();

}  // namespace lockstep::data

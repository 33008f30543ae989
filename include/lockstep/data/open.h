// From a data set's name, as people type it, to the data set.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data {

inline constexpr std::int64_t kDefaultContext = 256;
inline constexpr int kDefaultImageSize = 224;

/// How texts become samples for a model that reads word pieces, and predicts those that are masked, or a class.
struct WordPieceOptions {
  std::shared_ptr<const WordPieces> pieces = {};  // nullptr: they are learned from the text that is trained on
  std::int64_t vocabulary_size = 8192;            // the most that are learned
  bool cased = false;                             // whether they are learned with capital letters and accents
};

/// Which parts of a source are opened, besides those for training and validation.
struct Parts {
  bool whole = false;  // a source without parts is not divided: DataSplits::whole
  bool test = false;   // a test part beside the two others is opened too; else a line says that there is one
  // The classes, by their numbers, of sources that name theirs; all that these have are among them. {}: theirs, sorted.
  std::vector<std::string> class_names = {};
};

struct OpenOptions {
  int classes = 0;                                    // 0: the data set's own number
  std::uint64_t seed = 1;                             // of synthetic data
  std::int64_t context = kDefaultContext;             // tokens of a sample
  Settings settings = {};                             // its family's; those that are not given have their defaults
  int usual_image_size = kDefaultImageSize;           // pixels, of data whose images may have any size
  std::shared_ptr<const Characters> characters = {};  // text: the vocabulary; default: the text's own
  std::shared_ptr<const Vocabulary> vocabulary = {};  // text: the same, of tokens that are no characters
  std::shared_ptr<const TableSchema> table = {};      // table: a model's columns; default: the table's own
  std::optional<WordPieceOptions> word_pieces = {};   // texts are cut into them, and rows of tokens are masked
  Parts parts = {};
  /// A label that counts for nothing (nn::TargetRule): arrays of labels may have it, though it be no class.
  std::optional<std::int32_t> ignored_label = {};
};

/// Opens what `spec` names (`lockstep train --help` lists them). Throws UsageError for a name, shape, setting or number
/// of classes that cannot be, naming the nearest right name, and IoError for files that are missing or malformed and
/// for data sets without a sample.
DataSplits open_data(const std::string& spec, const OpenOptions& options = {});

}  // namespace lockstep::data

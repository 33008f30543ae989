// The source of samples for training and evaluation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::data {

class Characters;
class Vocabulary;
class WordPieces;
struct ImageForm;
struct TableSchema;

/// Memory of an array: of numbers or of integers, as the data set says; the other one is empty.
struct Array {
  std::span<float> numbers;
  std::span<std::int32_t> integers;
};

/// Memory for one sample, of which the data set fills what it has; the others are empty. It is the caller's, and valid
/// during the call alone. Its content is unspecified: the data set writes all of it.
struct Sample {
  std::span<float> x;
  std::span<std::int32_t> tokens;
  std::span<std::int32_t> labels;
  std::span<float> targets;
  /// Training may change the sample at random (crop, mirror, …), as a pure function of its number and of this, any two
  /// of which are independent. Nothing: as it is.
  std::optional<std::uint64_t> draw = {};
  std::span<const Array> further = {};  // Info::further_inputs
};

/// How training mixes each sample with another one of the data set, its partner: alpha of Beta(alpha, alpha), of which
/// the sample's share is drawn; 0: it does not. With both, every other sample is mixed in the second way. Partner,
/// share and rectangle are a pure function of seed, epoch and sample (data/mixing.h).
struct Mixing {
  double mixup = 0;   // weighted means of numbers: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018)
  double cutmix = 0;  // a rectangle of the partner's: Yun et al., "CutMix" (2019)

  bool any() const { return mixup > 0 || cutmix > 0; }
};

/// A fixed, numbered set of samples with targets. Immutable: all members may be called from several threads at once, as
/// a Loader's workers do. What a read throws comes out of Loader::next().
/// A sample is an array of numbers (f32) or of tokens (i32), and possibly further arrays, which the module gets as
/// further inputs. Its targets are labels (i32) or numbers (f32): one, an array, or a label for each token.
class Dataset {
 public:
  /// An input of the module beside the sample's numbers or tokens: a mask, token types, …
  struct Input {
    std::string name;                     // for people
    std::vector<std::int64_t> dims = {};  // of a sample; {}: one
    bool integers = false;                // i32; else numbers, f32

    bool operator==(const Input&) const = default;
  };
  struct Info {
    std::string name;        // for people: "digits train"
    std::uint64_t size = 0;  // samples, at least 1
    std::vector<std::int64_t>
        dims;         // of a sample: {H, W, C} for images (NHWC without N), {F} for vectors, {T} for tokens
    int classes = 0;  // labels, and tokens, lie in [0, classes); 0 where targets are numbers
    bool tokens = false;
    double bytes_per_token = 0;  // of the text that they are; 0: nobody knows
    int vocabulary = 0;          // tokens lie in [0, vocabulary) instead; 0: they do not
    bool own_targets = false;    // samples of tokens have targets as others have; else a label for each token
    std::vector<std::int64_t> target_dims = {};      // of a sample's targets; {}: one
    bool numeric_targets = false;                    // they are numbers, and not labels
    std::optional<std::int32_t> ignored_label = {};  // there may be this one too, which is none of the classes
    std::optional<std::pair<float, float>> target_range = {};  // the least and the largest, where that is known
    std::vector<Input> further_inputs = {};  // in the order in which the module takes them, after the sample
    // How samples were made from raw data, so that a model trained on them can be given more raw data.
    std::vector<std::string> class_names = {};                // of the first classes; the others are numbers
    std::vector<std::uint64_t> class_counts = {};             // samples of each, where that is known without reading
    std::string reading = {};                                 // of a table: its rows, and what its columns are
    std::shared_ptr<const Characters> characters = nullptr;   // whose tokens they are
    std::shared_ptr<const WordPieces> word_pieces = nullptr;  // or these'
    std::string vocabulary_sha256 = {};                       // of another vocabulary that texts were cut by
    std::shared_ptr<const ImageForm> image = nullptr;         // what was made of images
    std::shared_ptr<const TableSchema> table = nullptr;       // what the columns are that were read
    // A Loader for training has probabilities of all classes in place of labels (Batch::targets). Of images {H, W, C}
    // with one label.
    Mixing mixing = {};
    // Of a table's categorical columns, the further input, how many codes each has: those of the second follow the
    // first's.
    std::vector<std::int64_t> categories = {};
  };

  virtual ~Dataset() = default;
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;

  const Info& info() const { return info_; }
  const std::string& name() const { return info_.name; }
  std::uint64_t size() const { return info_.size; }
  const std::vector<std::int64_t>& sample_dims() const { return info_.dims; }
  /// Numbers in one sample: the product of sample_dims().
  std::size_t sample_elements() const { return elements_; }
  int classes() const { return info_.classes; }
  /// How many tokens there are, where that is not how many classes; else 0.
  int vocabulary() const { return info_.vocabulary; }
  /// Which of the two reads it has.
  bool has_tokens() const { return info_.tokens; }
  const std::vector<std::string>& class_names() const { return info_.class_names; }
  const std::shared_ptr<const Characters>& characters() const { return info_.characters; }
  const std::shared_ptr<const WordPieces>& word_pieces() const { return info_.word_pieces; }
  const std::shared_ptr<const ImageForm>& image() const { return info_.image; }
  /// Extents of a sample's targets; {}: it has one.
  const std::vector<std::int64_t>& target_dims() const { return info_.target_dims; }
  /// Their product.
  std::size_t targets_per_sample() const { return targets_; }
  bool has_numeric_targets() const { return info_.numeric_targets; }
  const std::vector<Input>& further_inputs() const { return info_.further_inputs; }
  /// Values in one sample's further input `i`, below further_inputs().size().
  std::size_t further_elements(std::size_t i) const { return further_elements_[i]; }

  /// Writes sample `index` < size(), whose memory has the sizes above. Throws IoError if it cannot be read. A data set
  /// of labelled numbers or tokens without further inputs may override one of the functions below instead; one that
  /// overrides none throws UsageError.
  virtual void read_sample(std::uint64_t index, const Sample& sample) const;

  /// Numbers with one label.
  virtual void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const;
  /// The same sample changed at random (cropped, mirrored, …): a pure function of (index, draw), of which any two draws
  /// are independent. What training reads; data sets that change nothing are read as they are.
  virtual void read_augmented(std::uint64_t index, std::uint64_t draw, std::span<float> x, std::int32_t& label) const;
  /// read() for tokens: both spans have sample_elements(), and each label is the token that follows.
  virtual void read_tokens(std::uint64_t index, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const;

  /// Appends the source of sample `index`: for a run that resumes, two data sets are the same if these bytes are. By
  /// default the values that read_sample() writes without a draw. A data set that decodes files appends their bytes, so
  /// that another decoder makes no difference.
  virtual void append_source(std::uint64_t index, std::vector<std::byte>& bytes) const;

  /// For people: its file, for example; by default its number.
  virtual std::string sample_name(std::uint64_t index) const;

  /// Samples found unreadable so far, and replaced by others.
  virtual std::uint64_t corrupt() const { return 0; }

 protected:
  /// Throws UsageError for extents below 0, or of more numbers than memory has, for targets of tokens other than their
  /// labels, unless they are own_targets, and for further inputs without a name, or of one name.
  explicit Dataset(Info info);

 private:
  Info info_;
  std::size_t elements_ = 1, targets_ = 1;
  std::vector<std::size_t> further_elements_;
};

/// The parts of an opened source. No sample is in two of them, with one exception: a published test part may serve as
/// `validation`, and is then `test` too.
struct DataSplits {
  std::shared_ptr<const Dataset> train = nullptr;
  std::shared_ptr<const Dataset> validation = nullptr;
  std::shared_ptr<const Dataset> test = nullptr;   // which training leaves untouched; of Parts::test
  std::shared_ptr<const Dataset> whole = nullptr;  // instead of the others: a source without parts, of Parts::whole
};

/// The samples of all `parts`, one part after the other. They are of one kind; throws UsageError otherwise, and where
/// there are none. None of them is nullptr.
std::shared_ptr<const Dataset> concatenate(std::vector<std::shared_ptr<const Dataset>> parts, std::string name);

}  // namespace lockstep::data

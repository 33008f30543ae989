// What training and evaluation read samples from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::data {

class Characters;
struct ImageForm;

/// A fixed, numbered set of labelled samples. Immutable: all members may be called from several threads at once.
/// A sample is an array of numbers (f32) with one label, or a row of tokens (i32) with a label for each.
class Dataset {
 public:
  struct Info {
    std::string name;        // for people: "digits train"
    std::uint64_t size = 0;  // samples, at least 1
    std::vector<std::int64_t>
        dims;         // of a sample: {H, W, C} for images (NHWC without N), {F} for vectors, {T} for tokens
    int classes = 0;  // labels, and tokens, lie in [0, classes)
    bool tokens = false;
    // How samples were made of what people have, so that a model trained on them can be given more of it.
    std::vector<std::string> class_names = {};               // of the first classes; the others are numbers
    std::shared_ptr<const Characters> characters = nullptr;  // whose tokens they are
    std::shared_ptr<const ImageForm> image = nullptr;        // what was made of images
  };

  virtual ~Dataset() = default;
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;

  const std::string& name() const { return info_.name; }
  std::uint64_t size() const { return info_.size; }
  const std::vector<std::int64_t>& sample_dims() const { return info_.dims; }
  /// Numbers in one sample: the product of sample_dims().
  std::size_t sample_elements() const { return elements_; }
  int classes() const { return info_.classes; }
  /// Which of the two reads it has.
  bool has_tokens() const { return info_.tokens; }
  const std::vector<std::string>& class_names() const { return info_.class_names; }
  const std::shared_ptr<const Characters>& characters() const { return info_.characters; }
  const std::shared_ptr<const ImageForm>& image() const { return info_.image; }
  std::size_t labels_per_sample() const { return info_.tokens ? elements_ : 1; }

  /// Writes sample `index` < size(): x.size() must be sample_elements(). Throws IoError if it cannot be read. A data
  /// set that has neither this nor read_augmented() throws UsageError; one of tokens has read_tokens() instead.
  virtual void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const;
  /// The same sample changed at random (cropped, mirrored, …): a pure function of (index, draw), of which any two draws
  /// are independent. What training reads; data sets that change nothing are read as they are.
  virtual void read_augmented(std::uint64_t index, std::uint64_t draw, std::span<float> x, std::int32_t& label) const;
  /// read() for tokens: both spans have sample_elements(), and each label is the token that follows.
  virtual void read_tokens(std::uint64_t index, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const;

  /// Samples that turned out so far to be unreadable, and in whose places others were read.
  virtual std::uint64_t corrupt() const { return 0; }

 protected:
  /// Throws UsageError for extents below 0, or of more numbers than memory has.
  explicit Dataset(Info info);

 private:
  Info info_;
  std::size_t elements_ = 1;
};

/// The training and validation samples; no sample is in both.
struct DataSplits {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> test;
};

}  // namespace lockstep::data

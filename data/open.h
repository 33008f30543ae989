// From a data set's name, as people type it, to the data set.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "data/dataset.h"

namespace lockstep::data {

inline constexpr std::int64_t kDefaultContext = 256;

struct OpenOptions {
  int classes = 0;                         // 0: the data set's own number
  std::uint64_t seed = 1;                  // of made-up data
  std::int64_t context = kDefaultContext;  // tokens of a sample
  // What only data sets of images take, and others refuse.
  std::optional<bool> augment = {};                // training samples are changed at random; default: yes
  std::optional<int> image_size = {};              // images: height and width of a sample; default: kDefaultImageSize
  std::optional<std::uint64_t> most_damaged = {};  // images: files that are put up with; default: kDefaultMostDamaged
  std::shared_ptr<const Characters> characters = {};  // text: the vocabulary; default: the text's own
};

/// Opens
///   digits            8×8 handwritten digits, shipped inside the program;
///   mnist:DIR         MNIST's four IDX files, plain or .gz;
///   cifar10:DIR       CIFAR-10's binary version (data/cifar10.h);
///   images:DIR        JPEG and PNG files, a folder for each class (data/images.h);
///   random:SHAPE,LEN  LEN made-up samples; SHAPE is a number of features (5) or CxHxW (3x32x32; the samples' dims are
///                     {H, W, C} all the same);
///   text:FILE         the characters of a text in UTF-8 (data/text.h);
///   tokens:FILE       16-bit numbers (data/tokens.h).
/// Throws UsageError for a name, shape or number of classes that cannot be, naming the nearest right name, and IoError
/// for files that are missing or malformed and for data sets without a sample.
DataSplits open_data(const std::string& spec, const OpenOptions& options = {});

}  // namespace lockstep::data

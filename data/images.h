// Photographs and drawings in files, a folder for each class.
#pragma once

#include <cstdint>
#include <string>

#include "data/image_views.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

inline constexpr std::uint64_t kDefaultMaxCorrupt = 100;

struct ImagesOptions {
  int classes = 0;  // 0: as many as there are folders
  int size = kDefaultImageSize;
  bool augment = true;  // training samples may be read changed at random
  std::uint64_t max_corrupt = kDefaultMaxCorrupt;
  Parts parts = {};
};

/// images:DIR. The folders of DIR, or of DIR/train where that and DIR/val are there, are the classes, numbered in their
/// names' order. Validation is on DIR/val, whose folders must be among them; without it on every tenth image of the
/// sorted list (the 10th, the 20th, …), which then is not trained on. DIR/test is a test part.
///
/// Samples have dims {size, size, 3}, normalised with ImageNet's constants: training_view() of the file where they are
/// read changed, evaluation_view() elsewhere. Files are opened, decoded and resampled by whoever reads them.
///
/// A file that cannot be read or decoded is named in a warning, once, and the sample is that of the next whole one.
/// When more than `max_corrupt` files of a part have turned out so, reading throws IoError. Throws UsageError for
/// fewer classes than folders, IoError for what list_parts() does and for too few images to have some to validate on.
DataSplits open_images(const std::string& directory, const ImagesOptions& options);

}  // namespace lockstep::data

// CIFAR-10: 60,000 photographs of 32 × 32 pixels (https://www.cs.toronto.edu/~kriz/cifar.html, "binary version").
#pragma once

#include <string>

#include "data/dataset.h"
#include "data/resample.h"

namespace lockstep::data {

inline constexpr int kCifar10Classes = 10;
/// Mean and standard deviation of the training pixels in [0, 1], over all images: fastai's cifar_stats and Composer's
/// CIFAR10_CHANNEL_MEAN and _STD have them too. (0.2023, 0.1994, 0.2010, also seen, are means of each image's own.)
inline constexpr Normalisation kCifar10 = {{0.4914f, 0.4822f, 0.4465f}, {0.2470f, 0.2435f, 0.2616f}};

/// Reads data_batch_1.bin … data_batch_5.bin and test_batch.bin from `directory`, or from cifar-10-batches-bin within:
/// records of a label and 32 × 32 bytes each of red, green and blue. A file may have any whole number of records.
/// Samples have dims {32, 32, 3}. Read changed, where `augment` says so, they are cropped at random out of an image
/// with four black pixels added on each side, and every other time mirrored. Throws IoError naming file and byte for
/// what is missing, cut or has a label of 10 or more. `classes` ≥ 10 is what the data sets report.
DataSplits open_cifar10(const std::string& directory, int classes, bool augment);

}  // namespace lockstep::data

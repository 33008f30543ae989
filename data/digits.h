// The 8×8 handwritten digits that come with the program (see digits/README.md).
#pragma once

#include <cstdint>
#include <span>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

inline constexpr int kDigitsClasses = 10;

/// The embedded file: records of 64 pixels (0 to 16) and a label.
std::span<const std::uint8_t> digits_file();

/// 1,437 training and 360 test samples (every fifth, from the first) of dims {8, 8, 1}, pixels in [0, 1].
/// `classes` ≥ 10 is what the data sets report.
DataSplits open_digits(int classes);

}  // namespace lockstep::data

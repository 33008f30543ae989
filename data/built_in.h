// Data that need no files: the handwritten digits that come with the program, and synthetic data.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

// The 8×8 handwritten digits (see digits/README.md).

inline constexpr int kDigitsClasses = 10;

/// The embedded file: records of 64 pixels (0 to 16) and a label.
std::span<const std::uint8_t> digits_file();

/// 1,437 training and 360 test samples (every fifth, from the first) of dims {8, 8, 1}, pixels in [0, 1].
/// `classes` ≥ 10 is what the data sets report; training mixes samples so.
DataSplits open_digits(int classes, const Mixing& mixing = {});

// Synthetic data: for benchmarks, and for trying a model before its data are available.

inline constexpr int kRandomClasses = 10;
inline constexpr int kRandomTokens = 256;

/// `length` training samples and max(1, length / 10) others to test on. The numbers are standard normal (65,536
/// equally likely values, none beyond ±4.33), the labels uniform in [0, classes) and unrelated to the numbers. Each
/// sample is a pure function of (seed, its index): every rank sees the same data and nothing is stored.
DataSplits make_random(const std::vector<std::int64_t>& dims, std::uint64_t length, int classes, std::uint64_t seed);

/// The same with samples of `context` tokens, uniform in [0, classes). A token's label is the one that follows.
DataSplits make_random_tokens(std::int64_t context, std::uint64_t length, int classes, std::uint64_t seed);

/// What open_data() takes for `length` random samples of these dims; none: of tokens.
std::string random_data(std::span<const std::int64_t> dims, std::uint64_t length);

}  // namespace lockstep::data

// Synthetic data: for benchmarks, and for trying a model before its data are available.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

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

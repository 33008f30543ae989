// What a model predicts of each sample of an evaluation, as a file.
#pragma once

#include <string>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/trainer/evaluate.h"

namespace lockstep::trainer {

/// Throws UsageError for a path that ends neither in .csv nor in .jsonl; and where samples of `dataset` have neither
/// one label nor one number to predict.
void check_predictions_path(const std::string& path);
void check_predictable(const data::Dataset& dataset);

/// A row, or a JSON object, for each sample: its name, truth and prediction, in the units of the data, and, of classes,
/// the probability of the prediction and, of kMostListed or fewer, of each. Throws IoError naming the file.
void write_predictions(const std::string& path, const data::Dataset& dataset, const SampleOutputs& samples);
inline constexpr int kMostListed = 100;

}  // namespace lockstep::trainer

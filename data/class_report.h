// A report of the data's classes for people, which shows mistakes in them.
#pragma once

#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

/// Whether each sample has one of a few classes: not those whose targets are numbers, or the tokens of a text.
bool has_classes(const Dataset& dataset);

/// "1800 samples of 3 classes: ant 600, bee 600, cow 600": names as far as there are any, of many classes the first,
/// with how many samples each has where that is known without reading them. "4262 samples" of data without classes.
std::string samples_text(const Dataset& dataset);

/// What is probably not meant, a line each: all samples are of one class; two names are one number (1 and 1.0); a class
/// of the training part that the validation part lacks.
std::vector<std::string> class_doubts(const DataSplits& splits);
/// Warns of them.
void warn_of_classes(const DataSplits& splits);

}  // namespace lockstep::data

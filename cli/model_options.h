// The flags that say which model, of what sizes, and with what weights: of the ranks of a job and of infer.
#pragma once

#include <string>

#include "cli/option_table.h"
#include "trainer/config.h"

namespace lockstep::cli {

/// What the help text says of sizes that are not given.
struct SizePresets {
  const char *hidden, *layers, *heads, *width, *context;
};

/// MODEL.
void add_model_name(OptionTable& table, trainer::ModelConfig& model);
/// --hidden of mlp, and what gpt and lstm have.
void add_model_sizes(OptionTable& table, trainer::ModelConfig& model, const SizePresets& presets);

/// Where --weights and how its names are read go.
struct WeightFile {
  std::string& file;
  bool &non_strict, &keep_prefix;
};
/// `help` goes before the formats.
void add_weight_file(OptionTable& table, const WeightFile& weights, const std::string& help);

}  // namespace lockstep::cli

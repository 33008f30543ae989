// table:PATH: the rows of tables as samples.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

/// --target, --ignore, --numeric, --categorical and --quotes.
std::vector<SettingSpec> table_settings();

/// table:PATH: a file, plain or compressed, or a folder of them, whose rows follow one another in the order of the
/// files' names. A folder with a train.csv or train.tsv is that file. Beside a file that is called train, val, dev or
/// test validates; otherwise every tenth row is for validation.
///
/// Without options.table the columns are found out from the training part: find_schema(). Samples are the numeric
/// columns (F), standardised, and, where there are any, the further input "categories" (K), i32. Targets are labels, or
/// numbers (1), standardised. Throws IoError naming file, line and remedy, UsageError for settings that fit no column,
/// or that weights say.
DataSplits open_table(const std::string& path, const OpenOptions& options);

}  // namespace lockstep::data

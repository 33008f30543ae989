// Where values of options come from. Command line > environment > config file > the target's own default.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/env.h"
#include "options/table.h"

namespace lockstep::options {

/// What parse_options reads. Tests fill it; the program takes `process_sources`.
struct Sources {
  std::vector<std::string> args;               // after the subcommand
  EnvLookup env;                               // the value of a variable
  std::vector<std::string> environment_names;  // all that start with LOCKSTEP_
};
Sources process_sources(std::vector<std::string> args);

/// Flag names and synonyms of other subcommands, and which one takes each. One config file or environment may
/// serve all of them, so such names are no mistakes there.
using ForeignFlags = std::map<std::string, std::string>;

/// LOCKSTEP_* variables that are no flags: messages between lockstep's own processes, and settings for tests.
bool is_reserved_variable(std::string_view name);

/// Adds --config, which every subcommand has; its value is read by parse_options. `path` becomes the file's.
void add_config_option(OptionTable& table);
void add_config_option(OptionTable& table, std::string& path);

struct ParsedOptions {
  bool help = false;                 // --help or -h stood there: nothing else was read, no setter ran
  std::vector<std::string> program;  // what follows "--"
  /// Of each option that was given, by its name: "command line", the environment variable's name, "run.toml:3".
  std::map<std::string, std::string> places = {};
};

/// Hands each value to its setter, the strongest source's once per option. Throws UsageError, naming the flag and the
/// source (the command line, the environment variable, file and line), for unknown, repeated, valueless, contradicting
/// and unparsable flags and for surplus or missing positionals.
ParsedOptions parse_options(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign = {});

}  // namespace lockstep::options

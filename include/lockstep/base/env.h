// The only place that reads the environment; and the name of this machine, which it can override.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// The value of environment variable `name`; nothing when unset. An empty value is a value.
std::optional<std::string> env(const std::string& name);

/// Looks a variable up: `env` in the program, a map in tests. Functions that take one call it before they return, and
/// keep none.
using EnvLookup = std::function<std::optional<std::string>(const std::string&)>;

/// The names of all variables that start with `prefix`.
std::vector<std::string> env_names(const std::string& prefix);

/// Sets `name` for this process and its children. Keeps an existing value unless `overwrite`. This and unset_env() are
/// for the time before threads start: env() reads without a lock.
void set_env(const std::string& name, const std::string& value, bool overwrite = true);
void unset_env(const std::string& name);

/// LOCKSTEP_HOST_NAME in the environment; else this machine's name, without its domain; "unknown" if it has none.
std::string host_name();

}  // namespace lockstep

// The rules that hold for all modules' sources, checked by reading them.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace lockstep::layering {

using Dependencies = std::map<std::string, std::set<std::string>>;  // module → modules whose headers it may include

/// What docs/design.md allows; no module may declare more.
const Dependencies& allowed_dependencies();

/// From lines "module: seen seen …", as the build writes them.
Dependencies parse_dependencies(const std::string& text);

/// Each returns one line per violation, "file:line: what"; nothing if the rule holds.
/// Declared dependencies, each module once, within the allowed ones.
std::vector<std::string> undeclarable_dependencies(const Dependencies& declared);
/// Includes of headers of modules that the including module has not declared, and includes not written from the root.
std::vector<std::string> undeclared_includes(const std::filesystem::path& root, const Dependencies& declared);
/// Includes of public headers, which programs elsewhere read, of anything but the standard library and each other; and
/// of bindings/, which programs elsewhere compile. Those that adapt a library include its headers besides.
std::vector<std::string> foreign_includes(const std::filesystem::path& root);
/// getenv outside base/env.cpp.
std::vector<std::string> stray_getenv(const std::filesystem::path& root);
/// The library that reads JSON elsewhere than in base/json_value.h: it takes seconds to compile.
std::vector<std::string> stray_json(const std::filesystem::path& root);
/// Preprocessor conditions on CUDA, NCCL or MPI: a missing backend is another file, not another branch.
std::vector<std::string> backend_conditions(const std::filesystem::path& root);
/// Code and build files outside tests/ of more than `most` lines.
std::vector<std::string> long_files(const std::filesystem::path& root, std::size_t most);

/// Text literals that have one of `names` as a word, in modules; `own` are the folders and files that may: the
/// families'. Names that are words of English too (`words`) count where something is compared with them alone.
std::vector<std::string> names_elsewhere(const std::filesystem::path& root, const std::set<std::string>& names,
                                         const std::set<std::string>& words, const std::vector<std::string>& own);

/// Text literals "LOCKSTEP_…" of the modules other than cli and options: environment variables that are no flags.
std::set<std::string> variables_in_modules(const std::filesystem::path& root);

}  // namespace lockstep::layering

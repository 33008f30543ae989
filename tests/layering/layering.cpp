#include "tests/layering/layering.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <regex>
#include <sstream>

#include "base/text.h"

namespace lockstep::layering {
namespace fs = std::filesystem;
namespace {

struct SourceLine {
  std::string module;  // or another directory at the root
  std::string file;    // relative to the root
  std::size_t number = 0;
  std::string text;

  std::string at() const { return fmt::format("{}:{}", file, number); }
};

constexpr const char* kMpiHeader = "include/lockstep/comm/mpi.h";  // what takes a program's own communicator
constexpr const char* kCHeader = "include/lockstep/lockstep.h";
constexpr const char* kPublic = "include/lockstep";  // the public headers of MODULE are in kPublic/MODULE

bool is_code(const fs::path& path) {
  static const std::set<std::string> kExtensions = {".h", ".cpp", ".cu", ".cuh", ".in"};
  return kExtensions.contains(path.extension());
}

bool is_build_file(const fs::path& path) { return path.extension() == ".cmake" || path.filename() == "CMakeLists.txt"; }

std::vector<std::string> lines_of(const fs::path& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::vector<fs::path> files_under(const fs::path& directory) {
  std::vector<fs::path> files;
  if (!fs::exists(directory)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

std::vector<std::string> modules() {
  std::vector<std::string> names;
  for (const auto& [module, seen] : allowed_dependencies()) names.push_back(module);
  return names;
}

void for_each_line(const fs::path& root, const std::vector<std::string>& directories,
                   const std::function<void(const SourceLine&)>& visit) {
  for (const auto& directory : directories) {
    auto files = files_under(root / directory);
    std::ranges::copy(files_under(root / kPublic / directory), std::back_inserter(files));
    for (const auto& path : files) {
      if (!is_code(path)) continue;
      SourceLine line{.module = directory, .file = path.lexically_relative(root), .number = 0, .text = {}};
      for (auto& text : lines_of(path)) {
        ++line.number;
        line.text = std::move(text);
        visit(line);
      }
    }
  }
}

/// "if", and what follows it, for a line "#  if …"; nothing for lines that are no directive.
std::optional<std::string> directive(const std::string& text) {
  const auto stripped = trim(text);
  if (!stripped.starts_with('#')) return std::nullopt;
  return std::string(trim(stripped.substr(1)));
}

/// The file that a line includes, and whether in quotes.
struct Included {
  std::string header;
  bool quoted = false;
};
std::optional<Included> included(const std::string& text) {
  const auto include = directive(text);
  if (!include || !include->starts_with("include")) return std::nullopt;
  const auto open = include->find_first_of("\"<");
  if (open == std::string::npos) return std::nullopt;
  return Included{include->substr(open + 1, include->find_first_of("\">", open + 1) - open - 1),
                  (*include)[open] == '"'};
}

/// What is compiled by its users against a library of theirs, in include/lockstep/NAME and bindings/NAME.
struct Adapter {
  std::string name;
  std::string headers;  // the folder of the library's headers
  std::string parts;    // that of its inner ones, for bindings/NAME alone
};
const std::vector<Adapter>& adapted_libraries() {
  static const std::vector<Adapter> kAdapters = {{"torch", "torch", "c10"}, {"c10d", "torch", "c10"}};
  return kAdapters;
}

/// Where what is compiled by their users lies.
std::vector<std::string> adapters() {
  std::vector<std::string> all;
  for (const auto& adapter : adapted_libraries()) all.push_back("bindings/" + adapter.name);
  return all;
}

std::string without_comment(const std::string& text) { return text.substr(0, text.find("//")); }

}  // namespace

const Dependencies& allowed_dependencies() {
  static const Dependencies kAllowed = {
      {"base", {}},
      {"comm", {"base", "devices"}},
      {"sampler", {"base"}},
      {"nn", {"base"}},
      {"parallel", {"base", "nn", "ddp", "comm"}},
      {"launcher", {"base"}},
      {"devices", {"base"}},
      {"doctor", {"base", "comm", "devices"}},
      {"data", {"base", "sampler"}},
      {"ddp", {"base", "comm"}},
      {"bindings", {"base", "comm", "ddp"}},
      {"options", {"base"}},
      {"plot", {"base"}},
      {"simulate", {"base", "comm", "ddp", "options", "plot"}},
      {"report", {"base", "launcher", "options", "plot"}},
      {"session", {"base", "options", "nn", "comm", "devices"}},
      {"checkpoint", {"base", "options", "nn", "data", "sampler"}},
      {"inference", {"base", "options", "nn", "data", "session", "checkpoint", "comm", "devices"}},
      {"trainer", {"base", "options", "nn", "parallel", "ddp", "data", "sampler", "comm", "session", "checkpoint"}},
      {"bench",
       {"base", "nn", "parallel", "ddp", "data", "sampler", "comm", "devices", "plot", "report", "session", "simulate",
        "trainer"}},
      {"cli",
       {"base", "bench", "doctor", "comm", "sampler", "nn", "options", "parallel", "launcher", "data", "ddp", "devices",
        "session", "simulate", "checkpoint", "inference", "report", "trainer"}},
  };
  return kAllowed;
}

Dependencies parse_dependencies(const std::string& text) {
  Dependencies dependencies;
  for (const auto& line : split(text, '\n')) {
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    auto& seen = dependencies[line.substr(0, colon)];
    std::istringstream words(line.substr(colon + 1));
    for (std::string word; words >> word;) seen.insert(word);
  }
  return dependencies;
}

std::vector<std::string> undeclarable_dependencies(const Dependencies& declared) {
  std::vector<std::string> found;
  for (const auto& module : modules()) {
    if (!declared.contains(module)) found.push_back(module + ": the build declares no such module");
  }
  for (const auto& [module, seen] : declared) {
    const auto allowed = allowed_dependencies().find(module);
    if (allowed == allowed_dependencies().end()) {
      found.push_back(module + ": no such module in the layering");
      continue;
    }
    for (const auto& other : seen) {
      if (!allowed->second.contains(other)) found.push_back(fmt::format("{}: may not see {}", module, other));
    }
  }
  return found;
}

std::vector<std::string> undeclared_includes(const fs::path& root, const Dependencies& declared) {
  std::vector<std::string> found;
  for_each_line(root, modules(), [&](const SourceLine& line) {
    const auto include = included(line.text);
    if (!include) return;
    // Those include public headers alone: foreign_includes().
    if (std::ranges::any_of(adapters(), [&](const auto& adapter) { return line.file.starts_with(adapter + "/"); }))
      return;
    const bool is_public = include->header.starts_with("lockstep/");
    const std::string header = include->header.substr(is_public ? std::string("lockstep/").size() : 0);
    const std::string other = header.substr(0, header.find('/'));
    const bool is_module = header.find('/') != std::string::npos && allowed_dependencies().contains(other);
    if (!is_module) {
      if (include->quoted)
        found.push_back(fmt::format("{}: {} is not included from the root", line.at(), include->header));
      return;
    }
    const auto own = declared.find(line.module);
    if (other != line.module && (own == declared.end() || !own->second.contains(other)))
      found.push_back(fmt::format("{}: {} has not declared that it sees {}", line.at(), line.module, other));
  });
  return found;
}

std::vector<std::string> foreign_includes(const fs::path& root) {
  std::vector<std::string> found;
  std::vector<std::string> directories = adapters();
  directories.insert(directories.begin(), kPublic);
  for_each_line(root, directories, [&](const SourceLine& line) {
    const auto include = included(line.text);
    if (!include) return;
    const bool standard = !include->quoted && include->header.find_first_of("./") == std::string::npos;
    if (line.file == kMpiHeader && include->header == "mpi.h") return;
    if (line.file == kCHeader && (include->header == "stddef.h" || include->header == "stdint.h")) return;
    // Adapters are compiled by their users, and include the headers of the adapted library, which the users have.
    const bool adapted = std::ranges::any_of(adapted_libraries(), [&](const Adapter& adapter) {
      const std::string own = fmt::format("bindings/{}/", adapter.name);
      const bool binds = line.file.starts_with(own);
      const bool at_home = binds || line.file.starts_with(fmt::format("{}/{}/", kPublic, adapter.name));
      return include->quoted ? binds && include->header.starts_with(own)
                             : (at_home && include->header.starts_with(adapter.headers + "/")) ||
                                   (binds && include->header.starts_with(adapter.parts + "/"));
    });
    if (!standard && !adapted && !(include->quoted && include->header.starts_with("lockstep/")))
      found.push_back(
          fmt::format("{}: {} is neither the standard library's nor a public header", line.at(), include->header));
  });
  return found;
}

std::vector<std::string> stray_getenv(const fs::path& root) {
  std::vector<std::string> found;
  auto directories = modules();
  directories.emplace_back("examples");
  for_each_line(root, directories, [&](const SourceLine& line) {
    if (line.file != "base/env.cpp" && without_comment(line.text).find("getenv") != std::string::npos)
      found.push_back(line.at() + ": getenv; base/env.h reads the environment");
  });
  return found;
}

std::vector<std::string> stray_json(const fs::path& root) {
  std::vector<std::string> found;
  for_each_line(root, modules(), [&](const SourceLine& line) {
    if (line.file != "base/json_value.h" && without_comment(line.text).find("nlohmann/json.hpp") != std::string::npos)
      found.push_back(line.at() + ": nlohmann/json.hpp; base/json.h writes JSON, base/json_value.h reads it");
  });
  return found;
}

std::vector<std::string> backend_conditions(const fs::path& root) {
  std::vector<std::string> found;
  for_each_line(root, modules(), [&](const SourceLine& line) {
    const auto condition = directive(without_comment(line.text));
    if (!condition || !(condition->starts_with("if") || condition->starts_with("elif"))) return;
    for (const char* backend : {"CUDA", "NCCL", "MPI"}) {
      if (condition->find(backend) != std::string::npos)
        found.push_back(fmt::format("{}: a condition on {}; write a file for builds without it", line.at(), backend));
    }
  });
  return found;
}

std::vector<std::string> long_files(const fs::path& root, std::size_t most) {
  std::vector<std::string> found;
  auto directories = modules();
  directories.insert(directories.end(), {"bench", "examples", "cmake", "scripts", "docker"});
  for (const auto& directory : directories) {
    for (const auto& path : files_under(root / directory)) {
      if (!is_code(path) && !is_build_file(path) && directory != "scripts") continue;
      if (const auto lines = lines_of(path).size(); lines > most)
        found.push_back(fmt::format("{}: {} lines, at most {}", path.lexically_relative(root).string(), lines, most));
    }
  }
  return found;
}

std::vector<std::string> names_elsewhere(const fs::path& root, const std::set<std::string>& names,
                                         const std::set<std::string>& words, const std::vector<std::string>& own) {
  std::vector<std::string> found;
  const std::regex literal("\"(?:[^\"\\\\]|\\\\.)*\"");
  for_each_line(root, modules(), [&](const SourceLine& line) {
    if (std::ranges::any_of(own, [&](const auto& place) { return line.file.starts_with(place); })) return;
    const std::string code = without_comment(line.text);
    if (directive(code)) return;
    for (std::sregex_iterator at(code.begin(), code.end(), literal), end; at != end; ++at) {
      const std::string before = at->prefix();
      const bool compared = before.ends_with("== ") || before.ends_with("!= ") || before.ends_with("starts_with(");
      for (const auto& name : names) {
        if (at->str().find(name) == std::string::npos || (words.contains(name) && !compared)) continue;
        if (std::regex_search(at->str(), std::regex("(^|[^A-Za-z0-9_/-])" + name + "([^A-Za-z0-9_-]|$)")))
          found.push_back(fmt::format("{}: {} knows '{}' by its name", line.at(), at->str(), name));
      }
    }
  });
  return found;
}

std::set<std::string> variables_in_modules(const fs::path& root) {
  std::set<std::string> found;
  auto others = modules();
  std::erase(others, "cli");
  std::erase(others, "options");
  for_each_line(root, others, [&](const SourceLine& line) {
    const std::string_view mark = "\"LOCKSTEP_";
    for (auto at = line.text.find(mark); at != std::string::npos; at = line.text.find(mark, at + 1)) {
      const auto end = line.text.find_first_of("\"=", at + 1);
      found.insert(line.text.substr(at + 1, end - at - 1));
    }
  });
  return found;
}

}  // namespace lockstep::layering

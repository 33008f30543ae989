// A command line: the input's lines are its words. Those after an empty line are variables, NAME=VALUE.
#include "base/text.h"
#include "options/sources.h"
#include "options/values.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::options;
  Sources sources;
  std::map<std::string, std::string> variables;
  bool words = true;
  for (const std::string& line : lockstep::split(lockstep::fuzz::text_of(data, size), '\n')) {
    if (line.find('\0') != std::string::npos) return 0;  // no process can be given such a word
    if (line.empty()) {
      words = false;
    } else if (words) {
      if (line.find("onfig") != std::string::npos) return 0;  // would read any file
      sources.args.push_back(line);
    } else {
      const auto equals = line.find('=');
      if (line.starts_with("LOCKSTEP_CONFIG") || equals == std::string::npos) return 0;
      variables["LOCKSTEP_" + line.substr(0, equals)] = line.substr(equals + 1);
    }
  }
  for (const auto& [name, value] : variables) sources.environment_names.push_back(name);
  sources.env = [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  return lockstep::fuzz::parse([&] {
    std::string word, model;
    int batch = 0;
    bool quiet = false;
    lockstep::Settings settings;
    const lockstep::SettingSpec hidden = {.name = "hidden", .fallback = {3}, .help = "", .low = 1, .high = 99};
    OptionTable table("train", "Trains.");
    table.positional({"MODEL", "a model", lockstep::options::text(model)});
    table.add({.name = "data", .placeholder = "DATA", .value = lockstep::options::text(word)});
    table.add({.name = "batch", .synonyms = {"b"}, .placeholder = "B", .value = integer(batch, 1, 1000)});
    table.add({.name = "quiet", .kind = OptionKind::kFlag, .value = boolean(quiet)});
    table.add({.name = "hidden",
               .kind = OptionKind::kList,
               .placeholder = "N,…",
               .value = setting(settings, hidden),
               .applies = {.to = "others",
                           .unless = [&]() -> std::optional<std::string> {
                             if (batch > 1) return "this is another";
                             return std::nullopt;
                           },
                           .forget = [] {}}});
    table.add({.name = "export",
               .kind = OptionKind::kRepeatable,
               .placeholder = "NAME,…",
               .value = lockstep::options::text(word)});
    table.exclusive({"batch", "hidden"});
    table.exclusive({"quiet", "data"});
    parse_options(table, sources, {{"hosts", "launch"}});
  });
}

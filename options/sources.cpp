#include "options/sources.h"

#define CXXOPTS_NO_REGEX true  // its regular expressions overflow the stack on very long arguments
#include <fmt/format.h>
#include <toml++/toml.h>
#include <cxxopts.hpp>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "options/table.h"
#include "options/values.h"

namespace lockstep::options {
namespace {

constexpr std::array kReservedVariables = {
    "LOCKSTEP_CHECKPOINT_STEP", "LOCKSTEP_ATTEMPT",    "LOCKSTEP_STATUS_FD",     "LOCKSTEP_BIND",
    "LOCKSTEP_SHM_SOCKETS",     "LOCKSTEP_FLIGHT_DIR", "LOCKSTEP_HOST_NAME",     "LOCKSTEP_JOB",
    "LOCKSTEP_JOB_SECRET",      "LOCKSTEP_LAUNCHER",   "LOCKSTEP_LISTEN",        "LOCKSTEP_MEETING",
    "LOCKSTEP_PRELOAD",         "LOCKSTEP_SHM",        "LOCKSTEP_SOCKET_IFNAME", "LOCKSTEP_STATUS",
    "LOCKSTEP_TMPDIR",          "LOCKSTEP_TTY",        "LOCKSTEP_RESTART_CAUSE", "LOCKSTEP_STATUS_TOKEN",
    "LOCKSTEP_IN_PLACE",        "LOCKSTEP_SPARE",
};
constexpr std::string_view kReservedPrefix = "LOCKSTEP_TEST_";

constexpr const char* kTyped = "command line";

/// A value and where it stood, as error messages say it: "--lr fast on the command line".
struct Given {
  std::string value;
  std::string origin;
  std::string place = {};  // ParsedOptions::places
  bool typed() const { return place == kTyped; }
};
using Values = std::map<std::string, Given>;  // by canonical name

std::string shortened(std::string_view value) {
  constexpr std::size_t kLongest = 60;
  return value.size() <= kLongest ? std::string(value) : std::string(utf8_prefix(value, kLongest)) + "…";
}

/// "did you mean --batch?", with the candidates as people write them in this source.
std::string suggestion(const OptionTable& table, std::string_view name, std::string (*spelling)(std::string_view)) {
  const auto close = nearest(with_dashes(name), table.names());
  if (!close) return fmt::format("{} --help lists them all", table.command());
  return fmt::format("did you mean {}?", spelling(table.find(*close)->name));
}

std::string as_flag(std::string_view name) { return fmt::format("--{}", name); }
std::string as_key(std::string_view name) { return std::string(name); }

[[noreturn]] void fail_unmatched(const OptionTable& table, const ForeignFlags& foreign, const std::string& word) {
  if (word.starts_with("--")) {
    const std::string name = word.substr(2, word.find('=') - 2);
    if (const auto owner = foreign.find(name); owner != foreign.end())
      throw UsageError(fmt::format("unknown flag --{} on the command line: {} has none", name, table.command()),
                       fmt::format("it is a flag of lockstep {}", owner->second));
    throw UsageError(fmt::format("unknown flag --{} on the command line", shortened(name)),
                     suggestion(table, name, as_flag));
  }
  const auto& positionals = table.positionals();
  std::string remedy = positionals.empty()
                           ? fmt::format("{} takes flags only", table.command())
                           : fmt::format("{} takes one {}", table.command(), positionals.back().placeholder);
  if (table.program_words() == kProgramWords) remedy = "put -- before the program and its arguments";
  throw UsageError(fmt::format("unexpected argument '{}'", shortened(word)), remedy);
}

/// A word that asks for what is done anyway is let pass.
void check_elsewhere(const OtherProgramsFlag& flag, const std::string& word) {
  const std::size_t equals = std::min(word.find('='), word.size());
  const std::string value = word.substr(std::min(equals + 1, word.size()));
  if (flag.is_done_anyway && flag.is_done_anyway(value)) return;
  throw UsageError(fmt::format("{}{}{} on the command line: {}", word.substr(0, equals), value.empty() ? "" : " ",
                               shortened(value), flag.why),
                   flag.remedy);
}

/// Reads the words; positionals go to `arguments` in their order.
Values read_command_line(const OptionTable& table, const ForeignFlags& foreign, const std::vector<std::string>& words,
                         std::vector<std::string>& arguments) {
  cxxopts::Options parser("lockstep");
  parser.allow_unrecognised_options();
  // With an implicit value the parser never takes the following word: normalise() has joined the ones that belong.
  for (const auto& option : table.options())
    parser.add_options()(option.name, "",
                         cxxopts::value<std::string>()->implicit_value(option.kind == OptionKind::kFlag ? "true" : ""));
  std::vector<const char*> argv = {"lockstep"};
  for (const auto& word : words) argv.push_back(word.c_str());
  const auto result = parser.parse(static_cast<int>(argv.size()), argv.data());

  for (const auto& word : result.unmatched()) {
    if (word.starts_with("--"))
      if (const auto* const elsewhere = table.find_elsewhere(word.substr(2, word.find('=') - 2))) {
        check_elsewhere(*elsewhere, word);
        continue;
      }
    const auto& positionals = table.positionals();
    const bool repeats = !positionals.empty() && positionals.back().repeats;
    if (word.starts_with("--") || (arguments.size() == positionals.size() && !repeats))
      fail_unmatched(table, foreign, word);
    arguments.push_back(word);
  }
  Values values;
  for (const auto& argument : result.arguments()) {
    const auto* option = table.find(argument.key());
    const bool bare = argument.value().empty() || (option->kind == OptionKind::kFlag && argument.value() == "true");
    const std::string typed = "--" + option->name + (bare ? "" : " " + shortened(argument.value()));
    const auto [at, first] =
        values.try_emplace(option->name, Given{argument.value(), typed + " on the command line", kTyped});
    if (first) continue;
    if (option->kind != OptionKind::kRepeatable)
      throw UsageError(option->kind == OptionKind::kFlag
                           ? fmt::format("--{} is given twice on the command line", option->name)
                           : fmt::format("--{} is given twice on the command line, as {} and {}", option->name,
                                         shortened(at->second.value), shortened(argument.value())),
                       option->kind == OptionKind::kList ? "give one list, with commas" : "keep one of them");
    at->second.value += "," + argument.value();
  }
  return values;
}

Values read_environment(const OptionTable& table, const ForeignFlags& foreign, const Sources& sources) {
  Values values;
  std::map<std::string, std::string> set_by;  // canonical name → variable
  for (const auto& variable : sources.environment_names) {
    if (is_reserved_variable(variable)) continue;
    const std::string name = lower_case(variable.substr(std::string_view("LOCKSTEP_").size()));
    const Option* option = table.find(name);
    if (option == nullptr && foreign.contains(with_dashes(name))) continue;
    if (option == nullptr)
      throw UsageError(
          fmt::format("environment variable {} matches no flag", shortened(variable)),
          fmt::format("{}; unset it if it is not meant for lockstep", suggestion(table, name, environment_name)));
    const auto value = sources.env(variable).value_or("");
    if (const auto [at, first] = set_by.try_emplace(option->name, variable); !first)
      throw UsageError(fmt::format("environment variables {} and {} both set --{}", at->second, variable, option->name),
                       "unset one of them");
    values[option->name] = {value, fmt::format("{}={} in the environment", variable, shortened(value)), variable};
  }
  return values;
}

/// The text that a TOML value would have on a command line; nothing for dates and tables.
std::optional<std::string> text_of(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  const auto* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  std::vector<std::string> items;
  for (const auto& item : *array) {
    auto text = item.is_array() ? std::nullopt : text_of(item);
    if (!text) return std::nullopt;
    items.push_back(std::move(*text));
  }
  return join(items, ",");
}

std::string_view wanted_by(const Option& option) {
  return option.kind == OptionKind::kFlag ? "true or false" : std::string_view(option.placeholder);
}

constexpr const char* kWanted = "--config takes a small TOML file";

toml::table parse_file(const std::string& path) {
  constexpr std::size_t kLargest = 1 << 20;
  const auto refuse = [&](const std::string& why, const std::string& remedy = kWanted) {
    throw UsageError(fmt::format("cannot read config file {}: {}", path, why), remedy);
  };
  RegularFile file = open_regular(path);
  if (!file.problem.empty()) refuse(file.problem, file.remedy_or(kWanted));
  std::string text(kLargest + 1, '\0');
  std::size_t length = 0;
  const std::string problem = file.read(std::as_writable_bytes(std::span(text)), length);
  if (!problem.empty()) refuse(problem);
  if (length > kLargest) refuse("it is larger than 1 MiB");
  text.resize(length);
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    throw UsageError(fmt::format("{}:{}: {}", path, error.source().begin.line, error.description()),
                     "write one \"flag-name = value\" per line; text values stand in quotes");
  }
}

Values read_config_file(const OptionTable& table, const ForeignFlags& foreign, const std::string& path) {
  Values values;
  for (const auto& [key, node] : parse_file(path)) {
    const std::string place = fmt::format("{}:{}", path, key.source().begin.line);
    const Option* option = table.find(key.str());
    if (option == nullptr && foreign.contains(with_dashes(key.str()))) continue;
    if (option == nullptr)
      throw UsageError(
          fmt::format("{}: unknown key {}", place, shortened(key.str())),
          node.is_table() ? "flags stand at the top level, outside of tables" : suggestion(table, key.str(), as_key));
    if (option->name == "config")
      throw UsageError(place + ": a config file cannot name another one", "remove the line");
    const auto text = text_of(node);
    if (!text)
      throw UsageError(fmt::format("{}: {} is neither text, number, true/false nor a list of them", place, key.str()),
                       fmt::format("give {}", wanted_by(*option)));
    if (node.is_array() && option->kind != OptionKind::kList && option->kind != OptionKind::kRepeatable)
      throw UsageError(fmt::format("{}: {} is a list, and --{} takes one value", place, key.str(), option->name),
                       fmt::format("give {}, without brackets", wanted_by(*option)));
    if (!values
             .try_emplace(option->name,
                          Given{*text, fmt::format("{}: {} = {}", place, key.str(), shortened(*text)), place})
             .second)
      throw UsageError(fmt::format("{}: {} sets --{} a second time", place, key.str(), option->name),
                       "keep one of the spellings");
  }
  return values;
}

/// --quiet=false asks for nothing.
bool is_switched_off(const OptionTable& table, const std::string& name, const Given& given) {
  bool on = true;
  return table.find(name)->kind == OptionKind::kFlag && !parse_bool(given.value, on) && !on;
}

/// Puts into `values` what a weaker source says and no stronger one has spoken about.
void add_weaker(const OptionTable& table, Values& values, const Values& weaker) {
  const Values stronger = values;
  for (const auto& [name, given] : weaker) {
    const auto others = table.excluded_by(name);
    const bool silenced = std::ranges::any_of(others, [&](const std::string& other) {
      const auto at = stronger.find(other);
      return at != stronger.end() && !is_switched_off(table, other, at->second);
    });
    if (!silenced) values.try_emplace(name, given);
  }
}

void check_exclusive(const OptionTable& table, const Values& values) {
  for (const auto& [name, given] : values) {
    if (is_switched_off(table, name, given)) continue;
    for (const auto& other : table.excluded_by(name)) {
      if (const auto at = values.find(other); at != values.end() && !is_switched_off(table, other, at->second))
        throw UsageError(
            fmt::format("--{} and --{} exclude each other ({}; {})", name, other, given.origin, at->second.origin),
            "keep one of them");
    }
  }
}

/// What was given and would change nothing is refused, with the place where it stood.
void check_applicability(const OptionTable& table, const Values& values) {
  for (const auto& option : table.options()) {
    const auto given = values.find(option.name);
    if (given == values.end()) continue;
    const auto complaint = inapplicable(option);
    if (!complaint) continue;
    if (option.applies.forget && !given->second.typed())
      option.applies.forget();
    else
      throw UsageError(fmt::format("{}: {}", given->second.origin, complaint->what), complaint->remedy);
  }
}

void apply(const Setter& set, const Given& given, std::string_view wanted) {
  if (given.value.empty())
    throw UsageError(fmt::format("{}: the value is missing", given.origin), fmt::format("give {}", wanted));
  if (auto complaint = set(given.value))
    throw UsageError(fmt::format("{}: {}", given.origin, complaint->what), complaint->remedy);
}

}  // namespace

Sources process_sources(std::vector<std::string> args) { return {std::move(args), env, env_names("LOCKSTEP_")}; }

bool is_reserved_variable(std::string_view name) {
  return std::ranges::find(kReservedVariables, name) != kReservedVariables.end() || name.starts_with(kReservedPrefix);
}

namespace {

void add_config_option(OptionTable& table, Binding value) {
  table.add(
      {.name = "config", .placeholder = "FILE", .help = "TOML file with values for flags", .value = std::move(value)});
}

}  // namespace

void add_config_option(OptionTable& table) {
  add_config_option(table, [](const std::string&) { return std::nullopt; });
}

void add_config_option(OptionTable& table, std::string& path) { add_config_option(table, text(path)); }

ParsedOptions parse_options(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign) {
  auto normalised = normalise(table, sources.args);
  if (std::ranges::any_of(normalised.words, [](const auto& word) { return word == "--help" || word == "--h"; }))
    return {.help = true, .program = {}};

  std::vector<std::string> arguments;
  Values values = read_command_line(table, foreign, normalised.words, arguments);
  if (normalised.has_program && !table.accepts_program())
    throw UsageError(fmt::format("{} takes no program after --", table.command()), "remove the --");
  check_exclusive(table, values);

  const Values from_environment = read_environment(table, foreign, sources);
  check_exclusive(table, from_environment);
  add_weaker(table, values, from_environment);

  if (const auto config = values.find("config"); config != values.end()) {
    if (config->second.value.empty()) apply({}, config->second, "FILE");
    const Values from_file = read_config_file(table, foreign, config->second.value);
    check_exclusive(table, from_file);
    add_weaker(table, values, from_file);
  }

  for (const auto& option : table.options()) {
    if (const auto at = values.find(option.name); at != values.end())
      apply(option.value.set, at->second, wanted_by(option));
  }
  for (std::size_t i = 0; i < std::max(table.positionals().size(), arguments.size()); ++i) {
    const auto& positional = table.positionals()[std::min(i, table.positionals().size() - 1)];
    if (i >= arguments.size())
      throw UsageError(fmt::format("{} needs a {}", table.command(), positional.placeholder),
                       fmt::format("{}", positional.help));
    apply(positional.value.set, {arguments[i], fmt::format("{} {}", positional.placeholder, shortened(arguments[i]))},
          positional.placeholder);
  }
  check_applicability(table, values);
  ParsedOptions parsed{.help = false, .program = std::move(normalised.program)};
  for (const auto& [name, given] : values) parsed.places[name] = given.place;
  return parsed;
}

}  // namespace lockstep::options

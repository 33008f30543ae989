#include "options/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::options {
namespace {

constexpr int kWidth = 100;
constexpr int kHelpColumn = 34;

/// `text` broken at spaces; lines after the first start with `indent` spaces.
std::string paragraph(std::string_view text, int indent) {
  const std::string next = "\n" + std::string(static_cast<std::size_t>(indent), ' ');
  return join(wrapped(text, kWidth - indent), next) + "\n";
}

std::string row(std::string left, std::string_view help) {
  left.insert(0, "  ");
  // Of many choices the last ones stand below the first.
  if (columns_of(left) > kWidth) {
    const std::size_t last = left.rfind('|', kWidth - 1);
    if (last != std::string::npos)
      left.insert(last + 1, "\n" + std::string(std::min(left.find(' ', 2) + 1, last), ' '));
  }
  if (const int used = columns_of(left); used + 2 > kHelpColumn)
    left += "\n" + std::string(kHelpColumn, ' ');
  else
    left.append(static_cast<std::size_t>(kHelpColumn - used), ' ');
  return left + paragraph(help, kHelpColumn);
}

std::string dashed(const std::string& name) { return fmt::format("{}{}", name.size() == 1 ? "-" : "--", name); }

std::string spellings(const Option& option) {
  std::string text;
  for (const auto& synonym : option.synonyms) {
    if (synonym.size() == 1) text += dashed(synonym) + ", ";
  }
  text += dashed(option.name);
  return option.placeholder.empty() ? text : text + " " + option.placeholder;
}

std::string description(const Option& option) {
  std::string text = option.help;
  if (!option.default_text.empty()) text += fmt::format(" (default {})", option.default_text);
  std::vector<std::string> longer;
  for (const auto& synonym : option.synonyms) {
    if (synonym.size() > 1) longer.push_back(dashed(synonym));
  }
  if (!longer.empty()) text += fmt::format("; also {}", join(longer, ", "));
  return text;
}

}  // namespace

OptionTable::OptionTable(std::string subcommand, std::string about)
    : subcommand_(std::move(subcommand)), command_("lockstep " + subcommand_), about_(std::move(about)) {}

void OptionTable::group(std::string title) { groups_.push_back({std::move(title), options_.size()}); }

void OptionTable::add(Option option) {
  LOCKSTEP_ASSERT(option.name.size() >= 2 && option.value.set, "option {}", option.name);
  LOCKSTEP_ASSERT(find(option.name) == nullptr, "option {} is declared twice", option.name);
  for (const auto& synonym : option.synonyms)
    LOCKSTEP_ASSERT(find(synonym) == nullptr, "synonym {} of {} is taken", synonym, option.name);
  options_.push_back(std::move(option));
}

void OptionTable::add(OtherProgramsFlag flag) {
  for (const auto& name : flag.names)
    LOCKSTEP_ASSERT(find(name) == nullptr && find_elsewhere(name) == nullptr, "flag {} is declared twice", name);
  elsewhere_.push_back(std::move(flag));
}

void OptionTable::positional(Positional positional) { positionals_.push_back(std::move(positional)); }

void OptionTable::exclusive(std::vector<std::string> names) {
  for (const auto& name : names) LOCKSTEP_ASSERT(find(name) != nullptr, "exclusive names an unknown option {}", name);
  exclusive_.push_back(std::move(names));
}

void OptionTable::become_program(std::string program, std::string about, const std::set<std::string>& without) {
  command_ = std::move(program);
  about_ = std::move(about);
  positionals_.clear();
  for (std::size_t i = options_.size(); i-- > 0;) {
    if (!without.contains(options_[i].name)) continue;
    options_.erase(options_.begin() + static_cast<std::ptrdiff_t>(i));
    for (auto& group : groups_)
      if (group.first > i) --group.first;
  }
}

std::optional<Complaint> inapplicable(const Option& option) {
  if (!option.applies.unless || (option.value.asked && !option.value.asked())) return std::nullopt;
  const auto instead = option.applies.unless();
  if (!instead) return std::nullopt;
  return Complaint{fmt::format("it applies to {}, and {}", option.applies.to, *instead), option.applies.remedy};
}

void OptionTable::check() const {
  for (const auto& option : options_) {
    if (const auto complaint = option.value.check ? option.value.check() : std::nullopt)
      throw UsageError(fmt::format("--{} {}: {}", option.name, option.value.text(), complaint->what),
                       complaint->remedy);
  }
  for (const auto& option : options_)
    if (const auto complaint = inapplicable(option))
      throw UsageError(fmt::format("--{}: {}", option.name, complaint->what), complaint->remedy);
}

const Option* OptionTable::find(std::string_view name) const {
  const std::string plain = with_dashes(name);
  for (const auto& option : options_) {
    if (option.name == plain || std::ranges::find(option.synonyms, plain) != option.synonyms.end()) return &option;
  }
  return nullptr;
}

const OtherProgramsFlag* OptionTable::find_elsewhere(std::string_view name) const {
  const std::string plain = with_dashes(name);
  for (const auto& flag : elsewhere_)
    if (std::ranges::find(flag.names, plain) != flag.names.end()) return &flag;
  return nullptr;
}

std::vector<std::string> OptionTable::names() const {
  std::vector<std::string> names;
  for (const auto& option : options_) {
    names.push_back(option.name);
    names.insert(names.end(), option.synonyms.begin(), option.synonyms.end());
  }
  return names;
}

std::vector<std::string> OptionTable::excluded_by(std::string_view name) const {
  std::vector<std::string> others;
  for (const auto& set : exclusive_) {
    if (std::ranges::find(set, name) == set.end()) continue;
    std::ranges::copy_if(set, std::back_inserter(others), [&](const std::string& other) { return other != name; });
  }
  return others;
}

std::string OptionTable::help() const {
  std::string usage = "Usage: " + command_;
  for (const auto& positional : positionals_) usage += " " + positional.placeholder;
  usage += " [flags]";
  if (accepts_program()) usage += " -- " + program_words_;
  std::string text = usage + "\n\n" + paragraph(about_, 0);
  if (!positionals_.empty()) text += "\n";
  for (const auto& positional : positionals_) text += row(positional.placeholder, positional.help);
  std::size_t next_group = 0;
  for (std::size_t i = 0; i < options_.size(); ++i) {
    for (; next_group < groups_.size() && groups_[next_group].first == i; ++next_group)
      text += "\n" + groups_[next_group].title + "\n";
    text += row(spellings(options_[i]), description(options_[i]));
  }
  text += "\n";
  text += paragraph(
      "Every flag can also stand in a TOML file (--config FILE, as \"flag-name = value\") and in the environment "
      "(LOCKSTEP_FLAG_NAME); the command line wins over the environment, and the environment over the file.",
      0);
  return text;
}

}  // namespace lockstep::options

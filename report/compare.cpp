// lockstep compare: two runs on a terminal.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "options/sources.h"
#include "options/values.h"
#include "report/report.h"

namespace lockstep::report {
namespace {

struct ComparedRow {
  std::string name, first, second, note = {};
};

/// Columns as wide as they need, up to a limit.
std::string table_text(const std::string& title, const std::vector<ComparedRow>& rows) {
  if (rows.empty()) return {};
  constexpr int kWidest = 36;
  int name = 0, first = 0, second = 0;
  for (const auto& row : rows) {
    name = std::max(name, columns_of(row.name));
    first = std::min(kWidest, std::max(first, columns_of(row.first)));
    second = std::min(kWidest, std::max(second, columns_of(row.second)));
  }
  const auto padded = [](const std::string& text, int columns) {
    const std::string cut = cut_columns(text, columns);
    return cut + std::string(static_cast<std::size_t>(std::max(0, columns - columns_of(cut))), ' ');
  };
  std::string text = title + "\n";
  for (const auto& row : rows) {
    std::string line = fmt::format("  {}  {}  {}  {}", padded(row.name, name), padded(row.first, first),
                                   padded(row.second, second), row.note);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text + "\n";
}

std::string start_text(const Run& run, std::string Start::*member) {
  return run.starts.empty() ? "–" : run.starts.back().*member;
}

std::string ranks_text(const Run& run) {
  if (run.starts.empty()) return "–";
  std::vector<std::string> hosts;
  for (const auto& [host, device] : run.starts.back().ranks)
    if (std::ranges::find(hosts, host) == hosts.end()) hosts.push_back(host);
  return fmt::format("{} on {}", run.starts.back().ranks.size(), join(hosts, ", "));
}

std::vector<ComparedRow> facts_of(const Run& a, const Run& b) {
  std::vector<ComparedRow> rows;
  for (const auto& [name, member] : {std::pair("model", &Start::model),
                                     {"data", &Start::data},
                                     {"data_sha256", &Start::data_sha256},
                                     {"lockstep", &Start::version},
                                     {"git", &Start::git},
                                     {"instruction set", &Start::instruction_set}})
    rows.push_back({name, start_text(a, member), start_text(b, member)});
  rows.push_back({"ranks", ranks_text(a), ranks_text(b)});
  const auto hash = [](const Run& run) { return run.final ? run.final->params_sha256 : std::string("–"); };
  rows.push_back({"params_sha256", hash(a), hash(b)});
  return rows;
}

std::vector<ComparedRow> settings_of(const Run& a, const Run& b) {
  std::vector<ComparedRow> rows;
  const auto text = [](const Run& run, const std::string& name) {
    const auto setting = setting_of(run, name);
    return setting ? fmt::format("{}{}", setting->value, setting->from == "default" ? " (default)" : "") : "–";
  };
  std::vector<std::string> names;
  for (const Run* run : {&a, &b})
    if (!run->starts.empty())
      for (const auto& setting : run->starts.back().settings)
        if (std::ranges::find(names, setting.name) == names.end()) names.push_back(setting.name);
  for (const auto& name : names) rows.push_back({name, text(a, name), text(b, name)});
  return rows;
}

std::vector<ComparedRow> results_of_both(const Run& a, const Run& b) {
  std::vector<ComparedRow> rows;
  const auto first = results_of(a), second = results_of(b);
  const auto in = [](const auto& results, const std::string& name) {
    const auto found = std::ranges::find(results, name, [](const auto& each) { return each.first; });
    return found != results.end() ? found->second : kNone;
  };
  std::vector<std::string> names;
  for (const auto& results : {first, second})
    for (const auto& [name, value] : results)
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  for (const auto& name : names) {
    const double x = in(first, name), y = in(second, name);
    const bool related = std::isfinite(x) && std::isfinite(y) && x != 0 && x != y;
    rows.push_back({name, shown(x), shown(y), related ? fmt::format("{:+.1f} %", 100 * (y - x) / std::abs(x)) : ""});
  }
  return rows;
}

}  // namespace

options::OptionTable compare_options(CompareOptions& options) {
  options::OptionTable table("compare", "Shows how two runs differ: settings, data, versions and results.");
  table.positional({"RUN", "a metrics file, or a directory with one", options::text(options.first)});
  table.positional({"RUN", "the other", options::text(options.second)});
  table.group("Flags");
  table.add({.name = "all",
             .kind = options::OptionKind::kFlag,
             .help = "show what is equal, too",
             .value = options::boolean(options.all)});
  options::add_config_option(table);
  return table;
}

std::string compare(const CompareOptions& options) {
  const Run a = read_run(metrics_file_of(options.first)), b = read_run(metrics_file_of(options.second));
  std::string text;
  for (const Run* run : {&a, &b})
    if (run->starts.empty()) text += fmt::format("{} does not say what it is of: it has no settings\n", run->path);
  const bool described = text.empty();
  if (!described) text += '\n';
  std::size_t equal = 0, differing = 0;
  for (auto [title, rows] : {std::pair("What they are", facts_of(a, b)),
                             {"Settings", settings_of(a, b)},
                             {"Results", results_of_both(a, b)}}) {
    if (!options.all) {
      const auto before = rows.size();
      std::erase_if(rows, [](const ComparedRow& row) { return row.first == row.second; });
      equal += before - rows.size();
    }
    if (!described && std::string_view(title) != "Results") continue;
    differing += rows.size();
    if (!rows.empty()) rows.insert(rows.begin(), {"", a.path, b.path});
    text += table_text(title, rows);
  }
  if (differing == 0) return text + "nothing differs\n";
  if (equal > 0) text += fmt::format("{} more are equal (--all shows them)\n", equal);
  return text;
}

}  // namespace lockstep::report

#include "cli/commands.h"

#include <cstdio>

#include "base/error.h"
#include "launcher/inspect.h"
#include "options/values.h"

namespace lockstep::cli {

OptionTable inspect_options(InspectOptions& options) {
  OptionTable table("inspect",
                    "Shows the last actions of each rank of a job: its phase, its wait, and its last operations. PATH "
                    "is a flight record, a directory of them, or the --log-dir of a job that failed.");
  table.positional({"PATH", "a flight record rank-N, or a directory of them", options::text(options.path)});
  table.group("Flags");
  table.add({.name = "last",
             .placeholder = "N",
             .help = "operations to show per rank, at most 1024",
             .default_text = fmt::to_string(options.last),
             .value = options::integer(options.last, 0, static_cast<std::int64_t>(flight::kOperations))});
  table.add({.name = "json",
             .kind = options::OptionKind::kFlag,
             .help = "print one JSON object per rank instead of tables",
             .value = options::boolean(options.json)});
  options::add_config_option(table);
  return table;
}

int inspect_command(const Sources& sources, const ForeignFlags& foreign) {
  InspectOptions options;
  const OptionTable table = inspect_options(options);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  std::optional<IoError> failure;
  const auto last = static_cast<std::size_t>(options.last);
  for (const auto& path : launcher::records_at(options.path)) {
    try {
      const auto snapshot = flight::decode(flight::read_bytes(path), path);
      std::fputs((options.json ? launcher::json_of(snapshot, last) + "\n" : launcher::text_of(snapshot, last)).c_str(),
                 stdout);
    } catch (const IoError& error) {
      if (!failure) failure = error;  // the others can be read all the same
    }
  }
  if (failure) throw *failure;
  return 0;
}

}  // namespace lockstep::cli

// lockstep report, compare, watch and bugreport.
#include <cstdio>

#include "cli/commands.h"
#include "report/report.h"

namespace lockstep::cli {
namespace {

/// `run` returns what is printed.
template <class Run>
int print(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign, Run&& run) {
  const bool help = parse_options(table, sources, foreign).help;
  std::fputs((help ? table.help() : run()).c_str(), stdout);
  return 0;
}

}  // namespace

int report_command(const Sources& sources, const ForeignFlags& foreign) {
  report::ReportOptions options;
  return print(report::report_options(options), sources, foreign, [&] { return report::report(options); });
}

int compare_command(const Sources& sources, const ForeignFlags& foreign) {
  report::CompareOptions options;
  return print(report::compare_options(options), sources, foreign, [&] { return report::compare(options); });
}

int bugreport_command(const Sources& sources, const ForeignFlags& foreign) {
  report::BugreportOptions options;
  return print(report::bugreport_options(options), sources, foreign,
               [&] { return report::bugreport(options, version_text()); });
}

int watch_command(const Sources& sources, const ForeignFlags& foreign) {
  report::WatchOptions options;
  const OptionTable table = report::watch_options(options);
  if (!parse_options(table, sources, foreign).help) return report::watch(options);
  std::fputs(table.help().c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli

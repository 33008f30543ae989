// lockstep report, compare, watch and bugreport.
#include <cstdio>

#include "cli/commands.h"
#include "report/report.h"

namespace lockstep::cli {
int report_command(const Sources& sources, const ForeignFlags& foreign) {
  report::ReportOptions options;
  return print_result(report::report_options(options), sources, foreign, [&] { return report::report(options); });
}

int compare_command(const Sources& sources, const ForeignFlags& foreign) {
  report::CompareOptions options;
  return print_result(report::compare_options(options), sources, foreign, [&] { return report::compare(options); });
}

int bugreport_command(const Sources& sources, const ForeignFlags& foreign) {
  report::BugreportOptions options;
  return print_result(report::bugreport_options(options), sources, foreign,
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

#include "plot/page.h"

#include <fmt/format.h>

#include "plot/plot.h"

namespace lockstep::plot {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --line: #d8dee4; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Helvetica, Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.7em; line-height: 1.25; } h2 { margin-top: 2em; border-bottom: 1px solid var(--line); }
.faint { color: var(--faint); } .summary { font-size: 1.1em; padding-left: 1.2em; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 24px; }
figure { margin: 0; min-width: 0; } .plot { max-width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9em; }
th, td { padding: 3px 12px 3px 4px; text-align: right; border-bottom: 1px solid var(--line); font-weight: normal;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { color: var(--faint); } th[scope=row] { text-align: left; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; } .facts th { vertical-align: top; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --faint: #9198a1; --line: #2a313a; }
}
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; } figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } .wide { overflow: visible; } }
)";

}  // namespace

std::string table_of(const Rows& rows) {
  std::string html = "<div class=\"wide\"><table>\n<thead><tr>";
  for (const auto& cell : rows.front()) html += fmt::format("<th scope=\"col\">{}</th>", xml_escaped(cell));
  html += "</tr></thead>\n<tbody>\n";
  for (std::size_t i = 1; i < rows.size(); ++i) {
    html += fmt::format("<tr><th scope=\"row\">{}</th>", xml_escaped(rows[i].front()));
    for (std::size_t k = 1; k < rows[i].size(); ++k) html += fmt::format("<td>{}</td>", xml_escaped(rows[i][k]));
    html += "</tr>\n";
  }
  return html + "</tbody>\n</table></div>\n";
}

std::string facts_of(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string html = "<div class=\"wide\"><table class=\"facts\">\n<tbody>\n";
  for (const auto& [name, value] : facts)
    if (!value.empty())
      html += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td></tr>\n", xml_escaped(name), xml_escaped(value));
  return html + "</tbody>\n</table></div>\n";
}

std::string figure(const std::string& svg, const Rows& rows) {
  return "<figure>\n" + svg + table_of(rows) + "</figure>\n";
}

std::string page_of(const std::string& title, const std::string& subtitle, const std::string& body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{0}</title>\n"
      "<style>\n{1}{2}</style>\n</head>\n<body>\n<main>\n<h1>{0}</h1>\n<p class=\"faint\">{3}</p>\n"
      "{4}</main>\n</body>\n</html>\n",
      xml_escaped(title), plot_style(), kStyle, xml_escaped(subtitle), body);
}

}  // namespace lockstep::plot

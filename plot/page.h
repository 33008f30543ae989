// Pages for a browser with plots and tables: one file, that loads nothing.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::plot {

/// The first row is the heading; the first column names a row. Plain text.
using Rows = std::vector<std::vector<std::string>>;

std::string table_of(const Rows& rows);
/// Names and their values; those without one are left out.
std::string facts_of(const std::vector<std::pair<std::string, std::string>>& facts);
/// A plot with its numbers below.
std::string figure(const std::string& svg, const Rows& rows);
/// A whole page, light or dark by the reader's choice, for phones and paper too. `title` and `subtitle` are plain text,
/// `body` is HTML: classes "plots" (figures side by side), "wide", "facts", "summary" and "faint" have a style.
std::string page_of(const std::string& title, const std::string& subtitle, const std::string& body);

}  // namespace lockstep::plot

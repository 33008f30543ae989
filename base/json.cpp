#include "base/json.h"

#include <fmt/format.h>

#include <set>
#include <string>
#include <vector>

namespace lockstep {
namespace {

template <class Json>
Json parse(std::string_view text, int deepest, std::size_t offset) {
  std::vector<std::set<std::string>> seen;  // keys of the objects that are open, by depth
  const auto look = [&](int depth, typename Json::parse_event_t event, Json& value) {
    if (depth > deepest) throw JsonError(fmt::format("nests deeper than {} levels", deepest));
    const auto level = static_cast<std::size_t>(depth);
    if (event == Json::parse_event_t::object_start) {
      seen.resize(level + 1);
      seen.emplace_back();  // its keys come one deeper
    } else if (event == Json::parse_event_t::key) {
      if (!seen[level].insert(value.template get<std::string>()).second)
        throw JsonError(fmt::format("names '{}' twice", value.template get<std::string>()));
    }
    return true;
  };
  try {
    return Json::parse(text, look);
  } catch (const typename Json::parse_error& error) {
    throw JsonError(fmt::format("is not JSON at byte {}", offset + error.byte));
  } catch (const typename Json::out_of_range&) {
    throw JsonError("has a number that is too large");
  }
}

}  // namespace

nlohmann::json parse_json(std::string_view text, int deepest, std::size_t offset) {
  return parse<nlohmann::json>(text, deepest, offset);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, int deepest) {
  return parse<nlohmann::ordered_json>(text, deepest, 0);
}

}  // namespace lockstep

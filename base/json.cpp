#include "base/json.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "base/json_value.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr int kShownColumns = 80;  // of a name, which may be any text

/// Iterates over a text and records its position.
class Reached {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Reached(const char* at, const char*& reached) : at_(at), reached_(&reached) {}
  reference operator*() const { return *at_; }
  Reached& operator++() {
    *reached_ = ++at_;
    return *this;
  }
  Reached operator++(int) {
    const Reached before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const Reached& a, const Reached& b) { return a.at_ == b.at_; }
  friend bool operator!=(const Reached& a, const Reached& b) { return !(a == b); }

 private:
  const char* at_;
  const char** reached_;
};

template <class Json>
Json parse(std::string_view text, int deepest, std::size_t offset) {
  std::vector<std::set<std::string>> seen;  // keys of the objects that are open, by depth
  const char* reached = text.data();
  const auto place = [&] { return offset + static_cast<std::size_t>(reached - text.data()); };
  const auto look = [&](int depth, typename Json::parse_event_t event, Json& value) {
    if (depth > deepest) throw JsonError(fmt::format("nests deeper than {} levels at byte {}", deepest, place()));
    const auto level = static_cast<std::size_t>(depth);
    if (event == Json::parse_event_t::object_start) {
      seen.resize(level + 1);
      seen.emplace_back();  // its keys come one deeper
    } else if (event == Json::parse_event_t::key) {
      if (!seen[level].insert(value.template get<std::string>()).second)
        throw JsonError(fmt::format("names '{}' twice, again before byte {}",
                                    cut_columns(value.template get<std::string>(), kShownColumns), place()));
    }
    return true;
  };
  try {
    return Json::parse(Reached(text.data(), reached), Reached(text.data() + text.size(), reached), look);
  } catch (const typename Json::parse_error& error) {
    throw JsonError(fmt::format("is not JSON at byte {}", offset + error.byte));
  } catch (const typename Json::out_of_range&) {
    throw JsonError(fmt::format("has a number that is too large before byte {}", place()));
  }
}

std::string text_of(const nlohmann::json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, int deepest, std::size_t offset) {
  return parse<nlohmann::json>(text, deepest, offset);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, int deepest) {
  return parse<nlohmann::ordered_json>(text, deepest, 0);
}

JsonText::JsonText(double value) : text_(text_of(value)) {}
JsonText::JsonText(std::string_view value) : text_(text_of(value)) {}

void JsonText::append(const JsonText& value) {
  if (text_.size() > 1) text_ += ',';
  text_ += value.text_;
}

JsonObject::JsonObject(std::initializer_list<std::pair<const char*, JsonText>> members) {
  for (const auto& [name, value] : members) add(name, value);
}

JsonObject& JsonObject::add(std::string_view name, const JsonText& value) {
  if (members_.size() > 1) members_ += ',';
  members_ += JsonText(name).text() + ':' + value.text();
  return *this;
}

JsonObject::operator JsonText() const {
  JsonText value;
  value.text_ = text();
  return value;
}

}  // namespace lockstep

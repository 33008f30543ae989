#include "base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "base/json_value.h"
#include "base/text.h"
#include "lockstep/base/error.h"

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

// As the library writes it, in a tenth of the time.
JsonText::JsonText(double value) : text_(std::isfinite(value) ? fmt::to_string(value) : "null") {
  if (std::isfinite(value) && text_.find_first_of(".e") == std::string::npos) text_ += ".0";
}
JsonText::JsonText(std::string_view value) {
  // What needs no escapes, as names do, needs no library either.
  if (std::ranges::all_of(value, [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; })) {
    text_.reserve(value.size() + 2);
    text_.append(1, '"').append(value).append(1, '"');
  } else {
    text_ = text_of(value);
  }
}

void JsonText::append(const JsonText& value) {
  if (text_.size() > 1) text_ += ',';
  text_ += value.text_;
}

JsonObject::JsonObject(std::initializer_list<std::pair<const char*, JsonText>> members) {
  members_.reserve(members.size());
  for (const auto& [name, value] : members) add(name, value);
}

JsonObject& JsonObject::add(std::string_view name, const JsonText& value) {
  members_.emplace_back(name, value);
  return *this;
}

std::string JsonObject::text() const {
  std::string text = "{";
  for (const auto& [name, value] : members_) {
    if (text.size() > 1) text += ',';
    text.append(JsonText(name).text()).append(1, ':').append(value.text());
  }
  return text + '}';
}

JsonObject::operator JsonText() const {
  JsonText value;
  value.text_ = text();
  return value;
}

template <class Json>
BasicJsonMembers<Json>::BasicJsonMembers(std::string_view text, int deepest, const std::string& place,
                                         const std::string& remedy) {
  const auto source = std::make_shared<Source>(Source{.json = {}, .place = place, .remedy = remedy});
  source_ = source;
  try {
    source->json = parse<Json>(text, deepest, 0);
  } catch (const JsonError& error) {
    refuse(error.what());
  }
  object_ = &source->json;
  if (!object_->is_object()) refuse("is no object");
}

template <class Json>
BasicJsonMembers<Json>::BasicJsonMembers(std::shared_ptr<const Source> source, const Json& object)
    : source_(std::move(source)), object_(&object) {}

template <class Json>
void BasicJsonMembers<Json>::refuse(const std::string& problem) const {
  throw IoError(fmt::format("{}: {}", source_->place, problem), source_->remedy);
}

template <class Json>
const Json& BasicJsonMembers<Json>::at(const char* name) const {
  const auto found = object_->find(name);
  if (found == object_->end()) refuse(fmt::format("'{}' is missing", name));
  return *found;
}

template <class Json>
bool BasicJsonMembers<Json>::has(const char* name, std::string_view text) const {
  const auto found = object_->find(name);
  return found != object_->end() && found->is_string() && found->template get_ref<const std::string&>() == text;
}

template <class Json>
std::string BasicJsonMembers<Json>::text(const char* name) const {
  const Json& value = at(name);
  if (!value.is_string()) refuse(fmt::format("'{}' is no text", name));
  return value.template get<std::string>();
}

template <class Json>
std::uint64_t BasicJsonMembers<Json>::whole(const char* name, std::uint64_t least, std::uint64_t most) const {
  const auto value = whole_number(at(name), most);
  if (!value || *value < least)
    refuse(most == kMostWhole ? fmt::format("'{}' is no whole number from {} on", name, least)
                              : fmt::format("'{}' is no whole number from {} to {}", name, least, most));
  return *value;
}

template <class Json>
double BasicJsonMembers<Json>::number(const char* name) const {
  const Json& value = at(name);
  if (!value.is_number()) refuse(fmt::format("'{}' is no number", name));
  return value.template get<double>();
}

template <class Json>
double BasicJsonMembers<Json>::number(const char* name, double least, double most) const {
  return checked(at(name), name, least, most);
}

template <class Json>
double BasicJsonMembers<Json>::positive(const char* name) const {
  const Json& value = at(name);
  if (!value.is_number() || !(value.template get<double>() > 0)) refuse(fmt::format("'{}' is no number above 0", name));
  return value.template get<double>();
}

template <class Json>
std::vector<double> BasicJsonMembers<Json>::numbers(const char* name, std::size_t most_values, double least,
                                                    double most) const {
  std::vector<double> numbers;
  for (const Json& value : list(name, most_values, "numbers")) numbers.push_back(checked(value, name, least, most));
  return numbers;
}

template <class Json>
std::vector<BasicJsonMembers<Json>> BasicJsonMembers<Json>::objects(const char* name, std::size_t most) const {
  std::vector<BasicJsonMembers> objects;
  for (const Json& value : list(name, most, "objects")) {
    if (!value.is_object()) refuse(fmt::format("'{}' holds what is no object", name));
    objects.push_back(BasicJsonMembers(source_, value));
  }
  return objects;
}

template <class Json>
std::vector<std::pair<std::string, std::string>> BasicJsonMembers<Json>::texts(const char* name) const {
  const Json& object = at(name);
  if (!object.is_object()) refuse(fmt::format("'{}' is no object", name));
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string()) refuse(fmt::format("'{}' of '{}' is no text", printable(key), name));
    texts.emplace_back(key, value.template get<std::string>());
  }
  return texts;
}

template <class Json>
const Json& BasicJsonMembers<Json>::list(const char* name, std::size_t most, const char* of) const {
  const Json& value = at(name);
  if (!value.is_array() || value.empty() || value.size() > most)
    refuse(fmt::format("'{}' is no list of 1 to {} {}", name, most, of));
  return value;
}

template <class Json>
double BasicJsonMembers<Json>::checked(const Json& value, const char* name, double least, double most) const {
  if (!value.is_number() || !(value.template get<double>() >= least) || !(value.template get<double>() <= most))
    refuse(fmt::format("'{}' is no number from {:g} to {:g}", name, least, most));
  return value.template get<double>();
}

template class BasicJsonMembers<nlohmann::json>;
template class BasicJsonMembers<nlohmann::ordered_json>;

}  // namespace lockstep

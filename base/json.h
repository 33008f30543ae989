// JSON: what we write, as text, and what others wrote, read with care. The library that reads it takes longer to
// compile than most of our files: those that look into values include base/json_value.h, the others this one alone.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

/// What a text does that is not taken for JSON: "is not JSON at byte 7", "nests deeper than 3 levels at byte 9", "names
/// 'a' twice, again before byte 30".
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// `deepest`: 0 is a value alone, 1 an object of values. `offset` is added to the place of what is wrong. Throws
/// JsonError for what is no JSON, nests deeper, names a key of an object twice, or has a number that no double holds.
nlohmann::json parse_json(std::string_view text, int deepest, std::size_t offset = 0);
/// The same, with keys in their order: for few of them.
nlohmann::ordered_json parse_ordered_json(std::string_view text, int deepest);

/// One value that is to be written: its text, on one line, without spaces between. Bytes that are no UTF-8 become
/// U+FFFD, numbers that JSON has not become null.
class JsonText {
 public:
  JsonText(std::nullptr_t) : text_("null") {}
  JsonText(bool value) : text_(value ? "true" : "false") {}
  template <std::integral T>
  JsonText(T value) : text_(std::to_string(value)) {}
  JsonText(double value);
  JsonText(std::string_view value);
  JsonText(const std::string& value) : JsonText(std::string_view(value)) {}
  JsonText(const char* value) : JsonText(std::string_view(value)) {}
  template <class T>
  JsonText(const std::optional<T>& value) : JsonText(value ? JsonText(*value) : JsonText(nullptr)) {}
  template <class T>
  JsonText(const std::vector<T>& values) : text_("[") {
    for (const T& value : values) append(JsonText(value));
    text_ += ']';
  }

  const std::string& text() const { return text_; }

 private:
  friend class JsonObject;
  JsonText() = default;
  void append(const JsonText& value);

  std::string text_;
};

/// An object that is to be written, with its members in the order in which they are added. Each name comes once.
class JsonObject {
 public:
  JsonObject(std::initializer_list<std::pair<const char*, JsonText>> members = {});
  JsonObject& add(std::string_view name, const JsonText& value);
  operator JsonText() const;
  std::string text() const;
  const std::vector<std::pair<std::string, JsonText>>& members() const { return members_; }

 private:
  std::vector<std::pair<std::string, JsonText>> members_;
};

}  // namespace lockstep

// Values of JSON that others wrote: with the library's header, which no other header of ours includes.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace lockstep {

/// A number without sign, fraction and exponent, at most `most`; nothing else is one. (The library's get() casts
/// whatever number it finds.)
template <class Json>
std::optional<std::uint64_t> whole_number(const Json& value, std::uint64_t most) {
  if (!value.is_number_unsigned() || value.template get<std::uint64_t>() > most) return std::nullopt;
  return value.template get<std::uint64_t>();
}

/// The members of an object that others wrote, each with what it may be. What is wrong with one is an IoError: "a.json,
/// line 3: 'batch' is no whole number from 1 to 64".
template <class Json>
class BasicJsonMembers {
 public:
  static constexpr std::uint64_t kMostWhole = std::uint64_t{1} << 62;

  /// `text` is such an object. Its `place` and the `remedy` are for the errors.
  BasicJsonMembers(std::string_view text, int deepest, const std::string& place, const std::string& remedy);

  [[noreturn]] void refuse(const std::string& problem) const;
  /// Whether `name` is there and is this text.
  bool has(const char* name, std::string_view text) const;
  bool has(const char* name) const { return object_->contains(name); }
  std::string text(const char* name) const;
  std::uint64_t whole(const char* name, std::uint64_t least, std::uint64_t most = kMostWhole) const;
  double number(const char* name) const;
  double number(const char* name, double least, double most) const;
  double positive(const char* name) const;
  /// A list of 1 to `most_values`, each as number() has it.
  std::vector<double> numbers(const char* name, std::size_t most_values, double least, double most) const;
  /// A list of 1 to `most` objects.
  std::vector<BasicJsonMembers> objects(const char* name, std::size_t most) const;
  /// An object of texts, in the order that Json has.
  std::vector<std::pair<std::string, std::string>> texts(const char* name) const;

 private:
  struct Source {
    Json json;
    std::string place, remedy;
  };
  BasicJsonMembers(std::shared_ptr<const Source> source, const Json& object);
  const Json& at(const char* name) const;
  const Json& list(const char* name, std::size_t most, const char* of) const;
  double checked(const Json& value, const char* name, double least, double most) const;

  std::shared_ptr<const Source> source_;
  const Json* object_ = nullptr;  // in the source
};
using JsonMembers = BasicJsonMembers<nlohmann::json>;
/// For few members: each is looked for among all.
using OrderedJsonMembers = BasicJsonMembers<nlohmann::ordered_json>;

// What our own processes write and read as objects lists its members once:
//
//     struct Place {
//       std::string address;
//       int port = 0;
//       void members(auto& io) { io("address", address, "port", port); }
//     };
//
// A member is text, a number, a truth value, another such struct, a vector of these, or a std::optional of text or of a
// number.

class JsonMemberWriter {
 public:
  void operator()(const char* name, auto& value, auto&... more) {
    object_.add(name, text_of(value));
    if constexpr (sizeof...(more) > 0) (*this)(more...);
  }

  template <class T>
  static JsonText text_of(T& value) {
    if constexpr (requires(JsonMemberWriter & io) { value.members(io); }) {
      JsonMemberWriter io;
      value.members(io);
      return io.object_;
    } else {
      return value;
    }
  }
  template <class T>
  static JsonText text_of(std::vector<T>& values) {
    std::vector<JsonText> texts;
    for (T& value : values) texts.push_back(text_of(value));
    return texts;
  }

 private:
  JsonObject object_;
};

class JsonMemberReader {
 public:
  explicit JsonMemberReader(const nlohmann::json& object) : object_(object) {}
  void operator()(const char* name, auto& value, auto&... more) {
    read(object_.at(name), value);
    if constexpr (sizeof...(more) > 0) (*this)(more...);
  }

  template <class T>
  static void read(const nlohmann::json& json, T& value) {
    if constexpr (requires(JsonMemberReader & io) { value.members(io); }) {
      JsonMemberReader io(json);
      value.members(io);
    } else {
      json.get_to(value);
    }
  }
  template <class T>
  static void read(const nlohmann::json& json, std::vector<T>& values) {
    values.clear();
    for (const auto& each : json) read(each, values.emplace_back());
  }
  template <class T>
  static void read(const nlohmann::json& json, std::optional<T>& value) {
    value.reset();
    if (!json.is_null()) read(json, value.emplace());
  }

 private:
  const nlohmann::json& object_;
};

/// Of a struct with members(), or a vector of them.
template <class T>
JsonText members_as_json(T value) {
  return JsonMemberWriter::text_of(value);
}

/// Throws the library's exceptions for what members_as_json() has not written.
template <class T>
T members_from_json(const nlohmann::json& json) {
  T value{};
  JsonMemberReader::read(json, value);
  return value;
}

}  // namespace lockstep

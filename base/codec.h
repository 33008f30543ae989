// Bodies of messages between processes. A message lists its fields once, for both directions:
//
//   struct Found {
//     std::uint32_t number = 0;
//     std::string text;
//     void fields(auto& io) { io(number, text); }
//   };
//   unpack<Found>(pack(Found{1, "a"}))
//
// A number or an enumerator has the size of its type, and is little-endian; a bool is a byte. A text is its u32 length
// and its bytes, a list its u32 count and its elements, a pair its halves, a time the i64 nanoseconds of its clock.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

/// Bytes that the other side cannot have meant.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A field that takes all that is left: a text without its length, or a list without its count.
template <class T>
struct Rest {
  T& value;
};
template <class T>
Rest<T> rest(T& value) {
  return {value};
}

/// A text, or a list of texts, of at most so many bytes: longer ones are cut when written, and Malformed when read.
template <class T>
struct Bounded {
  T& value;
  std::size_t most_bytes;
};
template <class T>
Bounded<T> bounded(T& value, std::size_t most_bytes) {
  return {value, most_bytes};
}

/// Writes a body, or takes one apart: that throws Malformed where it is too short, and in end() where it is too long.
template <bool kIsReader>
class Body {
 public:
  static constexpr bool kReads = kIsReader;

  Body() { bytes_.reserve(32); }  // also because GCC 12 warns of small strings that grow past their end
  explicit Body(std::string_view bytes) : bytes_(bytes) {}

  template <class... Fields>
  Body& operator()(Fields&&... fields) {
    (field(fields), ...);
    return *this;
  }

  // To write one by one.
  Body& number(std::uint32_t value) { return (*this)(value); }
  Body& text(std::string_view value) { return (*this)(value); }
  const std::string& bytes() const& { return bytes_; }
  std::string bytes() && { return std::move(bytes_); }

  // To read one by one.
  std::uint32_t number() {
    std::uint32_t value = 0;
    field(value);
    return value;
  }
  std::string text(std::size_t most_bytes) {
    std::string value;
    (*this)(bounded(value, most_bytes));
    return value;
  }
  void end() const {
    if (!bytes_.empty()) throw Malformed("a frame that is too long");
  }

 private:
  template <class T>
  static constexpr bool kIsNumber = std::is_arithmetic_v<T> || std::is_enum_v<T>;
  template <class T>
  static constexpr bool kIsText = std::is_convertible_v<T, std::string_view>;

  std::string_view take(std::size_t count) {
    if (count > bytes_.size()) throw Malformed("a frame that is too short");
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  template <class T>
  requires kIsNumber<T>
  void field(T& value) {
    auto bytes = std::bit_cast<std::array<char, sizeof(T)>>(value);
    const auto reorder = [&] {
      if constexpr (std::endian::native == std::endian::big) std::ranges::reverse(bytes);
    };
    if constexpr (!kReads) {
      reorder();
      bytes_.append(bytes.data(), bytes.size());
    } else {
      take(bytes.size()).copy(bytes.data(), bytes.size());
      reorder();
      if constexpr (std::is_same_v<T, bool>) bytes[0] = bytes[0] != 0;  // a bool of any other byte is nothing
      value = std::bit_cast<T>(bytes);
    }
  }
  /// The count of a list, or the length of a text, that has this one where it is written.
  std::size_t count_field(std::size_t own) {
    auto count = static_cast<std::uint32_t>(own);
    field(count);
    return count;
  }
  template <class T>
  requires kIsText<T>
  void field(T& text) { raw(text, count_field(text.size())); }
  template <class T>
  void raw(T& text, std::size_t size) {
    if constexpr (kReads)
      text = take(size);
    else
      bytes_.append(text, 0, size);
  }
  template <class T>
  void field(std::vector<T>& list) {
    // An element takes a byte at least, so a wrong count takes no memory.
    const std::size_t count = count_field(list.size());
    for (std::size_t i = 0; i < count; ++i) field(kReads ? list.emplace_back() : list[i]);
  }
  template <class A, class B>
  void field(std::pair<A, B>& both) {
    (*this)(both.first, both.second);
  }
  template <class C, class D>
  void field(std::chrono::time_point<C, D>& at) {
    std::int64_t ns = std::chrono::nanoseconds(at.time_since_epoch()).count();
    field(ns);
    if constexpr (kReads)
      at = std::chrono::time_point<C, D>(std::chrono::duration_cast<D>(std::chrono::nanoseconds(ns)));
  }
  template <class T>
  void field(Rest<T>& all) {
    if constexpr (kIsText<T>) {
      raw(all.value, kReads ? bytes_.size() : all.value.size());
    } else if constexpr (kReads) {
      while (!bytes_.empty()) field(all.value.emplace_back());
    } else {
      for (auto& one : all.value) field(one);
    }
  }
  template <class T>
  void field(Bounded<T>& all) {
    auto& [value, most_bytes] = all;
    if constexpr (kIsText<T>) {
      const std::size_t size = count_field(std::min(value.size(), most_bytes));
      if (size > most_bytes)
        throw Malformed(fmt::format("a text of {} bytes, where {} are possible", size, most_bytes));
      raw(value, size);
    } else {
      const std::size_t count = count_field(value.size());
      for (std::size_t i = 0; i < count; ++i) (*this)(bounded(kReads ? value.emplace_back() : value[i], most_bytes));
    }
  }
  template <class T>
  requires(std::is_class_v<T> && !kIsText<T>) void field(T& message) {
    if constexpr (!std::is_empty_v<T>) message.fields(*this);
  }

  std::conditional_t<kReads, std::string_view, std::string> bytes_;
};
using Packer = Body<false>;
using Unpacker = Body<true>;

template <class Message>
std::string pack(const Message& message) {
  Packer body;
  body(const_cast<Message&>(message));  // which it only reads
  return std::move(body).bytes();
}

/// Throws Malformed for bytes that no pack() made.
template <class Message>
Message unpack(std::string_view bytes) {
  Message message;
  Unpacker body(bytes);
  body(message);
  body.end();
  return message;
}

/// As unpack(), of the alternative with this index.
template <class Variant, std::size_t kIndex = 0>
Variant unpack_alternative(std::size_t index, std::string_view bytes) {
  if constexpr (kIndex < std::variant_size_v<Variant>) {
    if (index != kIndex) return unpack_alternative<Variant, kIndex + 1>(index, bytes);
    return unpack<std::variant_alternative_t<kIndex, Variant>>(bytes);
  } else {
    throw Malformed("its kind is unknown");
  }
}

}  // namespace lockstep

// Frames of the launcher's own protocols: a length, a kind, and a body of fixed-size fields with a text at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace lockstep::launcher {

inline constexpr std::size_t kMaxFrameBytes = 1 << 20;

/// Fields one after the other, in this host's byte order.
class Writer {
 public:
  Writer() { bytes_.reserve(32); }  // also because GCC 12 warns of small strings that grow past their end
  template <class T>
  Writer& put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& put_text(std::string_view text) {
    bytes_.append(text);
    return *this;
  }
  /// A text that others follow.
  Writer& put_sized(std::string_view text) { return put(static_cast<std::uint32_t>(text.size())).put_text(text); }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Throws MpiError where bytes are missing.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T take() {
    need(sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      return take<std::uint8_t>() != 0;  // a bool of any other byte is nothing
    } else {
      T value;
      std::memcpy(&value, bytes_.data(), sizeof value);
      bytes_.remove_prefix(sizeof value);
      return value;
    }
  }
  std::string take_sized() {
    const std::size_t size = take<std::uint32_t>();
    need(size);
    std::string text(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return text;
  }
  std::string rest() { return std::string(bytes_); }
  bool empty() const { return bytes_.empty(); }

 private:
  void need(std::size_t size) const {
    if (bytes_.size() < size) throw MpiError("a message between the launcher and a rank is cut short");
  }
  std::string_view bytes_;
};

inline std::string frame(std::size_t kind, std::string_view body) {
  LOCKSTEP_ASSERT(body.size() <= kMaxFrameBytes, "frame of {} bytes", body.size());
  return Writer()
      .put(static_cast<std::uint32_t>(body.size()))
      .put(static_cast<std::uint8_t>(kind))
      .put_text(body)
      .take();
}

/// Cuts a byte stream into frames.
class FrameCutter {
 public:
  struct Frame {
    std::size_t kind;
    std::string_view body;  // valid until the next call of anything
  };
  void feed(std::string_view bytes) { buffer_.append(bytes); }
  /// Throws MpiError for lengths that no frame has.
  std::optional<Frame> next() {
    constexpr std::size_t kHeaderBytes = 5;
    const std::string_view waiting = std::string_view(buffer_).substr(start_);
    std::size_t length = 0;
    if (waiting.size() >= kHeaderBytes) {
      Reader header(waiting);
      length = header.take<std::uint32_t>();
      if (length > kMaxFrameBytes)
        throw MpiError(fmt::format("message of {} bytes between the launcher and a rank", length));
    }
    if (waiting.size() < kHeaderBytes + length) {
      buffer_.erase(0, start_);
      start_ = 0;
      return std::nullopt;
    }
    start_ += kHeaderBytes + length;
    return Frame{static_cast<unsigned char>(waiting[kHeaderBytes - 1]), waiting.substr(kHeaderBytes, length)};
  }

 private:
  std::string buffer_;
  std::size_t start_ = 0;  // of the first frame not yet handed out
};

}  // namespace lockstep::launcher

// Frames of the launcher's own protocols: u32 length of the body, u8 kind, body (base/codec.h). A kind is the place of
// its message in a variant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/codec.h"
#include "base/error.h"

namespace lockstep::launcher {

inline constexpr std::size_t kMaxFrameBytes = 1 << 20;

inline std::string frame(std::size_t kind, std::string_view body) {
  LOCKSTEP_ASSERT(body.size() <= kMaxFrameBytes, "frame of {} bytes", body.size());
  Packer out;
  out(static_cast<std::uint32_t>(body.size()), static_cast<std::uint8_t>(kind), rest(body));
  return std::move(out).bytes();
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
      length = Unpacker(waiting).number();
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

/// For std::visit() of a message.
template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <class... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;  // clang wants it spelled out

template <class Message>
std::string encode_frame(const Message& message) {
  return frame(message.index(), std::visit([](const auto& one) { return pack(one); }, message));
}

/// Turns a byte stream back into messages. Throws MpiError on bytes that no encode_frame() made.
template <class Message>
class FrameDecoder {
 public:
  void feed(std::string_view bytes) { frames_.feed(bytes); }
  std::optional<Message> next() {
    const auto frame = frames_.next();
    if (!frame) return std::nullopt;
    try {
      return unpack_alternative<Message>(frame->kind, frame->body);
    } catch (const Malformed& error) {
      throw MpiError(
          fmt::format("message of kind {} between the launcher and a rank or host: {}", frame->kind, error.what()));
    }
  }

 private:
  FrameCutter frames_;
};

}  // namespace lockstep::launcher

// Reads files of events as TensorBoard does, with every CRC and every field that lockstep writes
// (trainer/event_file.h).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::testing {

struct ReadHistogram {
  double min = 0, max = 0, num = 0, sum = 0, sum_squares = 0;
  std::vector<double> limits, counts;
};

struct ReadEvent {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version;
  std::uint64_t session_status = 0;
  std::map<std::string, float> scalars;
  std::map<std::string, std::string> texts;  // of the plugin "text"
  std::map<std::string, ReadHistogram> histograms;
};

namespace events {

inline std::runtime_error wrong(const char* what) {
  return std::runtime_error(std::string("a file of events: ") + what);
}

/// Bit by bit.
inline std::uint32_t masked_crc(std::string_view bytes) {
  std::uint32_t crc = 0xffffffff;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

template <class T>
T fixed(std::string_view& bytes) {
  if (bytes.size() < sizeof(T)) throw wrong("it is cut");
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

inline std::string_view take(std::string_view& bytes, std::uint64_t count) {
  if (bytes.size() < count) throw wrong("it is cut");
  const auto taken = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return taken;
}

inline std::uint64_t varint(std::string_view& bytes) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(take(bytes, 1)[0]);
    value |= std::uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return value;
  }
}

/// Calls `field(number, value, bytes)`: the value of a number as it lies there, or the bytes of anything longer.
template <class Field>
void parse(std::string_view message, const Field& field) {
  while (!message.empty()) {
    const std::uint64_t key = varint(message);
    const auto number = static_cast<int>(key >> 3);
    switch (key & 7) {
      case 0: field(number, varint(message), std::string_view()); break;
      case 1: field(number, fixed<std::uint64_t>(message), std::string_view()); break;
      case 2: field(number, std::uint64_t{0}, take(message, varint(message))); break;
      case 5: field(number, std::uint64_t{fixed<std::uint32_t>(message)}, std::string_view()); break;
      default: throw wrong("a field of an unknown kind");
    }
  }
}

inline std::vector<double> doubles(std::string_view bytes) {
  std::vector<double> values;
  while (!bytes.empty()) values.push_back(fixed<double>(bytes));
  return values;
}

inline ReadHistogram histogram(std::string_view message) {
  ReadHistogram made;
  parse(message, [&](int number, std::uint64_t value, std::string_view bytes) {
    double* const numbers[] = {&made.min, &made.max, &made.num, &made.sum, &made.sum_squares};
    if (number >= 1 && number <= 5) *numbers[number - 1] = std::bit_cast<double>(value);
    if (number == 6) made.limits = doubles(bytes);
    if (number == 7) made.counts = doubles(bytes);
  });
  return made;
}

inline void add_value(ReadEvent& event, std::string_view message) {
  std::string tag, text, plugin;
  parse(message, [&](int number, std::uint64_t value, std::string_view bytes) {
    if (number == 1) tag = bytes;
    if (number == 2) event.scalars[tag] = std::bit_cast<float>(static_cast<std::uint32_t>(value));
    if (number == 5) event.histograms[tag] = histogram(bytes);
    if (number == 8)
      parse(bytes, [&](int inner, std::uint64_t type, std::string_view content) {
        if (inner == 1 && type != 7) throw wrong("a tensor that is no text");
        if (inner == 8) text = content;
      });
    if (number == 9)
      parse(bytes, [&](int, std::uint64_t, std::string_view data) {
        parse(data, [&](int, std::uint64_t, std::string_view name) { plugin = name; });
      });
  });
  if (!plugin.empty() && plugin != "text") throw wrong("an unknown plugin");
  if (!plugin.empty()) event.texts[tag] = text;
}

}  // namespace events

/// Throws std::runtime_error for a record that is cut or altered.
inline std::vector<ReadEvent> read_events(std::string_view bytes) {
  std::vector<ReadEvent> all;
  while (!bytes.empty()) {
    std::string_view length = bytes.substr(0, 8);
    const std::string_view of_length = length;
    const auto size = events::fixed<std::uint64_t>(length);
    bytes.remove_prefix(8);
    if (events::fixed<std::uint32_t>(bytes) != events::masked_crc(of_length)) throw events::wrong("a length's CRC");
    const std::string_view data = events::take(bytes, size);
    if (events::fixed<std::uint32_t>(bytes) != events::masked_crc(data)) throw events::wrong("an event's CRC");
    ReadEvent event;
    events::parse(data, [&](int number, std::uint64_t value, std::string_view content) {
      if (number == 1) event.wall_time = std::bit_cast<double>(value);
      if (number == 2) event.step = static_cast<std::int64_t>(value);
      if (number == 3) event.version = content;
      if (number == 5)
        events::parse(content, [&](int, std::uint64_t, std::string_view one) { events::add_value(event, one); });
      if (number == 7)
        events::parse(content, [&](int, std::uint64_t status, std::string_view) { event.session_status = status; });
    });
    all.push_back(std::move(event));
  }
  return all;
}

}  // namespace lockstep::testing

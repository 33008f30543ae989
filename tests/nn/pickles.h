// Hand-made files of torch.save().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::nn::testing {

/// A pickle in the making.
struct Pickle {
  std::string bytes = std::string("\x80\x02", 2);

  Pickle& op(const std::string& more) {
    bytes += more;
    return *this;
  }
  Pickle& text(const std::string& value) {
    op("X");
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(value.size() >> shift);
    return op(value);
  }
  Pickle& number(std::int32_t value) {
    op("J");
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(static_cast<std::uint32_t>(value) >> shift);
    return *this;
  }
  Pickle& long_number(std::uint64_t value) {
    op(std::string("\x8a\x08", 2));
    for (int shift = 0; shift < 64; shift += 8) bytes += static_cast<char>(value >> shift);
    return *this;
  }
  Pickle& storage(const std::string& type, std::int32_t elements) {
    op("(").text("storage").op("ctorch\n" + type + "\n").text("0").text("cpu").number(elements);
    return op("tQ");
  }
  /// "weight", of a storage of `elements`.
  Pickle& tensor(std::int32_t elements, std::int64_t offset, const std::vector<std::int64_t>& sizes,
                 const std::vector<std::int64_t>& strides) {
    return text("weight").unnamed_tensor(elements, offset, sizes, strides);
  }
  Pickle& unnamed_tensor(std::int32_t elements, std::int64_t offset, const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& strides) {
    op("ctorch._utils\n_rebuild_tensor_v2\n(").storage("FloatStorage", elements);
    long_number(static_cast<std::uint64_t>(offset));
    for (const auto& list : {sizes, strides}) {
      op("(");
      for (const std::int64_t each : list) long_number(static_cast<std::uint64_t>(each));
      op("t");
    }
    return op(
        "\x89"
        "NtR");
  }
};

/// The file before PyTorch 1.6, with one storage of 4 floats that claims to have `claimed`.
inline std::string legacy(const std::string& root, std::uint64_t claimed = 4) {
  std::string file("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
  file += std::string("\x80\x02M\xe9\x03.", 6);  // protocol 1001
  file += Pickle().op("}(").text("little_endian").op("\x88u.").bytes;
  file += root;
  file += Pickle().op("](").text("0").op("e.").bytes;
  file.append(reinterpret_cast<const char*>(&claimed), 8);
  const float numbers[4] = {1, 2, 3, 4};
  return file.append(reinterpret_cast<const char*>(numbers), sizeof numbers);
}

/// A dictionary of what `content` has.
inline std::string dictionary(const Pickle& content) {
  return Pickle().op("}(").op(content.bytes.substr(2)).op("u.").bytes;
}

}  // namespace lockstep::nn::testing

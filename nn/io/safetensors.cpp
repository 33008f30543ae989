#include "lockstep/nn/io/safetensors.h"
#include "nn/io/safetensors_writer.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/text.h"

namespace lockstep::nn {
namespace {

static_assert(std::endian::native == std::endian::little, "the file format is little-endian");

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr const char* kMetadata = "__metadata__";
constexpr auto kMaxExtent = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

const char* file_name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "F32";
    case DType::kF64: return "F64";
    case DType::kBF16: return "BF16";
    case DType::kI32: return "I32";
    case DType::kI64: return "I64";
    case DType::kU8: return "U8";
    case DType::kF16: return "F16";
  }
  return "?";
}

// What files have that comes as another type here.
struct FileType {
  DType dtype;
  std::size_t bytes;  // of an element in the file
};

std::optional<FileType> type_from(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kI32, DType::kI64, DType::kU8})
    if (name == file_name_of(dtype)) return FileType{dtype, size_of(dtype)};
  if (name == "F16") return FileType{DType::kF32, sizeof(std::uint16_t)};
  if (name == "BOOL") return FileType{DType::kU8, 1};
  return std::nullopt;
}

std::vector<std::byte> widened(const std::vector<std::byte>& halves) {
  std::vector<std::byte> made(halves.size() * 2);
  for (std::size_t i = 0; i < halves.size() / 2; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, halves.data() + i * sizeof bits, sizeof bits);
    const float value = Float16{bits}.to_float();
    std::memcpy(made.data() + i * sizeof value, &value, sizeof value);
  }
  return made;
}

[[noreturn]] void not_safetensors(const std::string& path, const std::string& why) {
  throw IoError(fmt::format("{} is not a usable safetensors file: {}", path, why),
                "check where it came from, or write it again");
}

struct Entry {
  std::string name;
  FileType type;
  std::vector<std::int64_t> shape;
  std::uint64_t begin, end;  // in the data section
};

nlohmann::json parse_header(const std::string& path, const std::string& text) {
  constexpr int kDeepest = 3;  // the arrays in a tensor's entry: what nests deeper is no header, whatever its size
  try {
    auto header = parse_json(text, kDeepest, sizeof(std::uint64_t));
    if (!header.is_object()) not_safetensors(path, "its header (byte 8) is not a JSON object");
    return header;
  } catch (const JsonError& error) {
    not_safetensors(path, fmt::format("its header {}", error.what()));
  }
}

/// The tensors in the header of a file, whose text is `text`.
struct Header {
  const std::string& path;
  const std::string& text;
  std::uint64_t data_bytes = 0;

  Entry parse_entry(const std::string& name, const nlohmann::json& value) const;
  /// Says where it stands, for nobody finds a name in a line of megabytes.
  [[noreturn]] void refuse_tensor(const std::string& name, const std::string& why) const;
};

void Header::refuse_tensor(const std::string& name, const std::string& why) const {
  const auto at = text.find(fmt::format("\"{}\"", name));  // one with escapes is not found, and none the less named
  not_safetensors(
      path, fmt::format("tensor '{}'{} {}", shown_name(name),
                        at == std::string::npos ? "" : fmt::format(" (byte {})", at + sizeof(std::uint64_t)), why));
}

Entry Header::parse_entry(const std::string& name, const nlohmann::json& value) const {
  try {
    const auto dtype_name = value.at("dtype").get<std::string>();
    const auto type = type_from(dtype_name);
    if (!type) refuse_tensor(name, fmt::format("has the dtype '{}', which is not read", shown_name(dtype_name)));
    Entry entry{name, *type, {}, 0, 0};
    std::uint64_t bytes = type->bytes;
    const auto& shape = value.at("shape");
    if (!shape.is_array()) refuse_tensor(name, "has a shape that is no list");
    for (const auto& extent : shape) {
      const auto number = whole_number(extent, kMaxExtent);
      if (!number) refuse_tensor(name, "has a shape that is no size");
      const std::uint64_t d = *number;
      if (d != 0 && bytes > data_bytes / d) refuse_tensor(name, "is larger than the file");
      bytes *= d;
      entry.shape.push_back(static_cast<std::int64_t>(d));
    }
    const auto& offsets = value.at("data_offsets");
    if (offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
      refuse_tensor(name, "has data_offsets that are no offsets");
    entry.begin = offsets[0].get<std::uint64_t>();
    entry.end = offsets[1].get<std::uint64_t>();
    if (entry.begin > entry.end || entry.end > data_bytes)
      refuse_tensor(name, fmt::format("lies at {}…{} of {} data bytes", entry.begin, entry.end, data_bytes));
    if (entry.end - entry.begin != bytes)
      refuse_tensor(name, fmt::format("has {} bytes where its shape says {}", entry.end - entry.begin, bytes));
    return entry;
  } catch (const nlohmann::json::exception&) {
    refuse_tensor(name, "lacks dtype, shape or data_offsets");
  }
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorHeader>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::uint64_t at = 0;
  for (const auto& tensor : tensors) {
    LOCKSTEP_ASSERT(!header.contains(tensor.name), "two tensors '{}' for {}", tensor.name, path);
    header[tensor.name] = {
        {"dtype", file_name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, at + tensor.bytes}}};
    at += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  const std::uint64_t length = text.size();
  expected_ = sizeof length + length + at;
  add(std::as_bytes(std::span(&length, 1)));
  add(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::add(std::span<const std::byte> bytes) {
  hash_.update(bytes);
  file_.write(bytes);
  written_ += bytes.size();
}

SafetensorsWriter::Written SafetensorsWriter::commit() {
  LOCKSTEP_ASSERT(written_ == expected_, "{} bytes of {}", written_, expected_);
  file_.commit();
  return {.bytes = written_, .sha256 = hash_.finish()};
}

void write_safetensors(const std::string& path, const std::vector<HostTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorHeader> headers;
  for (const auto& tensor : tensors) headers.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes.size()});
  SafetensorsWriter writer(path, headers, metadata);
  for (const auto& tensor : tensors) writer.add(tensor.bytes);
  writer.commit();
}

namespace {

/// An opened file, read up to the data.
struct Opened {
  std::ifstream in;
  std::string text;  // of the header
  nlohmann::json header;
  std::uint64_t data_bytes = 0;
};

Opened open_file(const std::string& path) {
  const RegularFile file = open_regular(path);
  if (!file.problem.empty())
    throw IoError(fmt::format("cannot open weights {}: {}", path, file.problem),
                  file.remedy_or("give the path of a file of weights"));
  Opened opened{.in = std::ifstream(path, std::ios::binary), .text = {}, .header = {}};
  std::ifstream& in = opened.in;
  if (!in)
    throw IoError(fmt::format("cannot open weights {}: {}", path, errno_text(errno)),
                  "give the path of a file of weights");
  const std::uint64_t file_bytes = file.size;
  std::uint64_t header_bytes = 0;
  if (file_bytes < 8 || !in.read(reinterpret_cast<char*>(&header_bytes), 8))
    not_safetensors(path, fmt::format("it ends at byte {}, inside the header's length", file_bytes));
  if (header_bytes > kMaxHeaderBytes || header_bytes > file_bytes - 8)
    not_safetensors(
        path, fmt::format("its first 8 bytes claim a header of {} bytes in a file of {}", header_bytes, file_bytes));
  std::string& text = opened.text;
  text.resize(header_bytes);
  if (!in.read(text.data(), static_cast<std::streamsize>(header_bytes))) not_safetensors(path, "its header is cut");

  opened.header = parse_header(path, text);
  opened.data_bytes = file_bytes - 8 - header_bytes;
  return opened;
}

}  // namespace

std::string shown_name(std::string_view name) { return cut_columns(name, 80); }

std::map<std::string, std::string> read_safetensors_metadata(const std::string& path) {
  const Opened opened = open_file(path);
  const auto found = opened.header.find(kMetadata);
  if (found == opened.header.end()) return {};
  try {
    return found->get<std::map<std::string, std::string>>();
  } catch (const nlohmann::json::exception&) {
    not_safetensors(path, "its __metadata__ is no map from text to text");
  }
}

std::vector<HostTensor> read_safetensors(const std::string& path) {
  auto [in, text, json, data_bytes] = open_file(path);
  const Header header = {path, text, data_bytes};
  std::vector<Entry> entries;
  for (const auto& [name, value] : json.items())
    if (name != kMetadata) entries.push_back(header.parse_entry(name, value));
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t at = 0;
  for (const auto& entry : entries) {
    if (entry.begin != at)
      header.refuse_tensor(
          entry.name, fmt::format("begins at data byte {}, where {} was expected (overlap or hole)", entry.begin, at));
    at = entry.end;
  }
  if (at != data_bytes) not_safetensors(path, fmt::format("{} bytes follow the last tensor", data_bytes - at));

  std::vector<HostTensor> tensors;
  for (auto& entry : entries) {
    HostTensor tensor{entry.name, entry.type.dtype, std::move(entry.shape),
                      std::vector<std::byte>(entry.end - entry.begin)};
    if (!in.read(reinterpret_cast<char*>(tensor.bytes.data()), static_cast<std::streamsize>(tensor.bytes.size())))
      not_safetensors(path, fmt::format("it cannot be read at tensor '{}'", shown_name(tensor.name)));
    if (entry.type.bytes < size_of(tensor.dtype)) tensor.bytes = widened(tensor.bytes);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace lockstep::nn

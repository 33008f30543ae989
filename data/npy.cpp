#include "data/npy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/json_value.h"
#include "base/text.h"
#include "data/file_list.h"
#include "lockstep/base/dtype.h"
#include "lockstep/data/families.h"

namespace lockstep::data {
namespace {

static_assert(std::endian::native == std::endian::little);  // as the files

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kStart = 10;  // bytes before an .npy file's header, which in one of safetensors begins earlier
constexpr std::uint64_t kMostHeader = 1 << 20;
constexpr std::size_t kMostAxes = 8;
constexpr int kMostCounted = 1 << 20;  // classes: what a label says may be wrong
constexpr const char* kWriteAgain = "write it again with numpy.save() of an array of numbers, in C's order";
constexpr const char* kChannels = "channels";

struct NamedType {
  std::string_view npy, safetensors;  // empty: NumPy has none
  ArrayFile::Type type;
  std::size_t bytes;
};
constexpr NamedType kTypes[] = {{"<f2", "F16", ArrayFile::Type::kF16, 2}, {"", "BF16", ArrayFile::Type::kBF16, 2},
                                {"<f4", "F32", ArrayFile::Type::kF32, 4}, {"<f8", "F64", ArrayFile::Type::kF64, 8},
                                {"|u1", "U8", ArrayFile::Type::kU8, 1},   {"|i1", "I8", ArrayFile::Type::kI8, 1},
                                {"<i2", "I16", ArrayFile::Type::kI16, 2}, {"<i4", "I32", ArrayFile::Type::kI32, 4},
                                {"<i8", "I64", ArrayFile::Type::kI64, 8}, {"|b1", "BOOL", ArrayFile::Type::kBool, 1}};

constexpr std::string_view kSafetensors = ".safetensors";
/// "data.safetensors:x" without the tensor's name.
std::string path_of(const std::string& name) {
  const auto end = name.find(std::string(kSafetensors) + ":");
  return end == std::string::npos ? name : name.substr(0, end + kSafetensors.size());
}

/// The dictionary of a header, a Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  struct Header {
    std::string type;
    bool columns_first = false;
    std::vector<std::int64_t> shape;
  };

  Header read() {
    Header header;
    bool type = false, order = false, shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string key = word();
      expect(':');
      if (key == "descr" && !std::exchange(type, true))
        header.type = peek() == '[' ? refuse("it is an array of records, not of numbers") : word();
      else if (key == "fortran_order" && !std::exchange(order, true))
        header.columns_first = flag();
      else if (key == "shape" && !std::exchange(shape, true))
        header.shape = sizes();
      else
        refuse(fmt::format("its header has '{}'", printable(utf8_prefix(key, 40))));
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_blanks();
    if (!rest_.empty() || !type || !order || !shape) refuse("its header is not complete");
    return header;
  }

 private:
  [[noreturn]] std::string refuse(const std::string& why) const {
    throw IoError(fmt::format("{}: {}", printable(path_), why), kWriteAgain);
  }
  void skip_blanks() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \n"), rest_.size())); }
  char peek() {
    skip_blanks();
    return rest_.empty() ? '\0' : rest_.front();
  }
  bool accept(char c) {
    if (peek() != c || rest_.empty()) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!accept(c)) refuse(fmt::format("its header lacks a '{}'", c));
  }
  std::string word() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') refuse("its header has no text where one should be");
    const std::size_t end = rest_.find(quote, 1);
    if (end == std::string_view::npos) refuse("its header has a quote that is not closed");
    std::string text(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return text;
  }
  bool flag() {
    skip_blanks();
    for (const bool value : {false, true})
      if (const std::string_view name = value ? "True" : "False"; rest_.starts_with(name)) {
        rest_.remove_prefix(name.size());
        return value;
      }
    refuse("its header does not say which order its numbers have");
    return false;
  }
  std::vector<std::int64_t> sizes() {
    std::vector<std::int64_t> all;
    expect('(');
    while (!accept(')')) {
      skip_blanks();
      const std::size_t digits = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
      const auto size = parse_int(rest_.substr(0, digits));
      if (!size || all.size() == kMostAxes) refuse("its header has a shape that is none");
      rest_.remove_prefix(digits);
      all.push_back(*size);
      if (!accept(',') && peek() != ')') refuse("its header has a shape that is none");
    }
    return all;
  }

  std::string_view rest_;
  const std::string& path_;
};

template <class T, class Out>
void convert(std::span<const std::byte> bytes, std::span<Out> out, float divisor = 1) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>)
      out[i] = static_cast<Out>(value.to_float());
    else if constexpr (std::is_same_v<Out, float>)
      out[i] = static_cast<float>(value) / divisor;
    else
      out[i] = static_cast<Out>(value);  // NOLINT(bugprone-signed-char-misuse): numbers, and no characters
  }
}

}  // namespace

ArrayFile::ArrayFile(const std::string& name) : file_(path_of(name)) {
  const std::string start = text_at(0, std::min<std::uint64_t>(kStart, file_.size()));
  const bool is_json = start.size() > sizeof(std::uint64_t) && start[sizeof(std::uint64_t)] == '{';
  if (path().ends_with(kSafetensors) || (is_json && !start.starts_with(kMagic)))
    open_safetensors(name.substr(std::min(path().size() + 1, name.size())));
  else
    open_npy(start);
}

void ArrayFile::refuse(const std::string& why, const std::string& remedy) const {
  throw IoError(fmt::format("{}: {}", printable(path()), why), remedy);
}

std::string ArrayFile::text_at(std::uint64_t offset, std::uint64_t count) const {
  if (offset + count > file_.size())
    refuse(fmt::format("it ends at byte {}, in its header", file_.size()), "it was cut: fetch or write it again");
  const auto bytes = file_.read(offset, static_cast<std::size_t>(count));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void ArrayFile::open_npy(const std::string& start) {
  if (!start.starts_with(kMagic) || start.size() < kStart)
    refuse(start.starts_with("PK") ? "it is an archive of arrays (.npz)" : "it is no NumPy array",
           start.starts_with("PK") ? "write each array into a file of its own, with numpy.save()" : kWriteAgain);
  const auto byte = [](const std::string& text, std::size_t i) {
    return std::uint64_t{static_cast<unsigned char>(text[i])};
  };
  const std::uint64_t version = byte(start, 6);
  if (version < 1 || version > 3) refuse(fmt::format("its format has the version {}", version), kWriteAgain);
  std::uint64_t length = byte(start, 8) | byte(start, 9) << 8;
  begin_ = kStart;
  if (version > 1) {
    const std::string more = text_at(kStart, 2);
    length |= byte(more, 0) << 16 | byte(more, 1) << 24;
    begin_ += 2;
  }
  if (length > kMostHeader) refuse("its header is too long", kWriteAgain);
  const std::string text = text_at(begin_, length);
  begin_ += length;
  const auto header = HeaderReader(text, path()).read();
  const auto* const named =
      std::ranges::find_if(kTypes, [&](const NamedType& one) { return !one.npy.empty() && one.npy == header.type; });
  if (named == std::end(kTypes))
    refuse(fmt::format("its numbers are of type '{}', which is not read", printable(header.type)),
           "convert it: numpy.save(FILE, array.astype('float32')), or to int64 for classes");
  type_ = named->type;
  shape_ = header.shape;
  if (header.columns_first && shape_.size() > 1)
    refuse("its numbers are in Fortran's order", "write it again: numpy.save(FILE, numpy.ascontiguousarray(array))");
  settle(named->bytes, file_.size() - begin_);
}

/// The format: 8 bytes of the header's length, that header in JSON, {"x": {"dtype": "F32", "shape": [2, 3],
/// "data_offsets": [0, 24]}, …}, and the tensors, whose offsets begin after it.
void ArrayFile::open_safetensors(const std::string& tensor) {
  constexpr const char* kAgain = "write it again with safetensors.torch.save_file(), or give a NumPy array";
  std::uint64_t length = 0;
  const std::string start = text_at(0, sizeof length);
  std::memcpy(&length, start.data(), sizeof length);
  if (length > kMostHeader) refuse("it is no safetensors file: its header is too long", kAgain);
  begin_ = sizeof length + length;
  try {
    constexpr int kDeepest = 8;
    const nlohmann::json header = parse_json(text_at(sizeof length, length), kDeepest, sizeof length);
    std::vector<std::string> names;
    for (const auto& [name, value] : header.items())
      if (name != "__metadata__") names.push_back(name);
    const std::string wanted = tensor.empty() && names.size() == 1 ? names.front() : tensor;
    if (std::ranges::find(names, wanted) == names.end())
      refuse(tensor.empty() ? fmt::format("it has {} tensors", names.size())
                            : fmt::format("it has no tensor '{}'", printable(tensor)),
             names.empty() ? kAgain
                           : fmt::format("name one of them: npy:{}:{}", printable(path()), printable(names.front())));
    const nlohmann::json& entry = header.at(wanted);
    const auto type = entry.at("dtype").get<std::string>();
    const auto* const named = std::ranges::find(kTypes, type, &NamedType::safetensors);
    if (named == std::end(kTypes))
      refuse(fmt::format("'{}' is of type {}, which is not read", printable(wanted), printable(type)), kAgain);
    type_ = named->type;
    const auto offset = [&](std::size_t i) {
      const auto value = whole_number(entry.at("data_offsets").at(i), file_.size());
      return value ? *value : std::numeric_limits<std::uint64_t>::max();
    };
    const std::uint64_t first = offset(0), end = offset(1);
    if (first > end || end > file_.size() - begin_)
      refuse(fmt::format("'{}' lies outside of it", printable(wanted)),
             "it was cut, or changed: fetch or write it again");
    for (const nlohmann::json& extent : entry.at("shape")) {
      const auto value = whole_number(extent, std::numeric_limits<std::int64_t>::max());
      if (!value || shape_.size() == kMostAxes) refuse(fmt::format("'{}' has no shape", printable(wanted)), kAgain);
      shape_.push_back(static_cast<std::int64_t>(*value));
    }
    begin_ += first;
    settle(named->bytes, end - first);
  } catch (const JsonError& error) {
    refuse(fmt::format("its header {}", error.what()), kAgain);
  } catch (const nlohmann::json::exception&) {
    refuse("its header lacks a tensor's type, shape or place", kAgain);
  }
}

void ArrayFile::settle(std::size_t element_bytes, std::uint64_t data_bytes) {
  if (shape_.empty() || shape_[0] == 0) refuse("it has no rows", "give an array with a row for each sample");
  std::uint64_t bytes = element_bytes;
  for (const std::int64_t size : shape_)
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) || bytes > file_.size()) {
      bytes = std::numeric_limits<std::uint64_t>::max();
      break;
    }
  if (bytes != data_bytes)
    refuse(fmt::format("it has {} bytes of data, and its header says another number", data_bytes),
           "it was cut, or changed: fetch or write it again");
  for (std::size_t i = 1; i < shape_.size(); ++i) row_elements_ *= static_cast<std::size_t>(shape_[i]);
  if (row_elements_ == 0) refuse("its rows have no numbers", "give an array with some numbers in each row");
  row_bytes_ = row_elements_ * element_bytes;
}

std::span<const std::byte> ArrayFile::row(std::uint64_t index) const {
  LOCKSTEP_ASSERT(index < rows(), "row {} of {}", index, rows());
  return file_.read(begin_ + index * row_bytes_, row_bytes_);
}

void ArrayFile::read_row(std::uint64_t index, std::span<float> out) const {
  LOCKSTEP_ASSERT(out.size() == row_elements_);
  const auto bytes = row(index);
  switch (type_) {
    case Type::kF16: return convert<Float16>(bytes, out);
    case Type::kBF16: return convert<BFloat16>(bytes, out);
    case Type::kF32: return convert<float>(bytes, out);
    case Type::kF64: return convert<double>(bytes, out);
    case Type::kU8: return convert<std::uint8_t>(bytes, out, 255);
    case Type::kI8: return convert<std::int8_t>(bytes, out);
    case Type::kI16: return convert<std::int16_t>(bytes, out);
    case Type::kI32: return convert<std::int32_t>(bytes, out);
    case Type::kI64: return convert<std::int64_t>(bytes, out);
    case Type::kBool: return convert<std::uint8_t>(bytes, out);
  }
}

void ArrayFile::read_row(std::uint64_t index, std::span<std::int32_t> out) const {
  LOCKSTEP_ASSERT(out.size() == row_elements_ && is_integer());
  const auto bytes = row(index);
  switch (type_) {
    case Type::kU8:
    case Type::kBool: return convert<std::uint8_t>(bytes, out);
    case Type::kI8: return convert<std::int8_t>(bytes, out);
    case Type::kI16: return convert<std::int16_t>(bytes, out);
    case Type::kI32: return convert<std::int32_t>(bytes, out);
    default: break;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::int64_t value = 0;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    if (!std::in_range<std::int32_t>(value))
      throw IoError(fmt::format("{}: row {} has {}, which is no class", printable(path()), index, value),
                    "number the classes from 0");
    out[i] = static_cast<std::int32_t>(value);
  }
}

namespace {

/// Which rows a part has.
enum class NpyPart : std::uint8_t { kAll, kTrain, kHeldOut };

struct NpyPair {
  ArrayFile x, y;
  bool channels_first = false;
  std::vector<float> targets = {};  // (N, …), of numbers, or
  std::vector<std::int32_t> labels = {};
};

class NpyRows final : public Dataset {
 public:
  NpyRows(Info info, std::shared_ptr<const NpyPair> pair, std::vector<std::uint64_t> rows)
      : Dataset(std::move(info)), pair_(std::move(pair)), rows_(std::move(rows)) {}

  void read_sample(std::uint64_t index, const Sample& sample) const override {
    const std::uint64_t row = rows_.empty() ? index : rows_[index];
    if (pair_->channels_first) {
      thread_local std::vector<float> planes;
      planes.resize(sample.x.size());
      pair_->x.read_row(row, std::span(planes));
      const auto channels = static_cast<std::size_t>(sample_dims()[2]), pixels = planes.size() / channels;
      for (std::size_t p = 0; p < pixels; ++p)
        for (std::size_t c = 0; c < channels; ++c) sample.x[p * channels + c] = planes[c * pixels + p];
    } else {
      pair_->x.read_row(row, sample.x);
    }
    const std::size_t each = targets_per_sample(), first = row * each;
    if (has_numeric_targets())
      std::copy_n(pair_->targets.begin() + static_cast<std::ptrdiff_t>(first), each, sample.targets.begin());
    else
      std::copy_n(pair_->labels.begin() + static_cast<std::ptrdiff_t>(first), each, sample.labels.begin());
  }

 private:
  std::shared_ptr<const NpyPair> pair_;
  std::vector<std::uint64_t> rows_;  // empty: all
};

/// `channels`: as --channels says.
std::vector<std::int64_t> sample_dims(const ArrayFile& x, const std::string& channels) {
  std::vector<std::int64_t> dims(x.shape().begin() + 1, x.shape().end());
  if (dims.empty()) dims = {1};
  if (dims.size() == 2) dims.push_back(1);
  if (dims.size() > 3)
    throw IoError(fmt::format("{}: its rows have {} axes", printable(x.path()), dims.size()),
                  "give (N, F), (N, H, W) or (N, H, W, C)");
  const auto is_count = [](std::int64_t n) { return n == 1 || n == 3; };
  if (x.shape().size() == 4 && channels.empty() && is_count(dims[0]) && !is_count(dims[2]))
    throw IoError(fmt::format("{}: its rows are {}x{}x{}: channels seem to be first", printable(x.path()), dims[0],
                              dims[1], dims[2]),
                  "give --channels first, or, where they are last, --channels last");
  if (!channels.empty() && x.shape().size() != 4)
    throw UsageError(
        fmt::format("--channels {} for {}, which is {}-dimensional", channels, printable(x.path()), x.shape().size()),
        "leave it out: it is for images, (N, H, W, C) or (N, C, H, W)");
  if (channels == "first") std::rotate(dims.begin(), dims.begin() + 1, dims.end());
  return dims;
}

/// Reads all targets. Returns how many classes they are of; 0: they are numbers. `ignored`, where there is one, is no
/// class; it becomes nothing if no label is it.
int read_targets(NpyPair& pair, std::optional<std::int32_t>& ignored) {
  const ArrayFile& y = pair.y;
  const std::size_t each = y.row_elements();
  if (!y.is_integer()) {
    pair.targets.resize(y.rows() * each);
    for (std::uint64_t row = 0; row < y.rows(); ++row) {
      const auto out = std::span(pair.targets).subspan(row * each, each);
      y.read_row(row, out);
      if (std::ranges::any_of(out, [](float value) { return !std::isfinite(value); }))
        throw IoError(fmt::format("{}: row {} has a target that is not finite", printable(y.path()), row),
                      "take such rows out of both files");
    }
    return 0;
  }
  pair.labels.resize(y.rows() * each);
  std::int32_t most = -1;
  bool ignores = false;
  for (std::uint64_t row = 0; row < y.rows(); ++row) {
    const auto out = std::span(pair.labels).subspan(row * each, each);
    y.read_row(row, out);
    for (const std::int32_t label : out) {
      if (label == ignored) {
        ignores = true;
        continue;
      }
      if (label < 0 || label >= 1 << 24)
        throw IoError(fmt::format("{}: row {} has {}, which is no class", printable(y.path()), row, label),
                      "number the classes from 0; numbers to predict are floats: array.astype('float32')");
      most = std::max(most, label);
    }
  }
  if (most < 0 && ignores)
    throw IoError(fmt::format("{}: all of its labels are {}, which is ignored", printable(y.path()), *ignored),
                  "give labels of classes too");
  if (!ignores) ignored.reset();
  return std::max(most, 0) + 1;
}

}  // namespace

DataSplits open_npy(const std::string& argument, const OpenOptions& options) {
  const auto files = split(argument, ',');
  if (files.size() != 2 || files[0].empty() || files[1].empty())
    throw UsageError(fmt::format("data 'npy:{}' names no two files", argument),
                     "give the samples and their targets: npy:X.npy,Y.npy");
  const std::string& channels = options.settings.word(kChannels);
  auto pair = std::make_shared<NpyPair>(
      NpyPair{.x = ArrayFile(files[0]), .y = ArrayFile(files[1]), .channels_first = channels == "first"});
  if (pair->x.rows() != pair->y.rows())
    throw IoError(fmt::format("{} has {} rows, and {} has {}", printable(files[0]), pair->x.rows(), printable(files[1]),
                              pair->y.rows()),
                  "give a target for each sample");
  const auto dims = sample_dims(pair->x, channels);
  std::optional<std::int32_t> ignored = options.ignored_label;
  const int found = read_targets(*pair, ignored);
  if (options.classes > 0 && options.classes < std::max(found, 1))
    throw UsageError(fmt::format("--classes {} for {}, which has {}", options.classes, printable(files[1]), found),
                     fmt::format("leave --classes out, or give {} or more", found));
  if (options.classes > 0 && found == 0)
    throw UsageError(
        fmt::format("--classes {} for {}, whose targets are numbers", options.classes, printable(files[1])),
        "leave --classes out");
  const auto part = [&](const std::string& name, NpyPart which) {
    std::vector<std::uint64_t> rows;
    if (which != NpyPart::kAll)
      for (std::uint64_t row = 0; row < pair->x.rows(); ++row)
        if (is_held_out(row) == (which == NpyPart::kHeldOut)) rows.push_back(row);
    Dataset::Info info{.name = "npy " + printable(files[0]) + name,
                       .size = which == NpyPart::kAll ? pair->x.rows() : rows.size(),
                       .dims = dims,
                       .classes = found > 0 ? std::max(found, options.classes) : 0,
                       .target_dims = {pair->y.shape().begin() + 1, pair->y.shape().end()},
                       .numeric_targets = found == 0,
                       .ignored_label = ignored};
    if (found == 0 && info.target_dims.empty()) info.target_dims = {1};
    if (found == 0) {
      const auto [least, most] = std::ranges::minmax_element(pair->targets);
      info.target_range = {*least, *most};
    }
    if (found > 0 && info.target_dims == std::vector<std::int64_t>{1}) info.target_dims = {};  // (N, 1)
    if (found > 0 && found <= kMostCounted && info.target_dims.empty()) {
      info.class_counts.resize(static_cast<std::size_t>(info.classes));
      for (std::uint64_t i = 0; i < info.size; ++i)
        if (const std::int32_t label = pair->labels[rows.empty() ? i : rows[i]]; label != ignored)
          ++info.class_counts[static_cast<std::size_t>(label)];
    }
    return std::make_shared<const NpyRows>(std::move(info), pair, std::move(rows));
  };
  if (options.parts.whole) return {.whole = part("", NpyPart::kAll)};
  if (pair->x.rows() < kNthForValidation)
    throw IoError(
        fmt::format("{}: {} rows are too few: a tenth is for validation", printable(files[0]), pair->x.rows()),
        "add rows");
  return {.train = part(" train", NpyPart::kTrain), .validation = part(" validation", NpyPart::kHeldOut)};
}

const DatasetFamily& npy_family() {
  static const DatasetFamily family = {.name = "npy",
                                       .argument = "X.npy,Y.npy",
                                       .about = "NumPy arrays, or tensors of safetensors",
                                       .remedy = "the samples and their targets",
                                       .settings = {{.name = kChannels,
                                                     .fallback = "",
                                                     .help = "which axis of images in arrays is that of their channels",
                                                     .placeholder = "last|first",
                                                     .default_text = "last",
                                                     .choices = {"last", "first"}}},
                                       .open = [](const std::string&, const std::string& argument,
                                                  const OpenOptions& options) { return open_npy(argument, options); },
                                       .files =
                                           [](const std::string& argument) {
                                             auto files = split(argument, ',');
                                             for (std::string& file : files) file = path_of(file);
                                             return files;
                                           }};
  return family;
}

}  // namespace lockstep::data

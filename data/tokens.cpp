#include "data/tokens.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/text_file.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

static_assert(std::endian::native == std::endian::little);  // as the files

constexpr const char* kTokenType = "token-type";
constexpr std::uint64_t kMostChecked = std::uint64_t{1} << 30;  // bytes that are read when a file is opened

struct TokenLayout {
  TokenType type = TokenType::kU16;
  std::uint64_t begin = 0;  // bytes before the tokens

  std::size_t bytes() const { return type == TokenType::kU16 ? 2 : 4; }
  const char* name() const { return type == TokenType::kU16 ? "u16" : "u32"; }
};

template <class T>
T value_at(std::span<const std::byte> bytes, std::size_t i) {
  T value = 0;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

/// Token `i` of `bytes`.
std::uint32_t token_at(std::span<const std::byte> bytes, std::size_t i, TokenType type) {
  return type == TokenType::kU16 ? value_at<std::uint16_t>(bytes, i) : value_at<std::uint32_t>(bytes, i);
}

/// Of a text, not of tokens: some of which have a byte that no text has.
bool is_text(std::span<const std::byte> beginning) {
  constexpr std::size_t kLeast = 64;
  std::string_view text(reinterpret_cast<const char*>(beginning.data()), beginning.size());
  if (text.size() < kLeast) return false;
  text = utf8_prefix(text, text.size() - 1);
  constexpr std::string_view kControls = "\t\n\r\f";
  if (std::ranges::any_of(text, [&](char c) { return c >= 0 && c < ' ' && kControls.find(c) == kControls.npos; }))
    return false;
  return is_utf8(text);
}

/// How many bytes numbers have that look like pairs, or fours, of 16 bits, of which the later ones are 0 or next to it;
/// 2: they do not.
std::size_t width_of_numbers(std::span<const std::byte> beginning) {
  constexpr std::size_t kLeast = 16, kLanes = 4;
  constexpr std::uint16_t kFewHigh = 15, kManyLow = 0x1000;  // of vocabularies beyond 16 bits
  const std::size_t count = beginning.size() / (2 * kLanes);
  if (count < kLeast) return 2;
  std::array<std::uint16_t, kLanes> most{};
  for (std::size_t i = 0; i < kLanes * count; ++i)
    most[i % kLanes] = std::max(most[i % kLanes], value_at<std::uint16_t>(beginning, i));
  const auto is_low_and_high = [&](std::uint16_t low, std::uint16_t high) {
    return (high == 0 && low > 0) || (high <= kFewHigh && low >= kManyLow);
  };
  if (most[2] == 0 && most[3] == 0 && is_low_and_high(most[0], most[1])) return 8;
  return is_low_and_high(std::max(most[0], most[2]), std::max(most[1], most[3])) ? 4 : 2;
}

/// What llm.c writes before tokens: 256 numbers of 32 bits, the first three of which are these and the number of
/// tokens.
struct LlmcHeader {
  std::uint32_t magic, version;
  TokenType type;
};
constexpr std::array<LlmcHeader, 2> kLlmcHeaders = {
    {{20240520, 1, TokenType::kU16}, {20240801, 7, TokenType::kU32}}};  // of GPT-2's tokens, of Llama 3's
constexpr std::uint64_t kLlmcBytes = 1024;

/// See Note [Read, not mapped].
class TokenFile {
 public:
  TokenFile(std::string path, std::optional<TokenType> asked, int classes, const std::string& remedy)
      : file_(std::move(path)), asked_(asked) {
    const auto beginning = file_.read(0, static_cast<std::size_t>(std::min<std::uint64_t>(file_.size(), 1 << 16)));
    refuse_other_kinds(beginning);
    if (!take_header(beginning)) {
      const std::size_t bytes = width_of_numbers(beginning);
      layout_.type = asked.value_or(TokenType::kU16);
      if (bytes == 8)  // of which every second number of 32 bits is 0, whoever asks for them
        refuse("its numbers seem to have 64 bits", fmt::format("convert them to 32 bits: {}, and give --token-type u32",
                                                               with_numpy("numpy.fromfile(sys.argv[1], '<i8')")));
      if (bytes == 4 && !asked)
        refuse("its numbers seem to have 32 bits: each second one of 16 would be next to 0",
               "give --token-type u32, or u16 if they have 16");
    }
    if ((file_.size() - layout_.begin) % layout_.bytes() != 0)
      refuse(fmt::format("{} bytes are no whole number of {}-bit tokens", file_.size() - layout_.begin,
                         8 * layout_.bytes()),
             "the file is cut, or of another type");
    check_range(classes, remedy);
  }

  const std::string& path() const { return file_.path(); }
  std::uint64_t tokens() const { return (file_.size() - layout_.begin) / layout_.bytes(); }
  TokenType type() const { return layout_.type; }
  std::uint64_t byte_of(std::uint64_t token) const { return layout_.begin + token * layout_.bytes(); }

  /// As RandomAccessFile::read() has it.
  std::span<const std::byte> read(std::uint64_t begin, std::size_t count) const {
    return file_.read(byte_of(begin), count * layout_.bytes());
  }

  [[noreturn]] void refuse_token(std::uint64_t token, std::uint64_t at, int classes, const std::string& remedy) const {
    refuse(fmt::format("token {} at byte {} is out of range for {} tokens", token, byte_of(at), classes), remedy);
  }

 private:
  [[noreturn]] void refuse(const std::string& why, const std::string& remedy) const {
    throw IoError(fmt::format("{}: {}", path(), why), remedy);
  }

  /// A command that writes `array`, an expression of NumPy in which sys.argv[1] is the file, as numbers of 32 bits.
  std::string with_numpy(const char* array) const {
    const std::string code = fmt::format("import numpy, sys; {}.astype('<u4').tofile(sys.argv[2])", array);
    return fmt::format("python3 -c \"{}\" {} {}", code, shell_word(path()), shell_word(path() + ".u32"));
  }

  void refuse_other_kinds(std::span<const std::byte> beginning) const {
    const std::string_view text(reinterpret_cast<const char*>(beginning.data()), beginning.size());
    if (const auto kind = foreign_kind(text))
      refuse(fmt::format("it is {}, not a file of tokens", *kind),
             text.starts_with("\x93NUMPY") ? fmt::format("write its numbers alone: {}, and give --token-type u32",
                                                         with_numpy("numpy.load(sys.argv[1])"))
                                           : "give a file of numbers of 16 or 32 bits alone, little-endian");
    if (is_text(beginning))
      refuse("it is a text, not a file of tokens", fmt::format("read its characters: text:{}", path()));
  }

  /// Whether the file has a header, which says what follows.
  bool take_header(std::span<const std::byte> beginning) {
    if (beginning.size() < kLlmcBytes) return false;
    const auto magic = value_at<std::uint32_t>(beginning, 0), version = value_at<std::uint32_t>(beginning, 1);
    const auto* const header = std::ranges::find(kLlmcHeaders, magic, &LlmcHeader::magic);
    if (header == kLlmcHeaders.end()) return false;
    if (version != header->version)
      refuse(fmt::format("it has a header of llm.c of version {}, and {} is known", version, header->version),
             "write it again with a current llm.c, or without a header");
    layout_ = {.type = header->type, .begin = kLlmcBytes};
    if (asked_ && *asked_ != layout_.type)
      throw UsageError(fmt::format("--token-type for {}, whose header (llm.c's) says {}", path(), layout_.name()),
                       "leave it out");
    const auto promised = value_at<std::uint32_t>(beginning, 2);
    if (promised * layout_.bytes() != file_.size() - kLlmcBytes)
      refuse(fmt::format("its header (llm.c's) says {} tokens of {} bits, and {} bytes follow", promised,
                         8 * layout_.bytes(), file_.size() - kLlmcBytes),
             "the file is cut, or was not written to its end: fetch or write it again");
    log_info("tokens {}: {} of {} bits, after a header of llm.c", path(), promised, 8 * layout_.bytes());
    return true;
  }

  void check_range(int classes, const std::string& remedy) const {
    const std::uint64_t checked = std::min(tokens(), kMostChecked / layout_.bytes());
    constexpr std::uint64_t kPiece = 1 << 18;  // tokens
    std::uint64_t first = checked;
    std::uint32_t largest = 0;
    for (std::uint64_t begin = 0; begin < checked; begin += kPiece) {
      const auto count = static_cast<std::size_t>(std::min(kPiece, checked - begin));
      const auto bytes = read(begin, count);
      const std::uint32_t here =
          layout_.type == TokenType::kU16 ? largest_of<std::uint16_t>(bytes) : largest_of<std::uint32_t>(bytes);
      largest = std::max(largest, here);
      if (first < checked || std::cmp_less(here, classes)) continue;
      first = begin;
      while (std::cmp_less(token_at(bytes, first - begin, layout_.type), classes)) ++first;
    }
    if (first == checked) return;
    const std::uint32_t token = token_at(read(first, 1), 0, layout_.type);
    constexpr std::uint32_t kMostClasses = 1 << 24;
    std::string way = "repair the file";
    if (!remedy.empty())
      way += ", or " + remedy;
    else if (largest < kMostClasses)
      way += fmt::format(", or give the number of tokens: --classes {}, unless --weights say it", largest + 1);
    if (asked_ && *asked_ == TokenType::kU32) way += "; if it has numbers of 16 bits, leave --token-type out";
    refuse_token(token, first, classes, way);
  }

  template <class T>
  static std::uint32_t largest_of(std::span<const std::byte> bytes) {
    T largest = 0;
    for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i) largest = std::max(largest, value_at<T>(bytes, i));
    return largest;
  }

  RandomAccessFile file_;
  std::optional<TokenType> asked_;
  TokenLayout layout_;
};

class Tokens final : public Dataset {
 public:
  Tokens(Info info, std::shared_ptr<const TokenFile> file, TokenRows rows)
      : Dataset(std::move(info)), file_(std::move(file)), rows_(rows) {}

  void read_tokens(std::uint64_t index, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const override {
    LOCKSTEP_ASSERT(index < size() && tokens.size() == sample_elements() && labels.size() == tokens.size());
    const std::uint64_t begin = rows_.begin_of(index);
    const auto bytes = file_->read(begin, tokens.size() + 1);
    for (std::size_t i = 0; i <= tokens.size(); ++i) {
      const std::uint32_t number = token_at(bytes, i, file_->type());
      if (!std::cmp_less(number, classes()))
        file_->refuse_token(number, begin + i, classes(), "repair the file, or give the number of tokens (--classes)");
      const auto token = static_cast<std::int32_t>(number);
      if (i < tokens.size()) tokens[i] = token;
      if (i > 0) labels[i - 1] = token;
    }
  }

 private:
  std::shared_ptr<const TokenFile> file_;
  TokenRows rows_;
};

// val.bin, or test.bin, beside a train.bin; otherwise nothing.
std::string beside(const fs::path& path, const char* name) {
  if (path.filename() != "train.bin") return {};
  const fs::path other = fs::path(path).replace_filename(name);
  std::error_code none;
  return fs::exists(other, none) ? other.string() : std::string();
}

std::uint64_t checked(std::int64_t context) {
  check_usage(context >= 1, "a context of less than one token", "give --context 1 or more");
  return static_cast<std::uint64_t>(context);
}

}  // namespace

TokenRows whole_tokens(std::uint64_t tokens, std::int64_t context, const std::string& source) {
  const TokenRows rows = {.begin = 0, .end = tokens, .context = checked(context)};
  if (rows.count() == 0)
    throw IoError(fmt::format("{}: {} tokens do not make a sample of {}", source, tokens, context),
                  "give a longer file, or a smaller --context");
  return rows;
}

TokenParts split_tokens(std::uint64_t tokens, std::int64_t context, const std::string& source) {
  const std::uint64_t width = checked(context);
  const std::uint64_t train = tokens - tokens / 10;
  const TokenParts parts = {.train = {.begin = 0, .end = train, .context = width},
                            .validation = {.begin = train, .end = tokens, .context = width}};
  if (parts.train.count() == 0 || parts.validation.count() == 0)
    throw IoError(fmt::format("{}: {} tokens do not make a sample of {} for training and one for validation", source,
                              tokens, context),
                  "give a longer text, or a smaller --context");
  return parts;
}

DataSplits open_tokens(const std::string& path, std::int64_t context, int classes, std::optional<TokenType> type,
                       const std::string& remedy, const Parts& parts) {
  const auto open = [&](const std::string& name) {
    return std::make_shared<const TokenFile>(name, type, classes, remedy);
  };
  const auto part = [&](const char* name, const std::shared_ptr<const TokenFile>& file, const TokenRows& rows) {
    return std::make_shared<Tokens>(Dataset::Info{.name = fmt::format("tokens {}{}", file->path(), name),
                                                  .size = rows.count(),
                                                  .dims = {context},
                                                  .classes = classes,
                                                  .tokens = true},
                                    file, rows);
  };
  const auto all_of = [&](const char* name, const std::string& file_name) {
    const auto file = open(file_name);
    return part(name, file, whole_tokens(file->tokens(), context, file_name));
  };
  const std::string validation = beside(path, "val.bin"), test = beside(path, "test.bin");
  if (validation.empty()) {
    if (parts.whole) return {.whole = all_of("", path)};
    const auto file = open(path);
    const TokenParts divided = split_tokens(file->tokens(), context, path);
    return {.train = part(" train", file, divided.train), .validation = part(" validation", file, divided.validation)};
  }
  if (!test.empty() && !parts.test) log_info("{} is left untouched: lockstep eval --split test measures it", test);
  return {.train = all_of(" train", path),
          .validation = all_of(" validation", validation),
          .test = test.empty() || !parts.test ? nullptr : all_of(" test", test)};
}

namespace {

std::optional<TokenType> token_type(const Settings& settings) {
  const std::string& word = settings.word(kTokenType);
  if (word.empty()) return std::nullopt;
  return word == "u16" ? TokenType::kU16 : TokenType::kU32;
}

DataSplits open_masked_tokens(const std::string& path, const OpenOptions& options) {
  const auto& pieces = options.word_pieces->pieces;
  if (pieces == nullptr)
    throw UsageError(fmt::format("{} does not say which of its tokens stands for a masked one", path),
                     "give the vocabulary that it was made with: --vocab vocab.txt");
  if (options.classes > 0 && options.classes != pieces->size())
    throw UsageError(fmt::format("--classes {} with a vocabulary of {}", options.classes, pieces->size()),
                     "leave --classes out");
  return mask_rows(open_tokens(path, masked_row_tokens(options.context), pieces->size(), token_type(options.settings),
                               "give the vocabulary that it was made with: --vocab", options.parts),
                   special_tokens(*pieces), pieces);
}

}  // namespace

const DatasetFamily& tokens_family() {
  static const DatasetFamily family = {.name = "tokens",
                                       .argument = "FILE",
                                       .about = "of 16 or 32 bits",
                                       .settings = {{.name = kTokenType,
                                                     .fallback = "",
                                                     .help = "the numbers in the file, little-endian",
                                                     .placeholder = "u16|u32",
                                                     .default_text = "u16, or what the file's header says",
                                                     .choices = {"u16", "u32"}}},
                                       .has_tokens = true,
                                       .consecutive = true,
                                       .any_classes = true,
                                       .open =
                                           [](const std::string&, const std::string& path, const OpenOptions& options) {
                                             if (options.word_pieces) return open_masked_tokens(path, options);
                                             return open_tokens(path, options.context,
                                                                options.classes > 0 ? options.classes : kGpt2Tokens,
                                                                token_type(options.settings), {}, options.parts);
                                           },
                                       .files = [](const std::string& path) -> std::vector<std::string> {
                                         const std::string other = beside(path, "val.bin");
                                         return other.empty() ? std::vector{path} : std::vector{path, other};
                                       }};
  return family;
}

}  // namespace lockstep::data

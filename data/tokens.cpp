#include "data/tokens.h"

#include <cstddef>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "data/masked.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kTokenBytes = 2;

/// See Note [Read, not mapped].
class TokenFile {
 public:
  explicit TokenFile(std::string path) : file_(std::move(path)) {
    if (file_.size() % kTokenBytes != 0)
      throw IoError(fmt::format("{}: {} bytes are no whole number of 16-bit tokens", file_.path(), file_.size()),
                    "the file is cut, or of another type");
  }

  const std::string& path() const { return file_.path(); }
  std::uint64_t tokens() const { return file_.size() / kTokenBytes; }

  /// As RandomAccessFile::read() has it.
  std::span<const std::byte> read(std::uint64_t begin, std::size_t count) const {
    return file_.read(begin * kTokenBytes, count * kTokenBytes);
  }

 private:
  RandomAccessFile file_;
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
      const auto token = std::to_integer<std::int32_t>(bytes[kTokenBytes * i]) |
                         std::to_integer<std::int32_t>(bytes[kTokenBytes * i + 1]) << 8;
      if (token >= classes())
        throw IoError(fmt::format("{}: token {} at byte {} is out of range for {} tokens", file_->path(), token,
                                  (begin + i) * kTokenBytes, classes()),
                      "repair the file, or give the number of tokens (--classes)");
      if (i < tokens.size()) tokens[i] = token;
      if (i > 0) labels[i - 1] = token;
    }
  }

 private:
  std::shared_ptr<const TokenFile> file_;
  TokenRows rows_;
};

// val.bin beside a train.bin; otherwise nothing.
fs::path validation_of(const fs::path& path) {
  return path.filename() == "train.bin" ? fs::path(path).replace_filename("val.bin") : fs::path();
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

DataSplits open_tokens(const std::string& path, std::int64_t context, int classes) {
  const auto open = [](const std::string& name) { return std::make_shared<const TokenFile>(name); };
  const auto part = [&](const char* name, const std::shared_ptr<const TokenFile>& file, const TokenRows& rows) {
    return std::make_shared<Tokens>(Dataset::Info{.name = fmt::format("tokens {} {}", file->path(), name),
                                                  .size = rows.count(),
                                                  .dims = {context},
                                                  .classes = classes,
                                                  .tokens = true},
                                    file, rows);
  };
  const auto file = open(path);
  const fs::path beside = validation_of(path);
  if (beside.empty() || !fs::exists(beside)) {
    const TokenParts parts = split_tokens(file->tokens(), context, path);
    return {part("train", file, parts.train), part("validation", file, parts.validation)};
  }
  const auto other = open(beside.string());
  return {part("train", file, whole_tokens(file->tokens(), context, path)),
          part("validation", other, whole_tokens(other->tokens(), context, beside.string()))};
}

namespace {

DataSplits open_masked_tokens(const std::string& path, const OpenOptions& options) {
  const auto& pieces = options.word_pieces->pieces;
  if (pieces == nullptr)
    throw UsageError(fmt::format("{} does not say which of its tokens stands for a masked one", path),
                     "give the vocabulary that it was made with: --vocab vocab.txt");
  if (options.classes > 0 && options.classes != pieces->size())
    throw UsageError(fmt::format("--classes {} with a vocabulary of {}", options.classes, pieces->size()),
                     "leave --classes out");
  return mask_rows(open_tokens(path, masked_row_tokens(options.context), pieces->size()), special_tokens(*pieces),
                   pieces);
}

}  // namespace

const DatasetFamily& tokens_family() {
  static const DatasetFamily family = {.name = "tokens",
                                       .argument = "FILE",
                                       .about = "16-bit",
                                       .has_tokens = true,
                                       .consecutive = true,
                                       .any_classes = true,
                                       .open =
                                           [](const std::string&, const std::string& path, const OpenOptions& options) {
                                             if (options.word_pieces) return open_masked_tokens(path, options);
                                             return open_tokens(path, options.context,
                                                                options.classes > 0 ? options.classes : kGpt2Tokens);
                                           },
                                       .files = [](const std::string& path) -> std::vector<std::string> {
                                         const fs::path beside = validation_of(path);
                                         return beside.empty() ? std::vector{path} : std::vector{path, beside.string()};
                                       }};
  return family;
}

}  // namespace lockstep::data

#include "data/tokens.h"

#include <cstring>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "base/mapped_file.h"
#include "data/token_rows.h"

namespace lockstep::data {
namespace {

constexpr std::size_t kTokenBytes = 2;

class Tokens final : public Dataset {
 public:
  Tokens(Info info, std::shared_ptr<const MappedFile> file, TokenRows rows)
      : Dataset(std::move(info)), file_(std::move(file)), rows_(rows) {}

  void read_tokens(std::uint64_t index, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const override {
    LOCKSTEP_ASSERT(index < size() && tokens.size() == sample_elements() && labels.size() == tokens.size());
    const std::uint64_t begin = rows_.begin_of(index);
    for (std::size_t i = 0; i <= tokens.size(); ++i) {
      const std::int32_t token = at(begin + i);
      if (i < tokens.size()) tokens[i] = token;
      if (i > 0) labels[i - 1] = token;
    }
  }

 private:
  std::int32_t at(std::uint64_t place) const {
    unsigned char bytes[kTokenBytes];
    std::memcpy(bytes, file_->bytes().data() + place * kTokenBytes, kTokenBytes);
    const std::int32_t token = bytes[0] | bytes[1] << 8;
    if (token >= classes())
      throw IoError(fmt::format("{}: token {} at byte {} is out of range for {} tokens", file_->path(), token,
                                place * kTokenBytes, classes()),
                    "repair the file, or give the number of tokens (--classes)");
    return token;
  }

  std::shared_ptr<const MappedFile> file_;
  TokenRows rows_;
};

std::uint64_t tokens_in(const MappedFile& file) {
  if (file.bytes().size() % kTokenBytes != 0)
    throw IoError(fmt::format("{}: {} bytes are no whole number of 16-bit tokens", file.path(), file.bytes().size()),
                  "the file is cut, or of another type");
  return file.bytes().size() / kTokenBytes;
}

}  // namespace

DataSplits open_tokens(const std::string& path, std::int64_t context, int classes) {
  const auto open = [](const std::string& name) { return std::make_shared<const MappedFile>(name); };
  const auto part = [&](const char* name, const std::shared_ptr<const MappedFile>& file, const TokenRows& rows) {
    return std::make_shared<Tokens>(Dataset::Info{.name = fmt::format("tokens {} {}", file->path(), name),
                                                  .size = rows.count(),
                                                  .dims = {context},
                                                  .classes = classes,
                                                  .tokens = true},
                                    file, rows);
  };
  const auto file = open(path);
  const std::filesystem::path beside = std::filesystem::path(path).replace_filename("val.bin");
  if (std::filesystem::path(path).filename() != "train.bin" || !std::filesystem::exists(beside)) {
    const TokenParts parts = split_tokens(tokens_in(*file), context, path);
    return {part("train", file, parts.train), part("validation", file, parts.validation)};
  }
  const auto other = open(beside.string());
  return {part("train", file, whole_tokens(tokens_in(*file), context, path)),
          part("validation", other, whole_tokens(tokens_in(*other), context, beside.string()))};
}

}  // namespace lockstep::data

// tokens_of pieces VOCAB.TXT [yes|no], tokens_of pairs VOCAB.JSON MERGES.TXT: lockstep's side of
// scripts/try-tokenizers. Reads texts from standard input, each after its length in bytes, and writes their tokens,
// each row after its length; all are little-endian numbers of 32 bits. yes and no are --cased.
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/word_pieces.h"

namespace {

using lockstep::data::BytePairs;
using lockstep::data::Vocabulary;
using lockstep::data::WordPieces;

std::shared_ptr<const Vocabulary> open_vocabulary(const std::vector<std::string>& arguments) {
  if (arguments.size() == 3 && arguments[0] == "pairs")
    return std::make_shared<const BytePairs>(arguments[1], arguments[2]);
  if ((arguments.size() == 2 || arguments.size() == 3) && arguments[0] == "pieces")
    return WordPieces::read(arguments[1],
                            arguments.size() == 2 ? std::nullopt : std::optional<bool>(arguments[2] == "yes"));
  throw lockstep::UsageError("tokens_of: wrong arguments", "see scripts/try-tokenizers");
}

bool read_number(std::uint32_t& number) { return std::fread(&number, sizeof number, 1, stdin) == 1; }

}  // namespace

int main(int count, char** arguments) try {
  const auto vocabulary = open_vocabulary({arguments + 1, arguments + count});
  std::string text;
  for (std::uint32_t length = 0; read_number(length);) {
    text.resize(length);
    if (std::fread(text.data(), 1, length, stdin) != length) return 3;
    const auto tokens = vocabulary->encode(text, "standard input");
    const auto size = static_cast<std::uint32_t>(tokens.size());
    std::fwrite(&size, sizeof size, 1, stdout);
    std::fwrite(tokens.data(), sizeof tokens[0], tokens.size(), stdout);
  }
  return std::fflush(stdout) == 0 ? 0 : 3;
} catch (const lockstep::Error& error) {
  std::fprintf(stderr, "tokens_of: %s -> %s\n", error.what(), error.remedy().c_str());
  return 2;
}

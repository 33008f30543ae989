// tokenizer_config.json, tokenizer.json and added_tokens.json, with a zero byte between: they are refused, or what they
// add has the numbers that follow the vocabulary's.
#include "data/tokenizer_files.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::data;
  for (const TokenizerKind kind : {TokenizerKind::kBert, TokenizerKind::kGpt2})
    lockstep::fuzz::parse([&] {
      std::string_view rest = lockstep::fuzz::text_of(data, size);
      const auto files = parse_tokenizer_files("input", kind, [&](const std::string&, const auto& parse) {
        const std::string_view part = rest.substr(0, rest.find('\0'));
        rest.remove_prefix(std::min(rest.size(), part.size() + 1));
        if (!part.empty()) parse(part);
      });
      std::vector<std::string> pieces = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
      append_added_tokens(files, pieces, "input");
      for (const auto& [name, number] : files.added)
        if (pieces.at(static_cast<std::size_t>(number)) != name) std::abort();
    });
  return 0;
}

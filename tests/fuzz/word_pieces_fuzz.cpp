// A vocabulary of word pieces and, after a zero byte, a text: each token is of the vocabulary, and what can be learned
// from a text knows its words.
#include "data/word_pieces.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view all = lockstep::fuzz::text_of(data, size);
  const std::string_view lines = all.substr(0, all.find('\0')),
                         text = all.substr(std::min(all.size(), lines.size() + 1));
  return lockstep::fuzz::parse([&] {
    lockstep::data::WordPieceLearner learner;
    learner.add(text, "input");
    const auto learned = learner.learn(64);
    if (learned->size() > 64) std::abort();
    static_cast<void>(learned->decode(learned->encode(text, "input")));
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < lines.size();) {
      const std::size_t end = std::min(lines.find('\n', at), lines.size());
      pieces.emplace_back(lines.substr(at, end - at));
      at = end + 1;
    }
    const lockstep::data::WordPieces given(std::move(pieces), "input");
    for (const auto token : given.encode(text, "input"))
      if (token < 0 || token >= given.size()) std::abort();
  });
}

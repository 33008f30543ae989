#include "data/tokens.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = lockstep::fuzz::file_of(data, size);
  return lockstep::fuzz::parse([&] {
    constexpr int kContext = 3, kTokens = 1000;
    const auto splits = lockstep::data::open_tokens(path, kContext, kTokens);
    for (const auto& part : {splits.train, splits.validation})
      for (std::uint64_t i = 0; i < part->size(); ++i) {
        std::int32_t tokens[kContext], labels[kContext];
        part->read_tokens(i, tokens, labels);
        for (const std::int32_t token : tokens)
          if (token < 0 || token >= kTokens) std::abort();
      }
  });
}

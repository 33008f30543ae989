// UTF-8 in, tokens, and the same UTF-8 out.
#include "data/text.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto text = lockstep::fuzz::text_of(data, size);
  return lockstep::fuzz::parse([&] {
    const lockstep::data::Characters characters(text, "input");
    if (characters.decode(characters.encode(text, "input")) != text) std::abort();
  });
}

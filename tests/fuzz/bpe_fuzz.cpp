// vocab.json, merges.txt and a text, with a zero byte between, or tokenizer.json, nothing and a text: what can be
// encoded comes back.
#include "data/vocabulary.h"

#include "tests/fuzz/fuzz.h"

namespace {

/// A file in memory of its own for each part.
std::string part_file(int fd, std::string_view content) {
  if (fd < 0 || ::ftruncate(fd, 0) != 0 ||
      ::pwrite(fd, content.data(), content.size(), 0) != static_cast<ssize_t>(content.size()))
    std::abort();
  return "/proc/self/fd/" + std::to_string(fd);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int kVocabulary = ::memfd_create("vocab", MFD_CLOEXEC), kMerges = ::memfd_create("merges", MFD_CLOEXEC);
  std::string_view rest = lockstep::fuzz::text_of(data, size);
  const auto next = [&] {
    const std::string_view part = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    return part;
  };
  const std::string_view vocabulary = next(), merges = next();
  return lockstep::fuzz::parse([&] {
    const std::string path = part_file(kVocabulary, vocabulary);
    const lockstep::data::BytePairs pairs(
        path, vocabulary.find("\"merges\"") != std::string_view::npos ? std::string() : part_file(kMerges, merges));
    if (pairs.decode(pairs.encode(rest, "input")) != rest) std::abort();
  });
}

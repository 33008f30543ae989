// fuzz_driver TARGET MUTATIONS DIRECTORY…: runs a fuzz target on each file of the directories (except scripts and their
// notes), and on so many mutations of them, the same every time. It ends by a signal or by an exception where libFuzzer
// would report a crash.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <vector>

#include "base/splitmix.h"
#include "base/text.h"
#include "tests/fuzz/fuzz.h"

#define LOCKSTEP_FUZZ_TARGET(name) extern "C" int fuzz_##name(const std::uint8_t* data, std::size_t size);
#include "fuzz_targets.inc"
#undef LOCKSTEP_FUZZ_TARGET

namespace {

namespace fs = std::filesystem;

using Target = int (*)(const std::uint8_t*, std::size_t);

const std::map<std::string, Target> kTargets = {
#define LOCKSTEP_FUZZ_TARGET(name) {#name, fuzz_##name},
#include "fuzz_targets.inc"
#undef LOCKSTEP_FUZZ_TARGET
};

std::vector<std::string> read_corpus(int count, char** directories) {
  std::vector<fs::path> paths;
  for (int i = 0; i < count; ++i)
    for (const auto& entry : fs::directory_iterator(directories[i]))
      if (entry.path().extension() != ".py" && entry.path().extension() != ".json") paths.push_back(entry.path());
  std::ranges::sort(paths);
  std::vector<std::string> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

// One to four of: a byte or a word overwritten, a part taken out, repeated, or taken from another file.
std::string mutated(const std::vector<std::string>& corpus, std::uint64_t seed) {
  lockstep::SplitMix64 random(seed);
  const auto below = [&](std::size_t bound) {
    return random.below(static_cast<std::uint32_t>(std::max<std::size_t>(bound, 1)));
  };
  std::string input = corpus[below(corpus.size())];
  for (std::uint32_t times = 1 + below(4); times > 0; --times) {
    const std::size_t at = below(input.size() + 1), length = below(std::min<std::size_t>(input.size() - at, 64) + 1);
    const std::string& other = corpus[below(corpus.size())];
    constexpr unsigned char kInteresting[] = {0, 1, 0x7f, 0x80, 0xff};
    switch (below(6)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(random.next());
        break;
      case 1:
        for (std::size_t i = at; i < std::min(input.size(), at + 8); ++i)
          input[i] = static_cast<char>(kInteresting[below(std::size(kInteresting))]);
        break;
      case 2: input.erase(at, length); break;
      case 3: input.insert(at, input.substr(at, length)); break;
      case 4: input.insert(at, other.substr(below(other.size() + 1), length)); break;
      default: input.resize(at); break;
    }
  }
  return input;
}

void run(Target target, const std::string& input) {
  target(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  const auto target = argc < 4 ? kTargets.end() : kTargets.find(argv[1]);
  const auto mutations = argc < 4 ? std::nullopt : lockstep::parse_int(argv[2]);
  if (target == kTargets.end() || !mutations) {
    std::fprintf(stderr, "usage: fuzz_driver TARGET MUTATIONS DIRECTORY…\n");
    return 2;
  }
  const auto corpus = read_corpus(argc - 3, argv + 3);
  if (corpus.empty()) {
    std::fprintf(stderr, "the corpus is empty\n");
    return 1;
  }
  for (const std::string& input : corpus) run(target->second, input);
  run(target->second, "");
  for (std::int64_t i = 0; i < *mutations; ++i) run(target->second, mutated(corpus, static_cast<std::uint64_t>(i) + 1));
  std::printf("%s: %zu files, %lld mutations\n", argv[1], corpus.size(), static_cast<long long>(*mutations));
  return 0;
}

#include "tests/program/command.h"

#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace lockstep::testing {

Outcome run(const std::string& line, const std::filesystem::path& directory, int seconds,
            const std::filesystem::path& program) {
  const auto bin = program.parent_path();
  const std::string shell = "cd '" + directory.string() + "' && PATH='" + bin.string() +
                            "':$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 CUDA_VISIBLE_DEVICES= "
                            "timeout --kill-after=5 " +
                            std::to_string(seconds) + " bash -c '" + line + "' </dev/null >.out 2>.err";
  const int status = std::system(shell.c_str());
  Outcome outcome;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.out = read_file(directory / ".out");
  outcome.err = read_file(directory / ".err");
  return outcome;
}

std::string on_ranks(int ranks) {
  if (ranks == 1) return {};
  return "LOCKSTEP_TEST_GROUP=tcp " LOCKSTEP_SOURCE_DIR "/tests/support/run_ranks " + std::to_string(ranks) + " ";
}

std::string big_endian(std::uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift & 0xff);
  return bytes;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string bf16_of_cpu() {
  const TemporaryDirectory directory;
  const std::string all = run("lockstep version", directory.path()).out, before = "bf16: ";
  const auto begin = all.find(before);
  if (begin == std::string::npos) return "";
  return all.substr(begin + before.size(), all.find(')', begin) - begin - before.size());
}

}  // namespace lockstep::testing

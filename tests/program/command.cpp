#include "tests/program/command.h"

#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "tests/support/json.h"

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
  outcome.line = line;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.out = read_file(directory / ".out");
  outcome.err = read_file(directory / ".err");
  return outcome;
}

Outcome ended_well(Outcome outcome) {
  if (outcome.code != 0) throw std::runtime_error(::testing::PrintToString(outcome));
  return outcome;
}

Outcome run_well(const std::string& line, const std::filesystem::path& directory, int seconds,
                 const std::filesystem::path& program) {
  return ended_well(run(line, directory, seconds, program));
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

std::vector<std::string> error_lines(const std::string& said) {
  std::vector<std::string> errors;
  for (const auto& line : lines_of(said))
    if (line.find("error: ") != std::string::npos && line.find("lockstep:   |") == std::string::npos)
      errors.push_back(line);
  return errors;
}

std::vector<BadInput> bad_inputs(std::string_view table) {
  std::vector<BadInput> cases;
  std::string code, start, rest;
  for (const auto& line : lines_of(std::string(table.substr(1)))) {
    if (line[0] != ' ') {
      code = line.substr(0, line.find(' '));
      start = line.size() > 1 ? line.substr(2) + " " : "";
      continue;
    }
    const auto bar = line.find(" | ");
    if (rest.empty()) rest = line.substr(2, bar == std::string::npos ? bar : bar - 2);
    if (bar == std::string::npos) continue;
    std::string says = line.substr(bar + 3);
    if (says.ends_with("\\s")) says.replace(says.size() - 2, 2, " ");
    cases.push_back({start + rest, std::stoi(code), says});
    rest.clear();
  }
  return cases;
}

Outcome expect_refused(const BadInput& input, const std::filesystem::path& directory) {
  SCOPED_TRACE(::testing::PrintToString(input));
  auto outcome = run(input.line, directory);
  EXPECT_EQ(outcome.code, input.code) << outcome.out << outcome.err;
  using ::testing::AllOf, ::testing::ElementsAre, ::testing::HasSubstr;
  EXPECT_THAT(error_lines(outcome.err + outcome.out), ElementsAre(AllOf(HasSubstr(input.says), HasSubstr("→"))))
      << outcome.out << outcome.err;
  return outcome;
}

std::string bf16_of_cpu() {
  const TemporaryDirectory directory;
  const std::string all = run("lockstep version", directory.path()).out, before = "bf16: ";
  const auto begin = all.find(before);
  if (begin == std::string::npos) return "";
  return all.substr(begin + before.size(), all.find(')', begin) - begin - before.size());
}

void write_plain(const std::filesystem::path& to, const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  auto header = json_in(file.substr(sizeof length, length));
  header.erase("__metadata__");
  const std::string text = header.dump(), rest = file.substr(sizeof length + length);
  length = text.size();
  write_file(to, std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + rest);
}

}  // namespace lockstep::testing

// Runs a command and keeps what it said.
#pragma once

#include <sched.h>

#include <gmock/gmock.h>

#include <cstdint>
#include <filesystem>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace lockstep::testing {

struct Outcome {
  int code = -1;  // exit code; 128 + n for signal n
  std::string out, err;
  std::string line = {};
};
inline void PrintTo(const Outcome& outcome, std::ostream* to) {
  *to << outcome.line << "\nended with " << outcome.code << "\n" << outcome.out << outcome.err;
}

/// Of an Outcome: it ended with this code, and stderr has all of these texts.
template <class... Texts>
auto fails_with(int code, const Texts&... texts) {
  using ::testing::AllOf, ::testing::Field, ::testing::HasSubstr;
  return AllOf(Field("code", &Outcome::code, code), Field("err", &Outcome::err, AllOf(HasSubstr(texts)...)));
}

/// Runs `line` in a shell, stdin empty, in `directory`; ends it after `seconds`. `lockstep` in the line is the program
/// under test, `program`. It sees no GPU, on machines that have some neither: CUDA_VISIBLE_DEVICES is empty.
Outcome run(const std::string& line, const std::filesystem::path& directory, int seconds = 120,
            const std::filesystem::path& program = LOCKSTEP_PROGRAM);

/// The same outcome, which must have the exit code 0: a test ends at one that has another, and shows what it said.
Outcome ended_well(Outcome outcome);
/// As run(), of a line that must end well.
Outcome run_well(const std::string& line, const std::filesystem::path& directory, int seconds = 120,
                 const std::filesystem::path& program = LOCKSTEP_PROGRAM);

/// What starts the rest of a line as `ranks` ranks; nothing for one. Without mpirun and the launcher, which take longer
/// than most runs: for tests of neither.
std::string on_ranks(int ranks);

/// As IDX files have numbers.
std::string big_endian(std::uint32_t value);

/// The error lines among what a run wrote, without the launcher's account of the failure.
std::vector<std::string> error_lines(const std::string& said);

/// While it lives, programs that are started have two processors at most.
class OnTwoProcessors {
 public:
  OnTwoProcessors() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t two;
    CPU_ZERO(&two);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++cpu)
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &two);
    sched_setaffinity(0, sizeof two, &two);
  }
  ~OnTwoProcessors() { sched_setaffinity(0, sizeof before_, &before_); }
  OnTwoProcessors(const OnTwoProcessors&) = delete;
  OnTwoProcessors& operator=(const OnTwoProcessors&) = delete;

 private:
  cpu_set_t before_;
};

/// A command that is refused: its exit code, and what is on its one error line besides a remedy.
struct BadInput {
  std::string line;
  int code;
  std::string says;
};
inline void PrintTo(const BadInput& input, std::ostream* to) {
  *to << input.line << " → " << input.code << " " << input.says;
}

/// A line that is not indented has the exit code of the cases after it, and how their commands start. Each case is the
/// rest of the command, " | " and a text of the error (\s is a space at its end), on one line or, if that is long, two.
std::vector<BadInput> bad_inputs(std::string_view table);

/// That it is so. Returns what it said.
Outcome expect_refused(const BadInput& input, const std::filesystem::path& directory);

/// The lines of a text.
std::vector<std::string> lines_of(const std::string& text);

/// Writes the content of a safetensors file without what lockstep says of its model, as other programs' files are.
void write_plain(const std::filesystem::path& to, const std::string& file);

/// How the CPU computes bf16, as `lockstep version` has it: "AVX512-BF16", "not on this CPU".
std::string bf16_of_cpu();

}  // namespace lockstep::testing

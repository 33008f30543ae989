// Runs a command and keeps what it said.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace lockstep::testing {

struct Outcome {
  int code = -1;  // exit code; 128 + n for signal n
  std::string out, err;
};

/// Runs `line` in a shell, stdin empty, in `directory`; ends it after `seconds`. `lockstep` in the line is the program
/// under test, `program`. It sees no GPU, on machines that have some neither: CUDA_VISIBLE_DEVICES is empty.
Outcome run(const std::string& line, const std::filesystem::path& directory, int seconds = 120,
            const std::filesystem::path& program = LOCKSTEP_PROGRAM);

/// What starts the rest of a line as `ranks` ranks; nothing for one. Without mpirun and the launcher, which take longer
/// than most runs: for tests of neither.
std::string on_ranks(int ranks);

/// As IDX files have numbers.
std::string big_endian(std::uint32_t value);

/// The lines of a text.
std::vector<std::string> lines_of(const std::string& text);

/// How the CPU computes bf16, as `lockstep version` has it: "AVX512-BF16", "not on this CPU".
std::string bf16_of_cpu();

}  // namespace lockstep::testing

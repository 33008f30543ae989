#include "launcher/hosts/stale_dirs.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "launcher/process.h"

namespace lockstep::launcher {
namespace {

std::string token_path(const std::string& directory) { return directory + "/token"; }

}  // namespace

void write_token(const std::string& directory, const std::string& token) {
  std::ofstream file(token_path(directory));
  file << token << std::flush;
  check_system(bool(file), "writing to " + directory);
}

void remove_stale_dirs(const std::string& directory, const std::string& token) {
  std::ifstream file(token_path(directory));
  if (token.empty() || std::string(std::istreambuf_iterator<char>(file), {}) != token) return;
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
}

}  // namespace lockstep::launcher

#include "tests/faults/injection.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::faults {
namespace {

using namespace std::chrono_literals;

constexpr std::array<const char*, 9> kPlaces = {"main",       "start",      "data", "forward", "backward",
                                                "evaluation", "checkpoint", "save", "exit"};

struct Fault {
  std::string at, what;
  std::int64_t count = 1;
};

std::int64_t number_of(const std::string& text) {
  const auto number = parse_int(text);
  LOCKSTEP_ASSERT(number, "LOCKSTEP_TEST_FAULT: {} is no number", text);
  return *number;
}

std::string first_of(std::initializer_list<const char*> variables) {
  for (const char* variable : variables)
    if (const auto value = env(variable)) return *value;
  return "0";
}

/// The launcher and the ranks' wrappers are the same program.
bool trains() {
  std::ifstream words("/proc/self/cmdline", std::ios::binary);
  std::string word;
  std::getline(words, word, '\0');
  std::getline(words, word, '\0');
  return word == "train";
}

/// This rank's, if this attempt has any.
std::optional<Fault> parse() {
  const auto text = env("LOCKSTEP_TEST_FAULT");
  if (!text || !trains() || env("LOCKSTEP_SPARE")) return std::nullopt;
  Fault fault;
  std::string rank = "0", attempt = "0";
  for (const std::string& word : split(*text, ' ')) {
    const auto equals = word.find('=');
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    if (name == "rank") rank = value;
    if (name == "attempt") attempt = value;
    if (name == "at") fault.at = value;
    if (name == "do") fault.what = value;
    if (name == "count") fault.count = number_of(value);
  }
  if (rank != first_of({"OMPI_COMM_WORLD_RANK", "RANK"})) return std::nullopt;
  if (attempt != "-1" && attempt != first_of({"LOCKSTEP_ATTEMPT"})) return std::nullopt;
  return fault;
}

std::string file(const char* name) { return env("LOCKSTEP_TEST_FAULT_DIR").value_or(".") + "/" + name; }

void hold() {
  while (::access(file("go").c_str(), F_OK) != 0) std::this_thread::sleep_for(2ms);
}

void eat() {
  constexpr std::size_t kPiece = std::size_t{16} << 20;
  static std::vector<std::vector<char>> eaten;
  for (;;) eaten.emplace_back(kPiece, '\1');
}

bool act(const std::string& what) {
  if (what == "kill") ::kill(::getpid(), SIGKILL);
  if (what == "stop") ::kill(::getpid(), SIGSTOP);
  if (what == "segv") ::raise(SIGSEGV);
  if (what == "throw") throw std::runtime_error("an exception of the test's");
  if (what == "bad-data") throw IoError("sample 7 of the test's data cannot be read", "read other data");
  if (what == "exit0") ::_exit(0);
  if (what == "eat") eat();
  if (what == "hold") hold();
  if (what == "slow") std::this_thread::sleep_for(500ms);
  if (what == "loop")
    for (volatile bool forever = true; forever;) continue;
  return what == "eio";
}

}  // namespace

bool reach(Place place) {
  static const auto& fault = *new std::optional<Fault>(parse());  // the process's end is one of the places
  if (!fault || fault->at != kPlaces[static_cast<std::size_t>(place)]) return false;
  static std::atomic<std::int64_t> visits = 0;
  const std::int64_t visit = ++visits;
  if (visit < fault->count || (visit > fault->count && fault->what != "slow")) return false;
  if (visit == fault->count) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    std::ofstream(file("reached.new")) << std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
    std::rename(file("reached.new").c_str(), file("reached").c_str());
  }
  return act(fault->what);
}

}  // namespace lockstep::faults

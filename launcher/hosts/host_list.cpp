#include "launcher/hosts/host_list.h"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <functional>

#include "base/error.h"
#include "base/text.h"
#include "launcher/options.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kMaxHostfileBytes = 1 << 20;
constexpr std::size_t kMaxNameBytes = 255;

/// Where a word stood, for messages, and what is expected there.
struct Place {
  std::string where;   // "--hosts" or "hosts.txt:3"
  std::string remedy;  // "write a:4,b:4"
};

[[noreturn]] void fail(const Place& place, const std::string& what) {
  throw UsageError(fmt::format("{}: {}", place.where, what), place.remedy);
}

std::string shown(std::string_view word) {
  constexpr std::size_t kLongest = 60;
  std::string text(utf8_prefix(word, kLongest));
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return fmt::format("'{}'{}", text, word.size() > kLongest ? "…" : "");
}

/// Names go to the remote agent, to mpirun and into a shell's words: nothing but what names and addresses are made of,
/// and no leading '-', which would be a flag.
bool is_name(std::string_view text, bool brackets) {
  return !text.empty() && text.size() <= kMaxNameBytes && text.front() != '-' &&
         std::ranges::all_of(text, [&](unsigned char c) {
           return (std::isalnum(c) != 0 && c < 0x80) || c == '.' || c == '-' || c == '_' ||
                  (brackets && (c == ':' || c == '%'));
         });
}

int parse_slots(std::string_view text, const Place& place) {
  const auto slots = parse_int(text);
  if (!slots || *slots < 1 || *slots > kMaxRanks)
    fail(place, fmt::format("{} is no number of slots from 1 to {}", shown(text), kMaxRanks));
  return static_cast<int>(*slots);
}

std::string parse_user(std::string_view text, const Place& place) {
  if (!is_name(text, false)) fail(place, fmt::format("{} is no name of a user", shown(text)));
  return std::string(text);
}

/// "[user@]name[:slots]"
HostSpec parse_word(std::string_view word, const Place& place) {
  HostSpec host;
  std::string_view rest = word;
  if (const auto at = rest.find('@'); at != std::string_view::npos) {
    host.user = parse_user(rest.substr(0, at), place);
    rest.remove_prefix(at + 1);
  }
  const bool brackets = rest.starts_with('[') && rest.find(']') != std::string_view::npos;
  std::string_view name = rest.substr(0, rest.find(':'));
  if (brackets) {
    const auto end = rest.find(']');
    name = rest.substr(1, end - 1);
    rest.remove_prefix(end + 1);
    if (!rest.empty() && rest.front() != ':') fail(place, fmt::format("{} is no host", shown(word)));
  } else {
    rest.remove_prefix(name.size());
  }
  if (!is_name(name, brackets)) fail(place, fmt::format("{} is no name of a host", shown(word)));
  host.name = name;
  if (!rest.empty()) host.slots = parse_slots(rest.substr(1), place);
  return host;
}

/// Hosts as they are named one after the other.
class Listing {
 public:
  void add(HostSpec host, const Place& place) {
    auto known = std::ranges::find(hosts_, host.name, &HostSpec::name);
    if (known == hosts_.end()) {
      known = hosts_.insert(known, {host.name, host.user, 0});
      without_number_.push_back(0);
    }
    if (known->user != host.user)
      fail(place, fmt::format("host {} is named for two users, '{}' and '{}'", host.name, known->user, host.user));
    known->slots += host.slots;
    if (host.slots == 0) ++without_number_[static_cast<std::size_t>(known - hosts_.begin())];
  }
  /// A host that is named once, without a number, has 0 slots: nobody said.
  std::vector<HostSpec> finish(const Place& place) {
    long long total = 0;
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      if (hosts_[i].slots > 0 || without_number_[i] > 1) hosts_[i].slots += without_number_[i];
      total += hosts_[i].slots;
    }
    if (total > kMaxRanks) fail(place, fmt::format("{} slots, where a job has at most {} ranks", total, kMaxRanks));
    return std::move(hosts_);
  }

 private:
  std::vector<HostSpec> hosts_;
  std::vector<int> without_number_;  // how often each host was named so
};

/// `slots=4`, `max_slots = 8`: Open MPI lets blanks stand around the '='.
std::vector<std::string> words_in(std::string_view line) {
  std::string text;
  for (const char c : line) {
    if (c == '=' && !text.empty()) {
      while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.pop_back();
      text += c;
    } else if ((c == ' ' || c == '\t') && text.ends_with('=')) {
      continue;
    } else {
      text += c;
    }
  }
  return words_of(text);
}

HostSpec parse_line(const std::vector<std::string>& words, const Place& place) {
  HostSpec host = parse_word(words.front(), place);
  int most = kMaxRanks;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const auto equals = words[i].find('=');
    const std::string key = words[i].substr(0, equals);
    if (equals == std::string::npos) fail(place, fmt::format("{} is not understood", shown(words[i])));
    const std::string value = words[i].substr(equals + 1);
    if (key == "slots" || key == "cpu" || key == "count") {
      if (host.slots > 0) fail(place, fmt::format("host {} has two numbers of slots", host.name));
      host.slots = parse_slots(value, place);
    } else if (key == "max_slots" || key == "max-slots" || key == "slots_max" || key == "slots-max") {
      most = parse_slots(value, place);
    } else if (key == "user" || key == "username" || key == "user-name" || key == "user_name") {
      host.user = parse_user(value, place);
    } else {
      const std::vector<std::string> known = {"slots", "max_slots", "user"};
      const auto close = nearest(key, known);
      fail(place, fmt::format("{} is not understood{}", shown(words[i]), close ? ", " + *close + "= is" : ""));
    }
  }
  if (host.slots > most) fail(place, fmt::format("slots={} is more than max_slots={}", host.slots, most));
  return host;
}

}  // namespace

std::string HostSpec::mpirun_name() const {
  std::string plain = name;
  std::ranges::replace_if(
      plain, [](unsigned char c) { return std::isalnum(c) == 0 && c != '.' && c != '-'; }, '-');
  if (plain == name) return name;
  return fmt::format("host-{}-{:08x}", plain, static_cast<std::uint32_t>(std::hash<std::string>()(name)));
}

std::vector<HostSpec> parse_hosts(std::string_view list) {
  const Place place{"--hosts", "list hosts and slots, as in --hosts a:4,b:4"};
  Listing listing;
  for (const auto& word : split(list, ',')) {
    if (trim(word).empty()) fail(place, fmt::format("{} names no host at one of its commas", shown(list)));
    listing.add(parse_word(trim(word), place), place);
  }
  return listing.finish(place);
}

std::vector<HostSpec> parse_hostfile(std::string_view text, const std::string& path) {
  constexpr const char* kExpected = "a line is HOST, HOST slots=N or HOST:N";
  Listing listing;
  std::size_t number = 0;
  for (const auto& whole : split(text, '\n')) {
    ++number;
    const auto words = words_in(std::string_view(whole).substr(0, std::min(whole.find('#'), whole.find("//"))));
    const Place place{fmt::format("{}:{}", path, number), kExpected};
    if (!words.empty()) listing.add(parse_line(words, place), place);
  }
  auto hosts = listing.finish({path, kExpected});
  if (hosts.empty()) fail({path, kExpected}, "it names no host");
  return hosts;
}

std::vector<HostSpec> read_hostfile(const std::string& path) {
  // Nobody may ever write into a FIFO, and the rest has no end.
  struct stat found = {};
  if (::stat(path.c_str(), &found) == 0 && !S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode))
    throw UsageError(fmt::format("the host file {} is {}", path, S_ISFIFO(found.st_mode) ? "a pipe" : "no plain file"),
                     "--hostfile takes a plain file with one host per line");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxHostfileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || !file.is_open() || (file.gcount() == 0 && !file.eof()))
    throw UsageError(fmt::format("cannot read the host file {}: {}", path, errno_text(errno != 0 ? errno : EIO)),
                     "--hostfile takes a file with one host per line");
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxHostfileBytes)
    throw UsageError(fmt::format("the host file {} is larger than 1 MiB", path), "is it a host file?");
  return parse_hostfile(text, path);
}

std::vector<int> place_ranks(std::span<const HostSpec> hosts, int ranks) {
  int total = 0;
  for (const auto& host : hosts) total += host.slots;
  if (ranks > total)
    throw UsageError(fmt::format("launch: {} ranks, but the hosts have {} slot{} ({})", ranks, total,
                                 total == 1 ? "" : "s", text_of(hosts)),
                     fmt::format("start at most {}, or give a host more slots, as in {}:{}", total, hosts.front().name,
                                 hosts.front().slots + ranks - total));
  int left = ranks > 0 ? ranks : total;
  std::vector<int> placed;
  for (const auto& host : hosts) {
    placed.push_back(std::min(left, host.slots));
    left -= placed.back();
  }
  return placed;
}

std::string text_of(std::span<const HostSpec> hosts) {
  constexpr std::size_t kMost = 8;
  std::vector<std::string> texts;
  for (const auto& host : hosts.first(std::min(hosts.size(), kMost)))
    texts.push_back(fmt::format("{}:{}", host.name, host.slots));
  if (hosts.size() > kMost) texts.push_back(fmt::format("and {} more", hosts.size() - kMost));
  return join(texts, ", ");
}

}  // namespace lockstep::launcher

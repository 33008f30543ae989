#include "launcher/hosts/greeting.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "base/error.h"
#include "base/hash.h"
#include "base/scope.h"
#include "base/text.h"
#include "base/version.h"
#include "launcher/mpirun_command.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

constexpr std::string_view kMagic = "lockstep-host 1 ";

std::string sha256_of_this_binary() {
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  if (!file) throw IoError("cannot read this program's file: " + errno_text(errno));
  Sha256 sum;
  std::vector<char> chunk(1 << 20);
  for (;;) {
    const ssize_t got = ::read(file.get(), chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError("cannot read this program's file: " + errno_text(errno));
    if (got == 0) return sum.finish();
    sum.update(std::string_view(chunk.data(), static_cast<std::size_t>(got)));
  }
}

/// A value without blanks and control characters.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte <= ' ' || byte >= 0x7f || byte == '%') {
      out += fmt::format("%{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string unescaped(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](std::size_t at) -> int {
      const auto found =
          at < text.size() ? std::string_view("0123456789abcdef").find(text[at]) : std::string_view::npos;
      return found == std::string_view::npos ? -1 : static_cast<int>(found);
    };
    const int high = digit(i + 1), low = digit(i + 2);
    if (text[i] != '%' || high < 0 || low < 0) {
      out += text[i];
      continue;
    }
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

std::string build_text(const Greeting& greeting) {
  return fmt::format("lockstep {} (git {}, binary {})", greeting.version, greeting.revision,
                     utf8_prefix(greeting.sha256, 12));
}

}  // namespace

Greeting own_greeting(int gpus) {
  Greeting greeting;
  greeting.version = version();
  greeting.revision = git_revision();
  greeting.sha256 = sha256_of_this_binary();
  greeting.cores = usable_cores();
  greeting.gpus = gpus;
  greeting.host = host_name();
  greeting.interfaces = read_interfaces();
  const auto connection = split(env("SSH_CONNECTION").value_or(""), ' ');  // client, its port, server, its port
  if (connection.size() == 4) {
    greeting.reached_from = connection[0];
    greeting.reached_at = connection[2];
  }
  return greeting;
}

std::string to_line(const Greeting& greeting) {
  return fmt::format("{}version={} revision={} sha256={} cores={} gpus={} host={} interfaces={} at={} from={}", kMagic,
                     escaped(greeting.version), escaped(greeting.revision), greeting.sha256, greeting.cores,
                     greeting.gpus, escaped(greeting.host), escaped(interfaces_text(greeting.interfaces)),
                     escaped(greeting.reached_at), escaped(greeting.reached_from));
}

std::optional<Greeting> parse_greeting(std::string_view line) {
  // A login shell may have printed text without an end of line before it.
  const auto at = line.find(kMagic);
  if (at == std::string_view::npos) return std::nullopt;
  std::map<std::string, std::string> fields;
  for (const auto& word : split(trim(line.substr(at + kMagic.size())), ' ')) {
    const auto equals = word.find('=');
    if (equals != std::string::npos) fields[word.substr(0, equals)] = unescaped(word.substr(equals + 1));
  }
  Greeting greeting;
  greeting.version = fields["version"];
  greeting.revision = fields["revision"];
  greeting.sha256 = fields["sha256"];
  greeting.cores = static_cast<int>(std::clamp<std::int64_t>(parse_int(fields["cores"]).value_or(1), 1, 1 << 16));
  greeting.gpus = static_cast<int>(std::clamp<std::int64_t>(parse_int(fields["gpus"]).value_or(0), 0, 1 << 16));
  greeting.host = fields["host"];
  greeting.interfaces = parse_interfaces(fields["interfaces"]);
  greeting.reached_at = fields["at"];
  greeting.reached_from = fields["from"];
  return greeting;
}

std::string difference(const Greeting& theirs, const Greeting& ours) {
  if (theirs.version == ours.version && theirs.revision == ours.revision && theirs.sha256 == ours.sha256) return {};
  return fmt::format("it has {}, this host {}", build_text(theirs), build_text(ours));
}

}  // namespace lockstep::launcher
